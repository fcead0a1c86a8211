"""Places with given numbers, and the numbers of filled or best places first: in torch."""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.kernels.distances import rounded


def chosen_of(each: Sequence[Tensor], index: Int64[Tensor, "l m"]) -> list[Tensor]:
    """The places of several tensors [l, n, …]; tensors laid out alike share a list of rows."""
    found, rows = list[Tensor](), dict[tuple[int, int], Tensor]()
    for x in each:
        unit = math.gcd(x.stride(0), x.stride(1))  # of memory: lanes and places lie whole multiples of it apart
        if not unit or 0 in x.shape[:2]:
            found.append(x[torch.arange(len(x), device=x.device)[:, None], index])
            continue
        # All lanes are taken as one, so that rows are copied as they are: that is three times as fast.
        lane, place = x.stride(0) // unit, x.stride(1) // unit
        if (lane, place) not in rows:
            first = lane * torch.arange(len(x), device=x.device)[:, None]
            rows[lane, place] = ((index if place == 1 else place * index) + first).flatten()
        count = (len(x) - 1) * lane + (x.shape[1] - 1) * place + 1
        one = x.as_strided((count, *x.shape[2:]), (unit, *x.stride()[2:]))
        found.append(one.index_select(0, rows[lane, place]).unflatten(0, index.shape))
    return found


def in_front(there: Bool[Tensor, "*lanes n"]) -> Int64[Tensor, "*lanes n"]:
    """The numbers of the places that hold something, in order, and then of those that do not."""
    upto, number = there.cumsum(-1), torch.arange(there.shape[-1], device=there.device)
    place = torch.where(there, upto - 1, upto[..., -1:] + number - upto)
    return torch.empty_like(place).scatter_(-1, place, number.expand_as(place))


def least_in_front(x: Float[Tensor, "l n"], most: int) -> Int64[Tensor, "l n"]:
    """The places of the `most` smallest numbers of every lane, in the places' order, and then the other places."""
    order = x.nan_to_num(math.inf, math.inf, -math.inf).sort(dim=1, stable=True).indices
    return in_front(torch.zeros_like(x, dtype=torch.bool).scatter_(1, order[:, :most], True))


def best(
    scores: Float[Tensor, "l n"],
    start: int,
    parts: Sequence[tuple[int, int]],
    bits: int,
    least: Callable[[Float[Tensor, "l n"], int], Int64[Tensor, "l n"]] = least_in_front,
) -> Int64[Tensor, "l k"]:
    """The places of the largest scores of every part of a lane, in order; `least` finds the smallest negated ones."""
    worst_last, found = -rounded(scores, bits), list[Tensor]()
    for count, room in parts:
        own = worst_last[:, start : start + count].contiguous()
        found.append(start + least(own, room)[:, :room])
        start += count
    return torch.cat(found, 1)
