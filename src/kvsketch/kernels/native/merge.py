"""Answers put together in C, one in the place of the other: `native/merge.c`."""

import ctypes

import torch

from kvsketch.attention import Partial
from kvsketch.kernels import native

LEAST = 1 << 15  # numbers: fewer are put together in torch in less time than it takes to ask


class _Merging(ctypes.Structure):
    """`struct merging` in `merge.c`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "heads", "queries", "width", "kind", "out_row", "out_head")),
        *((name, ctypes.c_int64) for name in ("out_step", "other_row", "other_head", "other_step")),
    ]


def merge_into(first: Partial, other: Partial) -> bool:
    """Have `first` be attention over the union of the tokens; False, and nothing is changed, where C does not do it.

    Where memory runs out nobody may go on with either.
    """
    out, lse, others, other_lse = first.out, first.lse, other.out, other.lse
    library = native.library_for(out, others) if out.numel() >= LEAST else None
    if library is None or native.library_for(lse, other_lse, kinds=(torch.float32,)) is None:
        return False
    if out.shape != others.shape or out.stride(3) != 1 or others.stride(3) != 1 or not lse.is_contiguous():
        return False
    merging = _Merging(*(out.shape), native.DTYPES[out.dtype], *out.stride()[:3], *others.stride()[:3])
    at = native.addresses(out, lse, others, other_lse.contiguous())
    if library.kvs_merge(ctypes.byref(merging), *at, ctypes.c_int64(native.threads())):
        raise MemoryError("no room to put answers together")
    return True
