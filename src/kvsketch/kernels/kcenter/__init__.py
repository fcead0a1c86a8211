"""Greedy k-center over many heads at once.

`reference.py` adds one centre per pass over the points, as `algorithms/kcenter.py` does; `lazy.py`
chooses several centres per pass and returns the same ones. A faster form for another device is one
more file here and one more line below.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.kernels.kcenter import lazy
from kvsketch.kernels.kcenter.common import Clustering

AT_ONCE = 1 << 23  # coordinates worked on together: 64 MiB in float64


def k_center(
    points: Float[Tensor, "b h n d"], counts: Int64[Tensor, " b"], valid: Bool[Tensor, "b n"] | None = None
) -> Clustering:
    """`counts[r]` centres for every head of row r, or all of the row's points if there are no more.

    Computed in float64: nothing overflows, and no form of it chooses by its own rounding.
    """
    rows, heads, size, _ = points.shape
    if valid is None:
        valid = torch.ones(rows, size, dtype=torch.bool, device=points.device)
    wanted = torch.minimum(counts, valid.sum(1)).repeat_interleave(heads)
    lanes, visible = points.flatten(0, 1), valid.repeat_interleave(heads, 0)
    most = int(wanted.max()) if wanted.numel() else 0
    together = max(1, AT_ONCE // max(1, size * points.shape[3]))
    parts = [
        _some_heads(lanes[i : i + together], wanted[i : i + together], visible[i : i + together], most)
        for i in range(0, rows * heads, together)
    ]
    shape = (rows, heads)
    return Clustering(
        torch.cat([part.centres for part in parts]).unflatten(0, shape),
        torch.cat([part.nearest for part in parts]).unflatten(0, shape),
        torch.cat([part.distance for part in parts]).unflatten(0, shape),
    )


def _some_heads(
    points: Float[Tensor, "l n d"], wanted: Int64[Tensor, " l"], valid: Bool[Tensor, "l n"], most: int
) -> Clustering:
    found = lazy.k_center(points.double().masked_fill(~valid[..., None], 0), wanted, valid)
    centres = F.pad(found.centres, (0, most - found.centres.shape[1]), value=-1)
    return Clustering(centres, found.nearest, found.distance.float())


__all__ = ["Clustering", "k_center"]
