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
    return keep_half_of(keys, values, None, uniforms[:, None], sizes[:, None], scale, gain)


def keep_half_of(
    keys: Float[Tensor, "l n d"],
    values: Float[Tensor, "l n e"],
    index: Int64[Tensor, "l w"] | None,
    uniforms: Float[Tensor, "l c m"],
    sizes: Int64[Tensor, "l c"],
    scale: float,
    gain: float,
) -> Bool[Tensor, "lc m"] | None:
    """The same for blocks of tokens that `index` numbers, read where they lie; None: a lane is a block."""
    library = native.library_for(keys, values)
    if library is None:
        return None
    of_lane, uniforms = uniforms.shape[1], uniforms.flatten(0, -2)
    kept = native.room(*uniforms.shape, dtype=torch.bool)
    about, tensors = _given(keys, values, uniforms)
    sizes, scalars = sizes.contiguous(), (ctypes.c_double(scale), ctypes.c_double(gain))
    numbered = ctypes.c_void_p(None)
    if index is not None:
        index = index.contiguous()
        about += [of_lane, index.shape[1], keys.shape[1]]
        [numbered] = native.addresses(index)
    at = native.addresses(*tensors), native.addresses(sizes), native.addresses(kept)
    failed = library.kvs_keep_half(native.numbers(about), *at[0], numbered, *at[1], *scalars, *at[2])
    return None if failed else kept


def keep_smaller(
    keys: Float[Tensor, "l n d"],
    values: Float[Tensor, "l n e"],
    real: Bool[Tensor, "l n"],
    uniforms: Float[Tensor, "l n"],
    scale: float,
    bounds: Float[Tensor, " l"],
) -> tuple[Bool[Tensor, "l n"], Bool[Tensor, " l"]] | None:
    """The tokens with the rarer sign, and which walks failed; see `reference.bounded_signs`."""
    library = native.library_for(keys, values)
    if library is None:
        return None
    kept, lost = native.room(*keys.shape[:2], dtype=torch.bool), native.room(len(keys), dtype=torch.bool)
    about, tensors = _given(keys, values, uniforms)
    real, bounds = real.contiguous(), bounds.float().contiguous()
    failed = library.kvs_keep_smaller(
        native.numbers(about),
        *native.addresses(*tensors, real),
        ctypes.c_double(scale),
        *native.addresses(bounds, kept, lost),
    )
    return None if failed else (kept, lost)


def _given(keys: Tensor, values: Tensor, uniforms: Tensor) -> tuple[list[int], tuple[Tensor, ...]]:
    """Sizes, kinds and strides as C takes them, and the tensors that they describe."""
    keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (keys, values))
    sizes = [*uniforms.shape, keys.shape[2], values.shape[2], native.DTYPES[keys.dtype], native.threads()]
    return [*sizes, *keys.stride()[:2], *values.stride()[:2]], (keys, values, uniforms.double().contiguous())
