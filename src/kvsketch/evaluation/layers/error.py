"""How far a layer's answers are from exact ones when the middle of a text is compressed: BalanceKV's study of layers.

Paper: BalanceKV (NeurIPS 2025), section 4.1 and appendix B.1. The first and the last `exact` tokens of a text are
kept, a method compresses the tokens between, and the last `exact` queries ask; each sees the tokens up to itself:

    [ first | middle | one | last ]     a cache is given first, middle, one in one call; then `last` asks
      exact   method   window  exact

Tokens leave a window in whole blocks and never leave it empty. So one token of the middle stays in the window, and up
to a block less one of the middle's first tokens are left out, for exact attention as for the methods. Then the whole
rest of the middle has left the window.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens
from kvsketch.caches.exact import Exact
from kvsketch.evaluation.layers.plan import Prompt, Study, Trial, middle_of
from kvsketch.evaluation.results.rows import Row, RowsFile
from kvsketch.huggingface.capture import Captured, capture

NORMS_KEY = ("prompt", "tokens", "layer")  # what norms depend on, besides the model


def run(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    layers: Sequence[int],
    study: Study,
    errors: RowsFile,
    norms: RowsFile,
) -> Iterator[tuple[str, int]]:
    """Measure rows that the files lack, one by one; yields what was just done, and how many trials that settled."""
    for prompt in prompts:
        missing = {layer: study.missing(prompt, layer, errors.done) for layer in layers}
        yield "reading", sum(len(study.trials) - len(trials) for trials in missing.values())
        wanted = [layer for layer, trials in missing.items() if trials]
        for seen in capture(model, prompt.ids, wanted) if wanted else ():
            norms.add([norms_row(prompt, seen)])
            case = cut(seen, study.exact)
            for trial in missing[seen.layer]:
                errors.add([study.labels(prompt, seen.layer, trial) | measure(case, trial)])
                yield f"layer {seen.layer}, {trial.method}", 1


@dataclass(frozen=True)
class Case:
    """A layer's keys, values and queries of a text, cut into tokens that a cache is given and those that ask."""

    layer: int
    context: NewTokens
    last: NewTokens
    queries: Float[Tensor, "1 hg q d"]
    scale: float
    softcap: float | None

    @property
    def exact(self) -> int:
        """How many tokens are kept at either end."""
        return self.queries.shape[2]

    @property
    def middle(self) -> int:
        """How many tokens between the two ends leave the window."""
        return self.context.keys.shape[2] - self.exact - 1

    @cached_property
    def answers(self) -> Float[Tensor, "hg q e"]:
        """The exact answers, computed in float32 at least."""
        precise = torch.promote_types(self.queries.dtype, torch.float32)
        context, last = (
            NewTokens(part.keys.to(precise), part.values.to(precise)) for part in (self.context, self.last)
        )
        cache = LayerCache(Exact(), self.layer)
        cache.hold(context)
        return cache.read(self.queries.to(precise), last, self.scale, self.softcap).out[0]


def cut(seen: Captured, exact: int) -> Case:
    """The tokens of a layer that a cache is given, and those that ask."""
    count = seen.keys.shape[1]
    after_first = count - exact - 1 - middle_of(count, exact)  # tokens between the first ones and here are left out
    stop = count - exact

    def without_gap(x: Tensor) -> Tensor:
        return torch.cat([x[:, :exact], x[:, after_first:stop]], 1)[None]

    last = NewTokens(seen.keys[None, :, stop:], seen.values[None, :, stop:])
    queries = seen.queries[None, :, stop:]
    return Case(
        seen.layer, NewTokens(without_gap(seen.keys), without_gap(seen.values)), last, queries, seen.scale, seen.softcap
    )


def measure(case: Case, trial: Trial) -> Row:
    """The relative error of a method's answers, together and for each query head; its entries, bytes and time."""
    cache = LayerCache(trial.with_budget(case.middle, case.exact), case.layer)
    device = case.queries.device
    began = _now(device)
    cache.hold(case.context)
    seconds = _now(device) - began
    entries = cache.count_entries()
    assert entries is not None, "the cache has tokens"
    nbytes = cache.nbytes
    cache.recording = True  # no query follows, so the tokens of `last` need not be compressed
    found = cache.read(case.queries, case.last, case.scale, case.softcap).out[0]
    wrong = (found.to(case.answers.dtype) - case.answers).square().sum((1, 2))
    size = case.answers.square().sum((1, 2)).clamp_min(1e-30)
    return {
        "entries": int(entries.max()),  # of any KV head
        "nbytes": nbytes,
        "error": float((wrong.sum() / size.sum()).sqrt()),
        "head_errors": (wrong / size).sqrt().tolist(),
        "seconds": seconds,  # to compress
    }


def norms_row(prompt: Prompt, seen: Captured) -> Row:
    """Norms of a layer's queries, of keys less their head's mean, and of values, over heads and tokens; as Table 3."""
    keys = seen.keys.double()
    vectors = {"queries": seen.queries, "keys": keys - keys.mean(1, keepdim=True), "values": seen.values}
    labels = zip(NORMS_KEY, (prompt.name, prompt.ids.shape[1], seen.layer), strict=True)
    return dict(labels) | {name: _spread(found.double().norm(dim=2)) for name, found in vectors.items()}


def _spread(norms: Tensor) -> dict[str, float | int]:
    return {"count": norms.numel(), "mean": float(norms.mean()), "deviation": float(norms.std(correction=0))}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
