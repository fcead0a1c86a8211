"""What becomes of the weight of tokens that are dropped: kept tokens stand for them too (`weights=`)."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.caches.core.chooser import Pool
from kvsketch.kernels.distances import squared_distances, squared_norms

NONE, NEAREST, SPREAD = "none", "mass", "spread"
DISTANCES_AT_ONCE = 1 << 22  # 32 MiB of float64
STANDS = "stands"  # for how many tokens an entry stands, where dropped tokens leave their weight to others


def with_weights_left(weights: str, pool: Pool, start: int, index: Int64[Tensor, "l k"]) -> Float[Tensor, "l k"]:
    """For how many tokens each kept entry stands, once all others from `start` on have left their weight to them."""
    stands = pool.per_entry[STANDS]
    kept = stands.gather(1, index)
    if not index.shape[1]:
        return kept
    lost = places_of_dropped(pool, start, index)
    if weights == SPREAD:
        return kept + stands.gather(1, lost).sum(1, keepdim=True) / index.shape[1]
    lanes = torch.arange(len(lost), device=index.device)[:, None]
    there = pool.keys[lanes, index].double()
    norms, strip = squared_norms(there), max(1, DISTANCES_AT_ONCE // index.numel())
    for some in lost.split(strip, 1):
        dropped = pool.keys[lanes, some].double()
        distances = squared_distances(dropped, squared_norms(dropped), there, norms)
        kept = kept.scatter_add(1, distances.argmin(2), stands[lanes, some])
    return kept


def places_of_dropped(pool: Pool, start: int, index: Int64[Tensor, "l k"]) -> Int64[Tensor, "l m"]:
    """The numbers of entries from `start` on that are not kept: equally many in every lane."""
    gone = torch.ones(index.shape[0], pool.count, dtype=torch.bool, device=index.device).scatter_(1, index, False)
    gone[:, :start] = False
    return gone.nonzero()[:, 1].view(len(gone), pool.count - start - index.shape[1])
