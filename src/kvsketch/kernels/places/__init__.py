"""Places of lanes by their numbers: copied, whole places at a time, and numbered, those that hold something first.

`reference.py` is torch, which takes several launches on a GPU, and sorts where it is enough to find the largest that is
kept; `native.py` is in C, `in_triton.py` for GPUs.
"""

from collections.abc import Sequence

from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from kvsketch.kernels.places import in_triton, native, reference


def chosen(x: Tensor, index: Int64[Tensor, "l m"]) -> Tensor:
    """Places of `x` [l, n, …] with the numbers of `index`, lane by lane."""
    return chosen_of((x,), index)[0]


def chosen_of(each: Sequence[Tensor], index: Int64[Tensor, "l m"]) -> list[Tensor]:
    """The same of several."""
    for form in (native, in_triton):
        if (found := form.chosen_of(each, index)) is not None:
            return found
    return reference.chosen_of(each, index)


def in_front(there: Bool[Tensor, "*lanes n"]) -> Int64[Tensor, "*lanes n"]:
    """Numbers of the places that hold something, in their order, and then of those that do not."""
    for form in (native, in_triton):
        if (found := form.in_front(there)) is not None:
            return found
    return reference.in_front(there)


def least_in_front(x: Float[Tensor, "l n"], most: int) -> Int64[Tensor, "l n"]:
    """Numbers of the places of the `most` least of every lane, in their order, and then of the others.

    Of equal ones the first come first; what is no number comes last, beside +inf.
    """
    for form in (native, in_triton):
        if (found := form.least_in_front(x, most)) is not None:
            return found
    return reference.least_in_front(x, most)


def best(scores: Float[Tensor, "l n"], start: int, parts: Sequence[tuple[int, int]], bits: int) -> Int64[Tensor, "l k"]:
    """Numbers of the places of the largest of every part of a lane, in their order.

    A part is a number of places, the first from `start` on, and how many of them are wanted. What has the same first
    `bits` bits is equal, and of equal ones the first come first.
    """
    found = native.best(scores, start, parts, bits)
    return reference.best(scores, start, parts, bits, least_in_front) if found is None else found


def keep_in_place(index: Int64[Tensor, "l k"], held: int, each: Sequence[Tensor], new: Sequence[Tensor]) -> bool:
    """Have places with these numbers in front in tensors [l, n, …], of the first `held` and the new ones behind them.

    False where that takes C and there is none: then nothing has moved.
    """
    return native.keep_in_place(index, held, each, new)


def close_gap(each: Sequence[Tensor], dims: Sequence[int], used: Sequence[int], start: int, stop: int) -> bool:
    """Close the gap between two places in tensors whose places lie along these dimensions; so many of each are in use.

    False where that takes C and there is none, or if they are not contiguous: then nothing has moved.
    """
    return native.close_gap(each, dims, used, start, stop)


def few_of_each(each: Sequence[Tensor], parts: Float[Tensor, " p"]) -> UInt8[Tensor, " bytes"] | None:
    """Bytes of a few numbers of each tensor, one behind the other: of as many equal parts as there are `parts`.

    `parts` says where, counted in parts; a tensor that has no more numbers than that gives all. None where C cannot.
    """
    return native.few_of_each(each, parts)


__all__ = ["best", "chosen", "chosen_of", "close_gap", "few_of_each", "in_front", "keep_in_place", "least_in_front"]
