"""What a decode step costs where heads hold unequal numbers of entries: `python benchmarks/heads.py`.

One layer of 8 KV heads × 128 in bfloat16, four query heads each, in one process: caches with the same total of entries,
which their heads share equally or by the shares below. The caches take turns in an order that is drawn anew each time.
Every step adds a token, and before each step other memory is read, so that nothing of a KV cache is left in the
processor's caches. A row for every way to share goes to docs/results/heads.jsonl.
"""

import argparse
import random
import statistics
from functools import partial

import torch

from common import seconds, write_row
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens
from kvsketch.caches.forgetting.uniform import Uniform
from kvsketch.evaluation.speed.clock import Memory
from kvsketch.kernels import native

WIDTH, HEADS, GROUP = 128, 8, 4
SHARES = {  # of the budget, for each head; 1 on average
    "equal": [1.0] * HEADS,
    "in eight steps": [(1 + head) / 4.5 for head in range(HEADS)],
    "1/4 to 9/4": [0.25, 0.25, 0.25, 0.5, 0.75, 1.5, 2.25, 2.25],
    "halving": [HEADS / 2 ** (head + 1) for head in range(HEADS - 1)] + [HEADS / 2 ** (HEADS - 1)],
    "nearly all in one head": [HEADS - 0.25] + [0.25 / (HEADS - 1)] * (HEADS - 1),
}
BETWEEN = 640 * 10**6  # bytes of other memory that are read between steps


def filled(keep: float, rows: int, count: int, shares: list[float]) -> LayerCache:
    """A layer's cache of `count` tokens, whose heads have these shares of the budget."""

    def given(layer: int, heads: int, budget: Budget) -> list[float]:
        return shares

    cache = LayerCache(Uniform(keep=keep), 0, shares=given)
    keys, values = (torch.randn(rows, HEADS, count, WIDTH, dtype=torch.bfloat16) for _ in range(2))
    cache.hold(NewTokens(keys, values))
    return cache


@torch.no_grad()
def measure(rows: int, count: int, keep: float, steps: int, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    draw, memory = random.Random(0), Memory(BETWEEN)
    caches = {name: filled(keep, rows, count, shares) for name, shares in SHARES.items()}
    times: dict[str, list[float]] = {name: [] for name in caches}
    for _ in range(steps + 1):
        query = torch.randn(rows, HEADS * GROUP, 1, WIDTH, dtype=torch.bfloat16)
        new = NewTokens(*(torch.randn(rows, HEADS, 1, WIDTH, dtype=torch.bfloat16) for _ in range(2)))
        for name in draw.sample(list(caches), len(caches)):
            memory.pass_over()
            times[name].append(seconds(partial(caches[name].read, query, new, WIDTH**-0.5, lse=False)))
    equal = times["equal"][1:]
    for name, cache in caches.items():
        taken = times[name][1:]
        ratios = [own / other for own, other in zip(taken, equal, strict=True)]
        held = cache.count_entries()
        write_row("heads", {
            "shares": name, "rows": rows, "tokens": count, "kv_heads": HEADS, "group": GROUP, "width": WIDTH,
            "keep": keep, "dtype": "bfloat16", "kernel": native.name(), "threads": threads, "steps": steps,
            "entries": int(held.sum()), "least": int(held.min()), "most": int(held.max()),
            "ms": round(1e3 * statistics.median(taken), 3),
            "ms_quartiles": [round(1e3 * q, 3) for q in statistics.quantiles(taken, n=4)],
            "of_equal": round(statistics.median(ratios), 3),
            "of_equal_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)],
        })  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--keep", type=float, nargs="+", default=[0.125])
    parser.add_argument("--steps", type=int, default=101)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    for rows in arguments.rows:
        for keep in arguments.keep:
            measure(rows, arguments.tokens, keep, arguments.steps, arguments.threads)
