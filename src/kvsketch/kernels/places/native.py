"""Numbers of places in C, `kernels/native/places.c`: None where C cannot be used."""

import ctypes
import math
from collections.abc import Sequence
from itertools import chain

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from kvsketch.kernels import native
from kvsketch.kernels.distances import splitting_at

_KINDS = (*native.DTYPES, torch.float64, torch.int64, torch.int32)  # of places that are copied


def chosen_of(each: Sequence[Tensor], index: Int64[Tensor, "l m"]) -> list[Tensor] | None:
    """See `reference.py`."""
    library = native.library_for(index, kinds=(torch.int64,))
    if library is None or not each or any(native.library_for(x, kinds=_KINDS) is None for x in each):
        return None
    first, index = each[0], index.contiguous()
    if any(x.ndim != 3 or x.stride(2) != 1 or x.shape[:2] != first.shape[:2] or len(x) != len(index) for x in each):
        return None
    found = [native.room(*index.shape, x.shape[2], dtype=x.dtype) for x in each]
    about = [*index.shape, first.shape[1], native.threads(), len(each)]
    for x in each:
        about += [size * x.element_size() for size in (x.stride(0), x.stride(1), x.shape[2])]
    of = native.pointers(*chain(*zip(each, found, strict=True)))
    wrong = library.kvs_copy_places(native.numbers(about), *native.addresses(index), of)
    return None if wrong else found


def in_front(there: Bool[Tensor, "*lanes n"]) -> Int64[Tensor, "*lanes n"] | None:
    """See `reference.py`."""
    library = native.library_for(there, kinds=(torch.bool,))
    if library is None:
        return None
    lanes = there.reshape(-1, there.shape[-1]) if there.numel() else there.new_zeros(0, 0)
    found = native.room(*there.shape, dtype=torch.int64)
    places = native.addresses(lanes, found)
    sizes, steps = (list(map(ctypes.c_int64, x)) for x in (lanes.shape, lanes.stride()))
    library.kvs_in_front(*sizes, places[0], *steps, places[1])
    return found


def least_in_front(x: Float[Tensor, "l n"], most: int) -> Int64[Tensor, "l n"] | None:
    """See `reference.py`."""
    library = native.library_for(x, kinds=(torch.float64,))
    if library is None or not 0 <= most <= x.shape[1]:
        return None
    x, found = x.contiguous(), native.room(*x.shape, dtype=torch.int64)
    sizes = map(ctypes.c_int64, (*x.shape, most))
    places = native.addresses(x, found)
    failed = library.kvs_least_in_front(*sizes, places[0], ctypes.c_int64(native.threads()), places[1])
    return None if failed else found


def best(
    scores: Float[Tensor, "l n"], start: int, parts: Sequence[tuple[int, int]], bits: int
) -> Int64[Tensor, "l k"] | None:
    """See `reference.py`."""
    library = native.library_for(scores, kinds=(torch.float64,))
    counts = [count for count, _ in parts]
    rooms = [min(both) for both in parts]
    if library is None or min(start, *rooms) < 0 or start + sum(counts) > scores.shape[1]:
        return None
    scores, found = scores.contiguous(), native.room(len(scores), sum(rooms), dtype=torch.int64)
    about = native.numbers([*scores.shape, start, native.threads(), len(parts), *counts, *rooms])
    places = native.addresses(scores, found)
    failed = library.kvs_best(about, places[0], ctypes.c_double(splitting_at(bits)), places[1])
    return None if failed else found


def keep_in_place(index: Int64[Tensor, "l k"], held: int, each: Sequence[Tensor], new: Sequence[Tensor]) -> bool:
    """See `__init__.py`."""
    library = native.library_for(index, kinds=(torch.int64,))
    if library is None:
        return False
    (lanes, kept), count = index.shape, new[0].shape[1]
    about = [lanes, kept, held, count, native.threads(), len(each)]
    for x, more in zip(each, new, strict=True):
        (here, room, *wide), (lane, place, *step), (new_lane, new_place, *new_step) = x.shape, x.stride(), more.stride()
        if native.library_for(x, more, kinds=_KINDS) is None or here != lanes or room < max(held, kept):
            return False
        if more.shape != (lanes, count, *wide) or any(apart != 1 for apart in (*step, *new_step)):
            return False
        size = x.element_size()
        about += [size * number for number in (lane, place, new_lane, new_place, math.prod(wide))]
    index, of = index.contiguous(), native.pointers(*chain(*zip(each, new, strict=True)))
    return not library.kvs_keep_in_place(native.numbers(about), *native.addresses(index), of)


def close_gap(each: Sequence[Tensor], dims: Sequence[int], used: Sequence[int], start: int, stop: int) -> bool:
    """See `__init__.py`."""
    about: list[int] = []
    library = None
    for x, dim, there in zip(each, dims, used, strict=True):
        library = native.library_for(x, kinds=_KINDS)
        if library is None or not x.is_contiguous() or not 0 <= start <= stop <= there <= x.shape[dim]:
            return False
        place = x.element_size() * math.prod(x.shape[dim + 1 :])
        about += [x.shape[:dim].numel(), x.shape[dim] * place, place, there]
    if library is not None:
        every = native.numbers([start, stop, native.threads(), len(each), *about])
        library.kvs_close_gap(every, native.pointers(*each))
    return library is not None


def few_of_each(each: Sequence[Tensor], parts: Float[Tensor, " p"]) -> UInt8[Tensor, " bytes"] | None:
    """See `__init__.py`."""
    library = native.library_for(parts, kinds=(torch.float64,))
    if library is None or any(type(x) is not Tensor or not x.is_cpu or x.is_conj() or x.is_neg() for x in each):
        return None
    if any(x.layout != torch.strided or not x.is_contiguous() or (x.numel() and not x.data_ptr()) for x in each):
        return None  # a tensor's numbers may be elsewhere for now
    about, length = [len(each), len(parts)], 0
    for x in each:
        count, size = x.numel(), x.element_size()
        about += [count, size]
        length += size * min(count, len(parts))
    found, parts = native.room(length, dtype=torch.uint8), parts.contiguous()
    at = native.addresses(parts, found)
    library.kvs_few_of_each(native.numbers(about), at[0], native.pointers(*each), at[1])
    return found
