"""Which clusters are best joined, by their distance and their sizes.

J. H. Ward, Hierarchical grouping to optimize an objective function, JASA 58(301), 1963: joining two clusters of n and m
points whose means are d apart adds s·d² to the squared distances within clusters, s = nm/(n + m). If d alone decides,
as in k-center, large clusters swallow each other and attention is wrong; if s·d² does, needles in noise are joined to
the noise. Here s^¼·d² decides.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.kernels.distances import squared_distances, squared_norms

AT_ONCE = 1 << 22  # costs worked on together: 32 MiB in float64
WORST = 1e300  # the cost of joining keys that are not numbers, and so have no distance: they are joined last
TINY = 1e-300


def cheapest_pairs(
    means: Float[Tensor, "l n d"], sizes: Int64[Tensor, "l n"], wanted: Int64[Tensor, " l"]
) -> tuple[Int64[Tensor, "l n"], Bool[Tensor, "l n"]]:
    """For each cluster the one it is cheapest to join with; and which are the first of a pair that is joined now.

    Clusters that are each other's cheapest are joined: the cheapest pairs, at most `wanted` of a head, and at least one
    where a head wants any. A cluster of size 0 does not count.
    """
    cost, other = _cheapest(means.double(), sizes)
    lane = torch.arange(len(means), device=means.device)
    number = torch.arange(means.shape[1], device=means.device)
    cheapest = cost.argmin(1)
    other[lane, other[lane, cheapest]] = cheapest  # as it is already, except with equal costs
    first = (number < other) & (other.gather(1, other) == number) & cost.isfinite()
    place = cost.masked_fill(~first, torch.inf).sort(dim=1, stable=True).indices.sort(dim=1).indices
    return other, first & (place < wanted[:, None])


def _cheapest(means: Float[Tensor, "l n d"], sizes: Int64[Tensor, "l n"]) -> tuple[Tensor, Tensor]:
    """The lowest cost of joining each cluster, and with which one."""
    count = means.shape[1]
    norms, n = squared_norms(means), sizes.double()
    place = (sizes > 0).cumsum(1)  # so that equal ones are joined two by two, not all to the first, a pair a call
    cost, other = torch.empty_like(n), torch.empty_like(sizes)
    strip = max(1, AT_ONCE // (len(means) * count))
    for start in range(0, count, strip):
        some = slice(start, start + strip)
        distances = squared_distances(means[:, some], norms[:, some], means, norms)
        if bool((distances == 0).sum() > distances.shape[0] * distances.shape[1]):
            apart = (place[:, some, None] ^ place[:, None]).double() * TINY
            distances = torch.where(distances == 0, apart, distances)
        costs = distances.mul_((1 / (1 / n[:, some, None] + 1 / n[:, None])).sqrt_().sqrt_())
        costs.nan_to_num_(nan=WORST, posinf=WORST)
        costs.diagonal(start, 1, 2).fill_(torch.inf)
        costs.masked_fill_((sizes == 0)[:, None], torch.inf).masked_fill_((sizes[:, some] == 0)[..., None], torch.inf)
        cost[:, some], other[:, some] = costs.min(2)
    return cost, other
