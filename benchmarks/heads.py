"""What a decode step costs where heads have unequal shares: `python benchmarks/heads.py`.

One layer, in one process: a cache whose heads share the budget equally, and one of the same total in which head h of 8
gets the share h + 1, or whose rows have unequal lengths too. They take turns, and every step brings a token.
"""

import argparse
import statistics

import torch

from common import seconds, write_row
from kvsketch.caches.core.allocation import SharesOf
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens
from kvsketch.caches.forgetting.uniform import Uniform

WIDTH, HEADS, GROUP = 64, 8, 4


def uneven(layer: int, heads: int, budget: Budget) -> list[float]:
    """The head with the number h gets the share h + 1."""
    return [2 * (1 + head) / (heads + 1) for head in range(heads)]


def filled(keep: float, rows: int, count: int, shares: SharesOf | None) -> LayerCache:
    """A layer's cache of so many tokens."""
    cache = LayerCache(Uniform(keep=keep), 0, shares=shares)
    keys, values = (torch.randn(rows, HEADS, count, WIDTH).bfloat16() for _ in range(2))
    cache.hold(NewTokens(keys, values))
    return cache


@torch.no_grad()
def measure(rows: int, count: int, keep: float, steps: int) -> None:
    torch.manual_seed(0)
    caches = {"equal": filled(keep, rows, count, None), "uneven": filled(keep, rows, count, uneven)}
    times: dict[str, list[float]] = {name: [] for name in caches}
    ratios = []
    for _ in range(steps):
        query = torch.randn(rows, HEADS * GROUP, 1, WIDTH).bfloat16()
        new = NewTokens(*(torch.randn(rows, HEADS, 1, WIDTH).bfloat16() for _ in range(2)))
        for name, cache in caches.items():
            times[name].append(
                seconds(lambda cache=cache, query=query, new=new: cache.read(query, new, 0.125, lse=False))
            )
        ratios.append(times["uneven"][-1] / times["equal"][-1])
    past = caches["uneven"].past
    assert past is not None, "tokens left the window"
    held = {name: int(cache.count_entries().sum()) for name, cache in caches.items()}
    write_row(
        "heads",
        {
            "rows": rows,
            "n": count,
            "heads": HEADS,
            "keep": keep,
            "steps": steps,
            "bundles": len(past.bundles),
            "entries": held,
            "bytes": {name: cache.nbytes for name, cache in caches.items()},
            "ms": {name: round(1e3 * statistics.median(taken), 3) for name, taken in times.items()},
            "ratio": round(statistics.median(ratios), 3),
            "ratio_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)],
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--keep", type=float, nargs="+", default=[0.25, 1.0])
    parser.add_argument("--steps", type=int, default=101)
    arguments = parser.parse_args()
    for rows in arguments.rows:
        for keep in arguments.keep:
            measure(rows, arguments.tokens, keep, arguments.steps)
