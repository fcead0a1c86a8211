"""Places of lanes (along n in [l, n, …]): copied whole, by their numbers, and numbered, the filled or best ones first.

`reference.py` is torch, which takes several launches on a GPU, and sorts where finding the largest number that is kept
would be enough; `native.py` is in C, `in_triton.py` for GPUs.
"""

from collections.abc import Sequence

from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from kvsketch.kernels.places import in_triton, native, reference


def chosen(x: Tensor, index: Int64[Tensor, "l m"]) -> Tensor:
    """The places of `x` [l, n, …] that `index` numbers, lane by lane."""
    return chosen_of((x,), index)[0]


def chosen_of(each: Sequence[Tensor], index: Int64[Tensor, "l m"]) -> list[Tensor]:
    """The same for several tensors."""
    for form in (native, in_triton):
        if (found := form.chosen_of(each, index)) is not None:
            return found
    return reference.chosen_of(each, index)


def in_front(there: Bool[Tensor, "*lanes n"]) -> Int64[Tensor, "*lanes n"]:
    """The numbers of the places that hold something, in order, and then of those that do not."""
    for form in (native, in_triton):
        if (found := form.in_front(there)) is not None:
            return found
    return reference.in_front(there)


def least_in_front(x: Float[Tensor, "l n"], most: int) -> Int64[Tensor, "l n"]:
    """The places of the `most` smallest numbers of every lane, in the places' order, and then the other places.

    Of equal numbers the first are taken first; NaN comes last, with +inf.
    """
    for form in (native, in_triton):
        if (found := form.least_in_front(x, most)) is not None:
            return found
    return reference.least_in_front(x, most)


def best(scores: Float[Tensor, "l n"], start: int, parts: Sequence[tuple[int, int]], bits: int) -> Int64[Tensor, "l k"]:
    """The places of the largest scores of every part of a lane, in the places' order.

    A part is given as how many places it has (the first part begins at `start`) and how many of them are wanted. Scores
    are compared after rounding to `bits` bits, and of equal ones the first are taken first.
    """
    found = native.best(scores, start, parts, bits)
    return reference.best(scores, start, parts, bits, least_in_front) if found is None else found


def keep_in_place(index: Int64[Tensor, "l k"], held: int, each: Sequence[Tensor], new: Sequence[Tensor]) -> bool:
    """Move the places with these numbers to the front of tensors [l, n, …]; numbers from `held` on are those of `new`.

    False where C cannot do it: then nothing has moved.
    """
    return native.keep_in_place(index, held, each, new)


def close_gap(each: Sequence[Tensor], dims: Sequence[int], used: Sequence[int], start: int, stop: int) -> bool:
    """Close the gap start…stop-1 in tensors; `dims`: the dimensions of their places, `used`: how many are in use.

    False where C cannot do it, or if they are not contiguous: then nothing has moved.
    """
    return native.close_gap(each, dims, used, start, stop)


def few_of_each(each: Sequence[Tensor], parts: Float[Tensor, " p"]) -> UInt8[Tensor, " bytes"] | None:
    """The bytes of a few numbers of each tensor, one after another; the tensor is cut into `len(parts)` equal parts.

    `parts` says where the numbers are, counted in such parts; a tensor with no more numbers gives all. None: C cannot.
    """
    return native.few_of_each(each, parts)


__all__ = ["best", "chosen", "chosen_of", "close_gap", "few_of_each", "in_front", "keep_in_place", "least_in_front"]
