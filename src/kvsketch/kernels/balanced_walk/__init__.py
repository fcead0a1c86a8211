"""The sign walk of BalanceKV over many blocks at once, and the half of each block that it keeps.

`reference.py` is plain torch: a step for every token of a block, all blocks together. A faster form for
another device is one more file here and one more line below.
"""

import torch
from jaxtyping import Float, Int64
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
    size = keys.shape[1]
    together = max(1, AT_ONCE // (size * size))
    parts = [
        _some_blocks(keys[i : i + together], values[i : i + together], uniforms[i : i + together], scale, gain)
        for i in range(0, len(keys), together)
    ]
    return torch.cat(parts)


def _some_blocks(keys: Tensor, values: Tensor, uniforms: Tensor, scale: float, gain: float) -> Int64[Tensor, "l m"]:
    signs = reference.halving_signs(reference.products(keys, values, scale), uniforms, gain)
    count = keys.shape[1] // 2
    return signs.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values


__all__ = ["keep_half"]
