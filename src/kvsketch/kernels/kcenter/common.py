"""What the forms of k-center share: their result, and their distance."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.kernels.distances import squared_distances


@dataclass(frozen=True)
class Clustering:
    """Centres among the points of each head, in the order of choice, and what each point belongs to."""

    centres: Int64[Tensor, "... k"]  # which points they are; -1 where a head has fewer
    nearest: Int64[Tensor, "... n"]  # number of each point's centre, in the order of choice
    distance: Float[Tensor, "... n"]  # of each point from its centre


def joined(parts: Sequence[Clustering]) -> Clustering:
    """The results of groups of heads, one group after another."""
    return Clustering(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Clustering)))


def distances_to(
    points: Float[Tensor, "l n d"], norms: Float[Tensor, "l n"], index: Int64[Tensor, "l m"]
) -> Float[Tensor, "l n m"]:
    """Squared, from all points to those that `index` numbers; norms from `squared_norms`."""
    chosen = points.gather(1, index[..., None].expand(-1, -1, points.shape[2]))
    return squared_distances(points, norms, chosen, norms.gather(1, index))
