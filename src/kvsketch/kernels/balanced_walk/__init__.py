"""The sign walks of BalanceKV over many blocks at once, and what of each block they keep.

`reference.py` is plain torch: a step for every token of a block, all blocks together. A faster form for
another device is one more file here and one more line below.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.kernels.balanced_walk import reference

AT_ONCE = 1 << 24  # products held together: 64 MiB of float32


def keep_half(
    keys: Float[Tensor, "l n d"],
    values: Float[Tensor, "l n e"],
    uniforms: Float[Tensor, "l n"],
    scale: float,
    gain: float,
) -> Int64[Tensor, "l m"]:
    """Which half of every block of n tokens to keep, n even, in the order of the block; see `reference.py`."""
    parts = list[Tensor]()
    for some in _together(keys):
        signs = reference.halving_signs(reference.products(keys[some], values[some], scale), uniforms[some], gain)
        positive = signs.sort(dim=1, descending=True, stable=True).indices[:, : keys.shape[1] // 2]
        parts.append(positive.sort(dim=1).values)
    return torch.cat(parts)


def keep_smaller(
    keys: Float[Tensor, "l n d"],
    values: Float[Tensor, "l n e"],
    real: Bool[Tensor, "l n"],
    uniforms: Float[Tensor, "l n"],
    scale: float,
    bounds: Float[Tensor, " l"],
) -> tuple[Bool[Tensor, "l n"], Bool[Tensor, " l"]]:
    """The tokens of the sign that fewer have, and which walks failed; `bounds` are the theorem's c, without R²."""
    parts = list[tuple[Tensor, Tensor]]()
    for some in _together(keys):
        products = reference.bounded_products(keys[some], values[some], real[some], scale)
        signs, failed = reference.strip_signs(products, bounds[some], uniforms[some], real[some])
        positive, negative = signs > 0, signs < 0
        fewer = (positive.sum(1) <= negative.sum(1))[:, None]
        parts.append((torch.where(fewer, positive, negative), failed))
    kept, failed = (torch.cat(found) for found in zip(*parts, strict=True))
    return kept, failed


def _together(keys: Float[Tensor, "l n d"]) -> Iterator[slice]:
    """Blocks whose products may be held together."""
    step = max(1, AT_ONCE // keys.shape[1] ** 2)
    return (slice(start, start + step) for start in range(0, len(keys), step))


__all__ = ["keep_half", "keep_smaller"]
