"""Shares of a budget by KV head, as multiples of the mean: a head with the share 2 gets twice the average.

They are shares of what is left once all heads hold what a method cannot do without: sinks and window above all.
"""

from collections.abc import Mapping, Sequence

EQUAL, PYRAMID, THRESHOLD = "equal", "pyramid", "threshold"
LENGTH = 2048  # tokens of a text for which a number of full heads is right; longer texts leave room to spare
STEEPNESS = 20  # of the pyramid: the last layer gets so many times less than the mean (PyramidKV's β)
Shares = Mapping[int, Sequence[float]]  # of each layer's KV heads


def equal(heads: int) -> Sequence[float]:
    """The same share for all heads."""
    return (1.0,) * heads


def pyramid(layers: Mapping[int, int], most: float | int) -> Shares:
    """More in the first layers than in the last, linearly (PyramidKV, arXiv:2406.02069); none gets above `most`.

    `layers` says how many KV heads each has.
    """
    last, least = max(1, len(layers) - 1), 1 / STEEPNESS
    wanted = {
        layer: [2 - least - (2 - 2 * least) * place / last if len(layers) > 1 else 1.0] * heads
        for place, (layer, heads) in enumerate(layers.items())
    }
    return filled(wanted, most)


def filled(wanted: Shares, most: float | int, sizes: Mapping[int, int] | None = None) -> Shares:
    """Shares in these proportions with the mean 1, none above `most`: what one head cannot take goes to the others.

    `sizes` are the sizes of an entry in each layer, if they differ: then the mean is one of bytes.
    """
    sizes = dict.fromkeys(wanted, 1) if sizes is None else sizes
    total = sum(sizes[layer] * len(shares) for layer, shares in wanted.items())

    def at(level: float) -> dict[int, list[float]]:
        return {layer: [min(share * level, most) for share in shares] for layer, shares in wanted.items()}

    def used(level: float) -> float:
        return sum(sizes[layer] * sum(shares) for layer, shares in at(level).items())

    low, high = 0.0, 1.0
    while used(high) < total and high < 1e9:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if used(middle) > total else (middle, high)
    return at(low)


def levels(shares: Sequence[float], most: int) -> list[float]:
    """The shares with at most `most` different values: neighbours become their mean, with the least squared error."""
    if len(set(shares)) <= most:
        return list(shares)
    order = sorted(range(len(shares)), key=lambda head: shares[head])
    ranked = [shares[head] for head in order]
    best = list[tuple[float, list[int]]]([(0.0, [])])  # of the first n shares: the error, and where levels begin
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
