"""How much each KV head may hold, whatever the method.

Heads of a layer have at most MOST_LEVELS different budgets, so that their lanes lie in as many dense bundles: shares
that are close to each other become their mean. The sum stays what it was.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvsketch.caches.core.budget import Budget, fixed_entries
from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.core.shares import levels

MOST_LEVELS = 4
SharesOf = Callable[[int, int, Budget], Sequence[float]]  # of a layer, given its number of KV heads and mean budget


def budget_of(config: MethodConfig, layer_bytes: int | None, entry_bytes: int, rows: int, beside: int = 0) -> Budget:
    """What a head may hold if all hold the same; refuses less than the method needs.

    `layer_bytes` is the layer's share of a budget in bytes, `entry_bytes` what one entry of all rows and heads takes.
    `beside` tokens of a row are held in addition.
    """
    given, least = config.budget_given, config.least_entries()
    fixed = fixed_entries(given, layer_bytes, entry_bytes)
    if fixed is None:
        fraction = given if isinstance(given, float) else None
        return Budget(fraction, None, config.floor(), beside=beside, latest=config.latest)
    if fixed < least:
        raise ValueError(
            f"keep={given!r} leaves {fixed} entries per row and KV head in each layer, but "
            f"{config} needs at least {least} ({rows} rows, {least * entry_bytes:,} bytes a layer): "
            "give more bytes, or fewer sinks or a smaller window"
        )
    if fixed < least + beside:
        raise ValueError(
            f"keep={given!r} leaves {fixed} entries per row and KV head in each layer, but {beside:,} tokens of a row "
            f"are protected, and {config} needs at least {least} in addition: give more, or protect less"
        )
    return Budget(None, fixed, least, beside=beside, latest=config.latest)


def budgets_of(budget: Budget, shares: Sequence[float], first: int = 0, heads: int | None = None) -> list[Budget]:
    """The budget of each head of a layer, by its share; with `heads`, only of so many heads from `first` on."""
    here = slice(first, None if heads is None else first + heads)
    if len(set(shares)) == 1 and shares[0] == 1:
        return [budget] * len(shares[here])
    return [replace(budget, share=share) for share in levels(shares, MOST_LEVELS)[here]]
