"""How much each KV head of a layer may hold: shares of the budget, apart from every method.

Heads of a layer have at most MOST_LEVELS different budgets, so that their lanes lie in as many dense bundles: shares
that are close to each other become their mean. The sum stays what it was.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvsketch.caches.core.budget import MOST, Budget, fixed_entries
from kvsketch.caches.core.config import MethodConfig

MOST_LEVELS = 4
LEAST_FRACTION = 1 / MOST


def budget_of(config: MethodConfig, layer_bytes: int | None, entry_bytes: int, rows: int) -> Budget:
    """What a head may hold where all hold the same; refuses less than the method needs.

    `layer_bytes` is the layer's share of a budget in bytes, `entry_bytes` what one entry of all rows and heads takes.
    """
    given, least = config.budget_given, config.least_entries()
    fixed = fixed_entries(given, layer_bytes, entry_bytes)
    if fixed is None:
        return Budget(given if isinstance(given, float) else None, None, config.floor())
    if fixed < least:
        raise ValueError(
            f"keep={given!r} leaves {fixed} entries per row and KV head in each layer, but "
            f"{config} needs at least {least} ({rows} rows, {least * entry_bytes:,} bytes a layer): "
            "give more bytes, or fewer sinks or a smaller window"
        )
    return Budget(None, fixed, least)


def budgets_of(budget: Budget, shares: Sequence[float]) -> list[Budget]:
    """The budget of each head, whose share of the mean budget this is; none is below what a method needs."""
    if len(set(shares)) == 1:
        return [budget] * len(shares)
    own = levels(shares, MOST_LEVELS)
    if budget.fixed is not None:
        return [replace(budget, fixed=int(part)) for part in filled(own, budget.fixed, budget.least, MOST)]
    assert budget.fraction is not None
    return [replace(budget, fraction=part) for part in filled(own, budget.fraction, LEAST_FRACTION, 1.0)]


def levels(shares: Sequence[float], most: int) -> list[float]:
    """The shares with at most so many different ones: neighbours become their mean, with the least squares lost."""
    order = sorted(range(len(shares)), key=lambda head: shares[head])
    ranked = [shares[head] for head in order]
    best = list[tuple[float, list[int]]]([(0.0, [])])  # of the first so many: what is lost, and where levels begin
    best += [(float("inf"), [])] * len(ranked)
    for _ in range(most):
        best = [
            min(
                [
                    best[end],
                    *((lost + _lost(ranked[i:end]), [*starts, i]) for i, (lost, starts) in enumerate(best[:end])),
                ]
            )
            for end in range(len(ranked) + 1)
        ]
    found = list(shares)
    starts = best[-1][1]
    for start, stop in zip(starts, [*starts[1:], len(ranked)], strict=True):
        for head in order[start:stop]:
            found[head] = sum(ranked[start:stop]) / (stop - start)
    return found


def _lost(shares: Sequence[float]) -> float:
    mean = sum(shares) / len(shares)
    return sum((share - mean) ** 2 for share in shares)


def filled(shares: Sequence[float], mean: float | int, least: float | int, most: float | int) -> list[float]:
    """Numbers in the proportion of the shares with this mean; what one cannot take, or lacks, the others give."""

    def at(level: float) -> list[float]:
        return [min(max(share * level, float(least)), float(most)) for share in shares]

    low, high = 0.0, 1.0
    while sum(at(high)) < mean * len(shares) and high < MOST * MOST:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(at(middle)) > mean * len(shares) else (middle, high)
    return at(low)
