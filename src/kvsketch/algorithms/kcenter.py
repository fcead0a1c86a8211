"""Greedy k-center for one head: a few tokens that are near to all others.

Algorithm: M. E. Dyer and A. M. Frieze, A simple heuristic for the p-centre problem, Operations
Research Letters 3(6), 1985: the next centre is the point farthest from the centres so far. No choice
of as many centres has less than half of its radius. SubGen and ClusterGen compress with it in their
experiments (arXiv:2402.06082, section 3.2); they do not say where it starts: here, with the first point.

A stream is clustered piece by piece: the centres held and the new points together are reduced to
centres again, and every centre stands for all the points that were ever assigned to it.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class Clustering:
    """Centres among n points, in the order of choice, and what each point belongs to."""

    centres: Int64[Tensor, " k"]  # which points they are
    nearest: Int64[Tensor, " n"]  # number of each point's centre, in the order of choice
    radius: Float[Tensor, ""]  # the largest distance of a point from its centre


def greedy_k_center(points: Float[Tensor, "n d"], count: int) -> Clustering:
    """`count` centres, each the point farthest from those before it; of equally far ones the first."""
    distance = torch.full((len(points),), float("inf"), dtype=points.dtype)
    nearest = torch.zeros(len(points), dtype=torch.int64)
    centres = list[int]()
    for number in range(min(count, len(points))):
        centre = int(distance.argmax())
        centres.append(centre)
        new = (points - points[centre]).norm(dim=1)
        nearest = torch.where(new < distance, number, nearest)
        distance = torch.minimum(distance, new)
        distance[centre], nearest[centre] = float("-inf"), number  # so that no point is taken twice
    return Clustering(torch.tensor(centres), nearest, distance.clamp_min(0).max())


@dataclass(frozen=True)
class Centres:
    """What is held of a stream: tokens, the number of tokens each stands for, and how far those may be."""

    keys: Float[Tensor, "k d"]
    values: Float[Tensor, "k e"]
    sizes: Float[Tensor, " k"]
    reach: Float[Tensor, " k"]  # no token of the cluster is farther from its centre


def take_tokens(held: Centres, keys: Float[Tensor, "n d"], values: Float[Tensor, "n e"], count: int) -> Centres:
    """Reduce the centres held and the new tokens together to at most `count` centres, in the order of the stream."""
    keys, values = torch.cat([held.keys, keys]), torch.cat([held.values, values])
    new = len(keys) - len(held.keys)
    sizes = torch.cat([held.sizes, held.sizes.new_ones(new)])
    reach = torch.cat([held.reach, held.reach.new_zeros(new)])
    found = greedy_k_center(keys, count)
    owner = found.centres[found.nearest]
    far = reach + (keys - keys[owner]).norm(dim=1)
    kept = found.centres.sort().values
    return Centres(
        keys=keys[kept],
        values=values[kept],
        sizes=torch.zeros_like(sizes).index_add(0, owner, sizes)[kept],
        reach=torch.zeros_like(reach).scatter_reduce(0, owner, far, "amax")[kept],
    )
