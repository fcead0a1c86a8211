"""The walks in C, `kernels/native/walk.c`: None where C cannot be used."""

import ctypes

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.kernels import native


def keep_half(
    keys: Float[Tensor, "l n d"],
    values: Float[Tensor, "l n e"],
    uniforms: Float[Tensor, "l n"],
    sizes: Int64[Tensor, " l"],
    scale: float,
    gain: float,
) -> Bool[Tensor, "l n"] | None:
    """Which half to keep; see `strips.halving_signs`."""
    library = native.library() if native.takes(keys, values) else None
    if library is None:
        return None
    keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (keys, values))
    uniforms, sizes = uniforms.double().contiguous(), sizes.contiguous()
    kept = torch.empty(keys.shape[:2], dtype=torch.bool)
    about = [*keys.shape, values.shape[2], native.DTYPES[keys.dtype], native.threads()]
    about += [*keys.stride()[:2], *values.stride()[:2]]
    data = (ctypes.c_void_p(x.data_ptr()) for x in (keys, values, uniforms, sizes))
    scalars = ctypes.c_double(scale), ctypes.c_double(gain)
    failed = library.kvs_keep_half(native.numbers(about), *data, *scalars, ctypes.c_void_p(kept.data_ptr()))
    return None if failed else kept
