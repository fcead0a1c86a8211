"""Which batches BalanceKV's theorem halves next, and what is left of each."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int8, Int64
from torch import Tensor

from kvsketch.caches.core.config import BLOCK
from kvsketch.kernels.balanced_walk import keep_smaller

RETRIES = 3  # walks with fresh numbers after one that failed; then coins are tossed
GONE = -1  # the level of a token that is not in a set
SETS = DENOMINATOR, NUMERATOR = 0, 1


@dataclass(frozen=True)
class Theorem:
    """Algorithm 1's parameters: t, the factor in c = constant · log(n/δ), δ, ε; and the source of its numbers."""

    block: int
    constant: float | int
    failure: float
    epsilon: float | int
    seed: int
    layer: int


@dataclass(frozen=True)
class Halved:
    """What is kept of every batch, how many of its walks failed, and whether coins decided."""

    kept: Bool[Tensor, "l n"]
    failed: Int64[Tensor, " l"]
    tossed: Int64[Tensor, " l"]


def halve(
    keys: Float[Tensor, "l n d"],
    values: Float[Tensor, "l n e"],
    real: Bool[Tensor, "l n"],
    draw: Callable[[Tensor, int], Tensor],
    scale: float,
    theorem: Theorem,
) -> Halved:
    """Halve batches of real tokens by the walk; `draw(batches, attempt)` are numbers [batches, n].

    A walk that fails begins again with fresh numbers, up to RETRIES times; after that a random half is kept. So it is
    at once with fewer than BLOCK tokens: a walk that short tosses coins, and its smaller half has far too little mass.
    """
    sizes = real.sum(1)
    bounds = theorem.constant * torch.log(sizes.float() / theorem.failure)
    kept, failed, open_ = torch.zeros_like(real), torch.zeros_like(sizes), sizes >= BLOCK
    for attempt in range(1 + RETRIES):
        todo = open_.nonzero()[:, 0]
        if todo.numel():
            found, lost = keep_smaller(keys[todo], values[todo], real[todo], draw(todo, attempt), scale, bounds[todo])
            kept[todo] = found & ~lost[:, None]
            failed[todo] += lost.long()
            open_[todo] = lost
    tossed = open_ | (sizes < BLOCK)
    coins = draw(torch.arange(len(keys), device=keys.device), 1 + RETRIES)
    return Halved(torch.where(tossed[:, None], random_half(coins, real), kept), failed, tossed.long())


def random_half(numbers: Float[Tensor, "l n"], real: Bool[Tensor, "l n"]) -> Bool[Tensor, "l n"]:
    """The tokens with the smaller numbers; if their count is odd, the middle one with probability 1/2."""
    order = numbers.masked_fill(~real, 2.0).sort(dim=1)
    rank = order.indices.sort(dim=1).indices
    sizes = real.sum(1)
    # The last digits of the first number decide about the middle token; its first digits already decide the order.
    extra = (numbers[:, 0] * (1 << 20)) % 1 < 0.5
    return rank < (sizes // 2 + (extra & (sizes % 2 == 1)))[:, None]


def next_batches(
    levels: Int8[Tensor, "2 n"], buckets: Float[Tensor, "2 n"], block: int, excess: int
) -> list[tuple[int, Int64[Tensor, " m"]]]:
    """What to halve next in one row and head that holds `excess` tokens too many: sets, and places in them.

    Full batches of the lowest level that has any, the oldest first, with twice as many tokens as have to go: a token
    goes only when it is in neither set any more. If no batch is full, the largest one.
    """
    groups = dict[tuple[int, int, float], Tensor]()  # by level, set and bucket
    for which in SETS:
        for level in levels[which].unique().tolist():
            here = levels[which] == level
            if level != GONE:
                for bucket in buckets[which][here].unique().tolist():
                    groups[level, which, bucket] = (here & (buckets[which] == bucket)).nonzero()[:, 0]
    full = [level for (level, _, _), places in groups.items() if len(places) >= block]
    if not full:
        (_, which, _), places = max(groups.items(), key=lambda group: len(group[1]))
        return [(which, places)]
    batches = [
        (which, batch)
        for (level, which, _), places in groups.items()
        if level == min(full)
        for batch in places[: len(places) // block * block].split(block)
        if len(batch)
    ]
    return sorted(batches, key=lambda batch: int(batch[1][-1]))[: -(-2 * excess // block)]
