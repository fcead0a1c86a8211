"""Numbers of places in C, `kernels/native/places.c`: None where C cannot be used."""

import ctypes

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.kernels import native


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
