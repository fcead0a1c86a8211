"""Merging answers in C, in the memory of the first one: `native/merge.c`."""

import ctypes
from collections.abc import Sequence

import torch

from kvsketch.attention import Partial
from kvsketch.kernels import native

MOST_PARTS = 8


class _Answer(ctypes.Structure):
    """`struct answer` in `merge.c`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "lse")),
        *((name, ctypes.c_int64) for name in ("row", "head", "step")),
    ]


def merge_into(parts: Sequence[Partial]) -> bool:
    """Make the first part attention over the union of the parts' tokens; False, with nothing changed, where C cannot.

    If memory runs out, the first part must not be used any more.
    """
    library = native.library_for(*(part.out for part in parts)) if len(parts) <= MOST_PARTS else None
    if library is None or native.library_for(*(part.lse for part in parts), kinds=(torch.float32,)) is None:
        return False
    shape, logs = parts[0].out.shape, [part.lse.contiguous() for part in parts]  # these live as long as the call
    if any(part.out.shape != shape or part.out.stride(3) != 1 for part in parts) or logs[0] is not parts[0].lse:
        return False
    answers = (_Answer * len(parts))(
        *(
            _Answer(part.out.data_ptr(), lse.data_ptr(), *part.out.stride()[:3])
            for part, lse in zip(parts, logs, strict=True)
        )
    )
    sizes = (len(parts), *shape, native.DTYPES[parts[0].out.dtype], native.threads())
    if library.kvs_merge(answers, *map(ctypes.c_int64, sizes)):
        raise MemoryError("no room to put answers together")
    return True
