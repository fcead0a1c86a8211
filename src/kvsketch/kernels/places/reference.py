"""Places with given numbers, and those that hold something first: in torch."""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.kernels.distances import rounded


def chosen_of(each: Sequence[Tensor], index: Int64[Tensor, "l m"]) -> list[Tensor]:
    """Those of several tensors [l, n, …]: where they are numbered is found once."""
    found, rows = list[Tensor](), dict[tuple[int, int], Tensor]()
    for x in each:
        unit = math.gcd(x.stride(0), x.stride(1))  # of memory: lanes and places are whole numbers of these apart
        if not unit or 0 in x.shape[:2]:
            found.append(x[torch.arange(len(x), device=x.device)[:, None], index])
            continue
        # All lanes as one: that copies rows as they are, which is three times as fast.
        lane, place = x.stride(0) // unit, x.stride(1) // unit
        if (lane, place) not in rows:
            first = lane * torch.arange(len(x), device=x.device)[:, None]
            rows[lane, place] = ((index if place == 1 else place * index) + first).flatten()
        count = (len(x) - 1) * lane + (x.shape[1] - 1) * place + 1
        one = x.as_strided((count, *x.shape[2:]), (unit, *x.stride()[2:]))
        found.append(one.index_select(0, rows[lane, place]).unflatten(0, index.shape))
    return found


def in_front(there: Bool[Tensor, "*lanes n"]) -> Int64[Tensor, "*lanes n"]:
    """Numbers of the places that hold something, in their order, and then of those that do not."""
    upto, number = there.cumsum(-1), torch.arange(there.shape[-1], device=there.device)
    place = torch.where(there, upto - 1, upto[..., -1:] + number - upto)
    return torch.empty_like(place).scatter_(-1, place, number.expand_as(place))


def least_in_front(x: Float[Tensor, "l n"], most: int) -> Int64[Tensor, "l n"]:
    """Numbers of the places of the `most` least of every lane, in their order, and then of the others."""
    order = x.nan_to_num(math.inf, math.inf, -math.inf).sort(dim=1, stable=True).indices
    return in_front(torch.zeros_like(x, dtype=torch.bool).scatter_(1, order[:, :most], True))


def best(
    scores: Float[Tensor, "l n"],
    start: int,
    parts: Sequence[tuple[int, int]],
    bits: int,
    least: Callable[[Float[Tensor, "l n"], int], Int64[Tensor, "l n"]] = least_in_front,
) -> Int64[Tensor, "l k"]:
    """Numbers of the places of the largest of every part of a lane, in their order; `least` finds those in front."""
    worst_last, found = -rounded(scores, bits), list[Tensor]()
    for count, room in parts:
        own = worst_last[:, start : start + count].contiguous()
        found.append(start + least(own, room)[:, :room])
        start += count
    return torch.cat(found, 1)
