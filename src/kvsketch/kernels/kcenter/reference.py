"""Greedy k-center in plain torch, one pass over the points for every centre."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.kernels.distances import squared_norms
from kvsketch.kernels.kcenter.common import Clustering, distances_to


def k_center(points: Float[Tensor, "l n d"], wanted: Int64[Tensor, " l"], valid: Bool[Tensor, "l n"]) -> Clustering:
    """`wanted[i]` centres for head i, each the point farthest from those before it; of equally far ones the first."""
    norms = squared_norms(points)
    distance = torch.full_like(norms, float("inf")).masked_fill_(~valid, float("-inf"))
    nearest = torch.zeros(norms.shape, dtype=torch.int64, device=points.device)
    most = int(wanted.max()) if wanted.numel() else 0
    centres = torch.full((len(points), most), -1, device=points.device)
    for number in range(most):
        active = (number < wanted)[:, None]
        centre = distance.argmax(1, keepdim=True)
        centres[:, number : number + 1] = torch.where(active, centre, -1)
        new = distances_to(points, norms, centre)[..., 0]
        nearest = torch.where(active & (new < distance), number, nearest)
        distance = torch.where(active, torch.minimum(distance, new), distance)
        taken = torch.zeros_like(valid).scatter_(1, centre, True) & active
        distance = distance.masked_fill(taken, float("-inf"))
        nearest = nearest.masked_fill(taken, number)
    return Clustering(centres, nearest, distance.clamp_min(0).sqrt())
