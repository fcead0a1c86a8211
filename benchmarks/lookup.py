"""What a decode step costs that looks up few of many tokens: `python benchmarks/lookup.py`.

One layer in one process: 171,000 tokens × 8 KV heads × 128 in bfloat16, four query heads each, 32 of 1024 buckets. Keys
and values are random, and sizes of buckets are prescribed: equal, log-normal, or one with a fifth of all tokens. The
router has the published size and random weights, and its time is part of the step. Lookups are checked against the
definition, and the methods take turns: first after a dense pass, which leaves nothing of their data in the processor's
caches, and immediately once more. Also timed: labelling tokens and sorting them into buckets, a block at a time.
"""

import argparse
import statistics
from functools import partial
from unittest.mock import patch

import torch

from common import seconds, write_row
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.config import BLOCK
from kvsketch.caches.core.lanes import Lanes
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.query import Query
from kvsketch.caches.core.tokens import Columns, NewTokens, Seen, Unrotated
from kvsketch.caches.exact import Exact
from kvsketch.caches.lookup.saap import Saap, SaapLookup
from kvsketch.evaluation.speed.layer import dense_forms
from kvsketch.evaluation.speed.made import made_up, new_token
from kvsketch.evaluation.speed.plan import FOLDED, PRODUCTS, STOCK
from kvsketch.kernels.indexed_attention import reference

HEADS, GROUP, WIDTH = 8, 4, 128
SCALE = WIDTH**-0.5
LAYER = 1
SKEWS = ("equal", "lognormal", "one of a fifth")


def labels_of(kind: str, buckets: int, tokens: int) -> torch.Tensor:
    """The bucket of every token in every head; sizes of buckets are as `kind` says."""
    generator = torch.Generator().manual_seed(4)
    shares = torch.ones(HEADS, buckets)
    if kind == "lognormal":
        shares = torch.exp(0.7 * torch.randn(HEADS, buckets, generator=generator))
    if kind == "one of a fifth":
        shares[:, 0] = 0.25 * (buckets - 1)
    return torch.multinomial(shares, tokens, replacement=True, generator=generator)[None, :, :, None]


def filled(config: Saap, keys: torch.Tensor, values: torch.Tensor, labels: torch.Tensor) -> LayerCache:
    """A cache that holds each token in the bucket of its label."""
    cache = LayerCache(config, LAYER)
    with patch.object(SaapLookup, "note", return_value=labels):
        cache.hold(NewTokens(keys, values, None, Unrotated(keys, keys)))
    return cache


def token(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, NewTokens]:
    return new_token(HEADS, GROUP, WIDTH, dtype, step)


def check(cache: LayerCache, dtype: torch.dtype) -> None:
    """Check that a lookup agrees with its definition, up to the rounding of the dtype."""
    query, new = token(-1, dtype)
    asked = Query(query, SCALE, None, new.unrotated.queries)
    ((part,),) = cache.past.look(asked).unread
    exact = reference.attend(query.double(), part.pairs.double(), part.chosen().segments, SCALE)
    found = cache.past.answer(asked).attended
    error = (found.out.double() - exact.out).norm() / exact.out.norm()
    assert error < 2 * torch.finfo(dtype).eps, f"a lookup is {error:.1e} from its definition"


def writing(config: Saap, keys: torch.Tensor, values: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Seconds to label every block of tokens that leaves the window and to sort it in, from the first block on."""
    method, taken = config.new_method(LAYER), []
    lanes = Lanes(method, [[Budget(1.0, None, 0)] * HEADS])
    for start in range(0, keys.shape[2] - BLOCK, BLOCK):
        part = slice(start, start + BLOCK)
        ranks = torch.arange(start, start + BLOCK)[None]
        seen = Seen(keys[:, :, part], keys[:, :, part], ranks)
        block = Columns(keys[:, :, part], values[:, :, part], ranks, labels[:, :, part])
        taken.append(
            seconds(partial(method.note, seen)) + seconds(partial(lanes.write, block, [start + BLOCK], [False]))
        )
    return taken


def times_of(dense: dict, caches: dict[str, LayerCache], rounds: int, dtype: torch.dtype) -> dict[str, list[float]]:
    """Seconds of the steps of each form, taken in turn; the first step is left out."""
    times: dict[str, list[float]] = {name: [] for name in [*dense, *caches]}
    times |= {f"{kind}, again": [] for kind in SKEWS}
    for step in range(rounds + 1):
        query, new = token(step, dtype)
        for name in [*dense, *caches]:
            if name == "sdpa, grouped" and step > 3:
                continue  # twice as slow as the others
            run = partial(dense[name], query) if name in dense else partial(caches[name].read, query, new, SCALE)
            if name in SKEWS:  # as in a model of many layers: a pass of another layer came in between
                dense["sdpa, folded"](query)
            times[name].append(seconds(run))
            if name in SKEWS:  # and as if there were no other layer
                query, new = token(10_000 + step, dtype)
                times[f"{name}, again"].append(seconds(partial(caches[name].read, query, new, SCALE)))
    return {name: taken[1:] for name, taken in times.items()}


@torch.no_grad()
def measure(tokens: int, buckets: int, probes: int, hidden: int, rounds: int, threads: int) -> None:
    torch.set_num_threads(threads)
    dtype = torch.bfloat16
    generator = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(1, HEADS, tokens, WIDTH, generator=generator).to(dtype) for _ in range(2))
    forms = dense_forms(keys, values, GROUP, SCALE)
    dense = {"sdpa, folded": forms[FOLDED], "products": forms[PRODUCTS], "sdpa, grouped": forms[STOCK]}
    with made_up(HEADS, WIDTH, [LAYER], (buckets, hidden)) as ready:
        config = ready(Saap(probes=probes))
        write = writing(config, keys, values, labels_of(SKEWS[0], buckets, tokens))
        caches = {}
        for kind in SKEWS:
            caches[kind] = filled(config, keys, values, labels_of(kind, buckets, tokens))
            check(caches[kind], dtype)
        caches["exact"] = LayerCache(Exact(), LAYER)
        caches["exact"].hold(NewTokens(keys, values))
        times = times_of(dense, caches, rounds, dtype)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    best = min(medians[name] for name in ("sdpa, folded", "sdpa, grouped"))
    about = {
        "tokens": tokens, "kv_heads": HEADS, "group": GROUP, "width": WIDTH, "dtype": "bfloat16", "device": "cpu",
        "threads": threads, "buckets": buckets, "probes": probes, "hidden": hidden, "staging": config.staging,
    }  # fmt: skip
    for name, taken in times.items():
        read = caches[name].past.share_read() if name in SKEWS else None
        low, *_, high = statistics.quantiles(taken, n=20)
        write_row("lookup", {"what": name} | about | {
            "ms": round(1e3 * medians[name], 2), "ms_5": round(1e3 * low, 2), "ms_95": round(1e3 * high, 2),
            "rounds": len(taken), "best_sdpa_over_this": round(best / medians[name], 2),
            "exact_over_this": round(medians["exact"] / medians[name], 2),
            "products_over_this": round(medians["products"] / medians[name], 2),
            "read": None if read is None else round(float(read.mean()), 4),
        })  # fmt: skip
    per_token = {"ms": round(1e3 * sum(write) / tokens, 4), "longest_ms": round(1e3 * max(write), 1)}
    write_row("lookup", {"what": "labelled and sorted in, per token"} | about | per_token)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("tokens", 171_000),
        ("buckets", 1024),
        ("probes", 32),
        ("hidden", 1024),
        ("rounds", 40),
        ("threads", 2),
    ):
        options.add_argument(f"--{name}", type=int, default=default)
    measure(**vars(options.parse_args()))
