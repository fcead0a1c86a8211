"""How far answers are from exact ones when queries read a part of the past: Saap's study of selectivity.

Paper: Saap (2025), appendix B with Figure 5 and appendix E.4 with Figure 10. A text is cut as `attention_span` cuts it.
The last tokens ask: each attends exactly to sinks, window and the asking tokens up to itself, and of the past it reads
what a cache finds. All numbers are in float32 at least, so that the errors are the method's alone.
"""

from dataclasses import dataclass, replace

import torch
from benchmarks.selectivity.attention_span import Cut
from benchmarks.selectivity.plan import Trial
from jaxtyping import Float
from torch import Tensor

from kvsketch.attention import Partial, exact_attention, merge
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.lanes import Lanes
from kvsketch.caches.core.query import Query
from kvsketch.caches.core.tokens import Columns, Seen
from kvsketch.caches.lookup.config import LookupConfig, SortedConfig
from kvsketch.evaluation.results.rows import Row
from kvsketch.huggingface.capture import Captured


@dataclass(frozen=True)
class Case:
    """One layer of a text: the queries that ask, the past, and exact attention over the past and over the rest."""

    layer: int
    query: Query
    keys: Float[Tensor, "1 h n d"]  # of the past
    values: Float[Tensor, "1 h n e"]
    unrotated: Float[Tensor, "1 h n d"] | None
    past_attention: Partial
    rest_attention: Partial  # sinks, window, and the tokens that ask, each up to itself

    @property
    def count(self) -> int:
        """Tokens of the past."""
        return self.keys.shape[2]


def case_of(seen: Captured, cut: Cut) -> Case:
    """The case that a captured layer makes."""
    tokens = seen.keys.shape[1]
    past = cut.past(tokens)

    def precise(x: Tensor) -> Tensor:
        return x[None].to(torch.promote_types(x.dtype, torch.float32))

    queries, keys, values = precise(seen.queries[:, -cut.asking :]), precise(seen.keys), precise(seen.values)
    before = None if seen.queries_before is None else precise(seen.queries_before[:, -cut.asking :])
    keys_before = None if seen.keys_before is None else precise(seen.keys_before[:, past])
    places = torch.arange(tokens, device=keys.device)
    rest = (places <= places[-cut.asking :, None]) & ((places < past.start) | (places >= past.stop))
    query = Query(queries, seen.scale, seen.softcap, before, places[None, -cut.asking :])
    keys_of_past, values_of_past = keys[:, :, past], values[:, :, past]
    past_attention = exact_attention(queries, keys_of_past, values_of_past, seen.scale, softcap=seen.softcap)
    rest_attention = exact_attention(queries, keys, values, seen.scale, visible=rest[None, None], softcap=seen.softcap)
    return Case(seen.layer, query, keys_of_past, values_of_past, keys_before, past_attention, rest_attention)


def measure(case: Case, trial: Trial) -> Row:
    """Errors of a method's answers, and how much it read and found: over all heads, and head by head.

    `read` is the share of the past that was read, `recall` what share of the attention to the past these tokens have,
    both means over queries. `mse` is the paper's error; `error` is relative, one Frobenius norm over another.
    """
    answers = merge(case.past_attention, case.rest_attention).out[0]
    given, read, recall = case.rest_attention.out[0], torch.zeros(case.keys.shape[1]), torch.zeros(len(answers))
    if trial.config is not None:
        found = filled(case, trial.config).answer(case.query)
        assert found.attended is not None, "there are tokens"
        assert found.read is not None, "some of them"
        rest = [case.rest_attention] if found.estimated is None else [case.rest_attention, found.estimated]
        given = merge(found.attended, *rest).out[0]
        read = found.read[0].double().mean(1) / case.count
        recall = (found.attended.lse - case.past_attention.lse)[0].exp().mean(1)
    wrong, size = (given - answers).square(), answers.square()
    relative = (wrong.sum((1, 2)) / size.sum((1, 2)).clamp_min(1e-30)).sqrt()
    return {
        "buckets": trial.buckets,
        "aim": trial.aim,
        "past": case.count,
        "read": float(read.mean()),
        "mse": float(wrong.mean()),
        "error": float((wrong.sum() / size.sum().clamp_min(1e-30)).sqrt()),
        "recall": float(recall.mean()),
        "kv_head_reads": read.tolist(),
        "head_mses": wrong.mean((1, 2)).tolist(),
        "head_errors": relative.tolist(),
        "head_recalls": recall.tolist(),
    }


def filled(case: Case, config: LookupConfig) -> Lanes:
    """What a cache holds of the text's past; if its method sorts tokens, it sorts all of them together."""
    if isinstance(config, SortedConfig):
        config = replace(config, staging=case.count)
    method = config.new_method(case.layer)
    lanes = Lanes(method, [[Budget(1.0, None, 0)] * case.keys.shape[1]])
    ranks = torch.arange(case.count, device=case.keys.device)[None]
    notes = method.note(Seen(case.keys, case.unrotated, ranks))
    lanes.write(Columns(case.keys, case.values, ranks, notes), [case.count], [False])
    return lanes
