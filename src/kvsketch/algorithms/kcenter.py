"""Greedy k-center for one head: a few tokens that are near to all others.

Algorithm: M. E. Dyer and A. M. Frieze, A simple heuristic for the p-centre problem, Operations
Research Letters 3(6), 1985: the next centre is the point farthest from the centres so far. No other choice
of as many centres has less than half of its radius. SubGen and ClusterGen compress with it in their
experiments (arXiv:2402.06082, section 3.2); they do not say where it starts: here, with the first point.

A stream is clustered piece by piece: what is held and the new points together are clustered again, and
every entry stands for all the points that were ever assigned to it. Two things are ours: an entry may be
the mean of its points, and points whose keys point away from all others may stay apart.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class Clustering:
    """Centres among n points, in the order of choice, and the centre to which each point belongs."""

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
class Clusters:
    """What is held of a stream: entries, the number of tokens each stands for, and how far those may be."""

    keys: Float[Tensor, "k d"]
    values: Float[Tensor, "k e"]
    sizes: Float[Tensor, " k"]
    reach: Float[Tensor, " k"]  # no token of the cluster is farther from its entry

    def at(self, index: Int64[Tensor, " m"]) -> "Clusters":
        """The clusters with these numbers."""
        return Clusters(self.keys[index], self.values[index], self.sizes[index], self.reach[index])

    def and_(self, other: "Clusters") -> "Clusters":
        """These clusters and then the others."""
        return Clusters(*(torch.cat([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self)))


def take_tokens(
    held: Clusters,
    keys: Float[Tensor, "n d"],
    values: Float[Tensor, "n e"],
    count: int,
    *,
    apart: int = 0,
    means: bool = False,
) -> Clusters:
    """Reduce the clusters held and the new tokens together to at most `count`.

    `apart` single tokens stay alone, those whose keys point away from the mean of all keys. The others are
    clustered: an entry is the cluster's centre, as published, or the mean of its tokens, keys and values.
    Those apart come first, then clusters in the order of their centres.
    """
    new = len(keys)
    pool = held.and_(Clusters(keys, values, held.sizes.new_ones(new), held.reach.new_zeros(new)))
    if len(pool.keys) <= count:
        return pool
    alone = away_from_mean(pool, apart)
    rest = torch.ones(len(pool.keys), dtype=torch.bool).index_fill(0, alone, False).nonzero()[:, 0]
    return pool.at(alone).and_(clustered(pool.at(rest), count - apart, means))


def away_from_mean(pool: Clusters, count: int) -> Int64[Tensor, " m"]:
    """Single tokens with the least ⟨k, mean of all keys⟩ / ‖k‖, in their order."""
    mean = (pool.keys * pool.sizes[:, None]).sum(0) / pool.sizes.sum()
    towards = torch.nn.functional.normalize(pool.keys, dim=1) @ mean
    order = towards.masked_fill(pool.sizes > 1, torch.inf).sort(stable=True).indices
    return order[:count].sort().values


def clustered(pool: Clusters, count: int, means: bool) -> Clusters:
    """`count` clusters of these, by greedy k-center."""
    found = greedy_k_center(pool.keys, count)
    owner = found.centres[found.nearest]
    kept = found.centres.sort().values
    sizes = torch.zeros_like(pool.sizes).index_add(0, owner, pool.sizes)
    keys, values = pool.keys, pool.values
    if means:
        shares = (pool.sizes.to(pool.keys.dtype) / sizes[owner])[:, None]
        keys, values = (torch.zeros_like(x).index_add(0, owner, x * shares) for x in (keys, values))
    far = pool.reach + (pool.keys - keys[owner]).norm(dim=1)
    reach = torch.zeros_like(pool.reach).scatter_reduce(0, owner, far, "amax")
    return Clusters(keys, values, sizes, reach).at(kept)
