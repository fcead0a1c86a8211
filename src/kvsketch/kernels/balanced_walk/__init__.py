"""The sign walks of BalanceKV over many blocks at once, and which tokens of each block they keep.

`reference.py` is plain torch: a step for every token of a block, all blocks together; `strips.py` does the same with
less work, `native.py` in C and `walk_in_triton.py` on GPUs. A faster form for another device is one more file here and
one more line below.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.kernels.balanced_walk import native, reference, strips, walk_in_triton
from kvsketch.kernels.places import chosen_of

AT_ONCE = 1 << 24  # products held together: 64 MiB of float32


def keep_half(
    keys: Float[Tensor, "l n d"],
    values: Float[Tensor, "l n e"],
    uniforms: Float[Tensor, "l n"],
    sizes: Int64[Tensor, " l"],
    scale: float,
    gain: float,
) -> Bool[Tensor, "l n"]:
    """Which half to keep of the first `sizes` tokens of every block, an even number; see `reference.py`."""
    for form in (native, walk_in_triton):
        if (kept := form.keep_half(keys, values, uniforms, sizes, scale, gain)) is not None:
            return kept
    with torch.autocast(keys.device.type, enabled=False):
        parts = [
            strips.halving_signs(keys[some], values[some], uniforms[some], sizes[some], scale, gain) > 0
            for some in _together(keys, AT_ONCE // (strips.STRIP * keys.shape[1]))
        ]
    return torch.cat(parts)


def keep_half_of(
    keys: Float[Tensor, "l n d"],
    values: Float[Tensor, "l n e"],
    index: Int64[Tensor, "l w"],
    uniforms: Float[Tensor, "l c m"],
    sizes: Int64[Tensor, "l c"],
    scale: float,
    gain: float,
) -> Bool[Tensor, "lc m"]:
    """The same for `c` blocks of every lane: `index` numbers their tokens, `m` for each; the last may have fewer."""
    for form in (native, walk_in_triton):
        if (kept := form.keep_half_of(keys, values, index, uniforms, sizes, scale, gain)) is not None:
            return kept
    keys, values = gathered(keys, values, index, *uniforms.shape[1:])
    return keep_half(keys, values, uniforms.flatten(0, 1), sizes.flatten(), scale, gain)


def gathered(
    keys: Float[Tensor, "l n d"], values: Float[Tensor, "l n e"], index: Int64[Tensor, "l w"], blocks: int, count: int
) -> tuple[Float[Tensor, "lc {count} d"], Float[Tensor, "lc {count} e"]]:
    """Keys and values of such blocks; if the last has fewer tokens, it is filled up with any others."""
    index = F.pad(index, (0, blocks * count - index.shape[1]))
    keys, values = (x.unflatten(1, (blocks, count)).flatten(0, 1) for x in chosen_of((keys, values), index))
    return keys, values


def keep_smaller(
    keys: Float[Tensor, "l n d"],
    values: Float[Tensor, "l n e"],
    real: Bool[Tensor, "l n"],
    uniforms: Float[Tensor, "l n"],
    scale: float,
    bounds: Float[Tensor, " l"],
) -> tuple[Bool[Tensor, "l n"], Bool[Tensor, " l"]]:
    """The tokens with the rarer sign, and which walks failed; `bounds` are the theorem's c, without R²."""
    if (found := native.keep_smaller(keys, values, real, uniforms, scale, bounds)) is not None:
        return found
    parts = list[tuple[Tensor, Tensor]]()
    for some in _together(keys, AT_ONCE // keys.shape[1] ** 2):
        with torch.autocast(keys.device.type, enabled=False):
            products = reference.bounded_products(keys[some], values[some], real[some], scale)
        signs, failed = reference.bounded_signs(products, bounds[some], uniforms[some], real[some])
        positive, negative = signs > 0, signs < 0
        fewer = (positive.sum(1) <= negative.sum(1))[:, None]
        parts.append((torch.where(fewer, positive, negative), failed))
    kept, failed = (torch.cat(found) for found in zip(*parts, strict=True))
    return kept, failed


def _together(keys: Float[Tensor, "l n d"], most: int) -> Iterator[slice]:
    """All blocks, at most so many at a time."""
    step = max(1, most)
    return (slice(start, start + step) for start in range(0, len(keys), step))


__all__ = ["gathered", "keep_half", "keep_half_of", "keep_smaller"]
