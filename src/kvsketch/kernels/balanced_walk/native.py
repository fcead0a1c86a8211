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
    library = native.library_for(keys, values)
    if library is None:
        return None
    kept = native.room(*keys.shape[:2], dtype=torch.bool)
    about, tensors = _given(keys, values, uniforms)
    sizes, scalars = sizes.contiguous(), (ctypes.c_double(scale), ctypes.c_double(gain))
    failed = library.kvs_keep_half(about, *native.addresses(*tensors, sizes), *scalars, *native.addresses(kept))
    return None if failed else kept


def keep_smaller(
    keys: Float[Tensor, "l n d"],
    values: Float[Tensor, "l n e"],
    real: Bool[Tensor, "l n"],
    uniforms: Float[Tensor, "l n"],
    scale: float,
    bounds: Float[Tensor, " l"],
) -> tuple[Bool[Tensor, "l n"], Bool[Tensor, " l"]] | None:
    """The tokens of the sign that fewer have, and which walks failed; see `reference.bounded_signs`."""
    library = native.library_for(keys, values)
    if library is None:
        return None
    kept, lost = native.room(*keys.shape[:2], dtype=torch.bool), native.room(len(keys), dtype=torch.bool)
    about, tensors = _given(keys, values, uniforms)
    real, bounds = real.contiguous(), bounds.float().contiguous()
    failed = library.kvs_keep_smaller(
        about, *native.addresses(*tensors, real), ctypes.c_double(scale), *native.addresses(bounds, kept, lost)
    )
    return None if failed else (kept, lost)


def _given(keys: Tensor, values: Tensor, uniforms: Tensor) -> tuple[ctypes.Array[ctypes.c_int64], tuple[Tensor, ...]]:
    """Sizes, kinds and strides as C takes them, and the tensors that they are of."""
    keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (keys, values))
    about = [*keys.shape, values.shape[2], native.DTYPES[keys.dtype], native.threads()]
    strides = [*keys.stride()[:2], *values.stride()[:2]]
    return native.numbers(about + strides), (keys, values, uniforms.double().contiguous())
