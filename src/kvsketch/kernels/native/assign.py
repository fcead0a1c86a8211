"""The buckets of keys in C: `native/assign.c`. In torch it is in `kernels/buckets.py`."""

import ctypes

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.kernels import native

FEWEST = 4  # keys: for fewer, it does not pay to lay out the centroids


class _Assigning(ctypes.Structure):
    """`struct assigning` in `assign.c`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("lanes", "count", "buckets", "width", "kind", "key_lane", "key_step")),
        *((name, ctypes.c_int64) for name in ("centroid_lane", "centroid_step")),
    ]


def assign(keys: Float[Tensor, "l n d"], centroids: Float[Tensor, "l c d"]) -> Int64[Tensor, "l n"] | None:
    """The bucket of every key, from products in float32; None where C does not do it."""
    lanes, count, width = keys.shape
    library = native.library_for(keys)
    if library is None or native.library_for(centroids, kinds=(torch.float32,)) is None or not library.kvs_is_wide():
        return None
    fitting = len(centroids) == lanes and centroids.shape[2] == width and min(centroids.shape) > 0 and count >= FEWEST
    if not fitting or keys.stride(2) != 1 or centroids.stride(2) != 1:
        return None
    found = native.room(lanes, count, dtype=torch.int64)
    assigning = _Assigning(
        *(lanes, count, centroids.shape[1], width, native.DTYPES[keys.dtype]),
        *(*keys.stride()[:2], *centroids.stride()[:2]),
    )
    at = native.addresses(keys, centroids, found)
    failed = library.kvs_assign(ctypes.byref(assigning), *at, ctypes.c_int64(native.threads()))
    return None if failed else found
