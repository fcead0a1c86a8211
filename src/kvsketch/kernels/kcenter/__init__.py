"""Greedy k-center over many heads at once.

`reference.py` adds one centre per pass over the points, as `algorithms/kcenter.py` does; `lazy.py`
chooses several centres per pass and returns the same ones, and so does `native.py`, in C. `in_triton.py`
does it on GPUs, a thousand candidates per pass.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.kernels.kcenter import in_triton, lazy, native
from kvsketch.kernels.kcenter.common import Clustering, joined

AT_ONCE = 1 << 23  # coordinates worked on together: 64 MiB in float64


def k_center(
    points: Float[Tensor, "b h n d"], counts: Int64[Tensor, " b"], valid: Bool[Tensor, "b n"] | None = None
) -> Clustering:
    """`counts[r]` centres for every head of row r, or all of the row's points if it has no more.

    Computed in float64: nothing overflows, and no form of it chooses by its own rounding; only Triton compares points
    of 16 bits in float32.
    """
    rows, heads, size, _ = points.shape
    if valid is None:
        valid = torch.ones(rows, size, dtype=torch.bool, device=points.device)
    wanted = torch.minimum(counts, valid.sum(1)).repeat_interleave(heads)
    lanes, visible = points.flatten(0, 1), valid.repeat_interleave(heads, 0)
    most = int(wanted.max()) if wanted.numel() else 0
    given = lanes, wanted, visible, most
    found = native.k_center(*given) or in_triton.k_center(*given) or _in_parts(*given)
    shape = (rows, heads)
    return Clustering(*(x.unflatten(0, shape) for x in (found.centres, found.nearest, found.distance)))


def _in_parts(
    points: Float[Tensor, "l n d"], wanted: Int64[Tensor, " l"], valid: Bool[Tensor, "l n"], most: int
) -> Clustering:
    """What torch finds, in float64, for as many heads at a time as fit."""
    together = max(1, AT_ONCE // max(1, points.shape[1] * points.shape[2]))
    parts = [
        _some_heads(points[i : i + together], wanted[i : i + together], valid[i : i + together], most)
        for i in range(0, len(points), together)
    ]
    return joined(parts)


def _some_heads(
    points: Float[Tensor, "l n d"], wanted: Int64[Tensor, " l"], valid: Bool[Tensor, "l n"], most: int
) -> Clustering:
    found = lazy.k_center(points.double().masked_fill(~valid[..., None], 0), wanted, valid)
    centres = F.pad(found.centres, (0, most - found.centres.shape[1]), value=-1)
    return Clustering(centres, found.nearest, found.distance.float())


__all__ = ["Clustering", "k_center"]
