"""Greedy k-center in C, `kernels/native/kcenter.c`: None where C cannot be used."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.kernels import native
from kvsketch.kernels.kcenter.common import Clustering


def k_center(
    points: Float[Tensor, "l n d"], wanted: Int64[Tensor, " l"], valid: Bool[Tensor, "l n"], most: int
) -> Clustering | None:
    """The same as `reference.k_center` gives, with columns for `most` centres and distances in float32."""
    library = native.library_for(points)
    if library is None:
        return None
    points = points if points.stride(2) == 1 else points.contiguous()
    valid, wanted = valid.contiguous(), wanted.contiguous()
    centres, nearest = (native.room(len(points), size, dtype=torch.int64) for size in (most, points.shape[1]))
    distance = native.room(*points.shape[:2])
    about = [*points.shape, most, native.DTYPES[points.dtype], native.threads(), *points.stride()[:2]]
    data = native.addresses(points, valid, wanted, centres, nearest, distance)
    return None if library.kvs_k_center(native.numbers(about), *data) else Clustering(centres, nearest, distance)
