"""k-means buckets with queries assigned like keys: what Saap compares its classifier with (section 6.1)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.caches.core.query import Query
from kvsketch.caches.core.tokens import Seen
from kvsketch.caches.lookup.buckets import BucketLookup
from kvsketch.caches.lookup.saap import IndexedConfig, nearest, needed
from kvsketch.caches.lookup.store import Lookup
from kvsketch.kernels.routing.reference import of_group


@dataclass(frozen=True, kw_only=True)
class KMeans(IndexedConfig):
    """Keeps everything and reads the buckets whose centroids are nearest to the queries.

    `rope=True`: buckets are made of keys after rotation, and queries are compared after rotation.
    Deviation: the paper does not say how queries of a group choose together; here their inner products are averaged.
    """

    name: ClassVar[str] = "kmeans"

    rope: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.rope, bool):
            raise ValueError(f"rope must be True or False, got {self.rope!r}")

    @property
    def before_rotation(self) -> bool:  # type: ignore[override]
        return not self.rope

    def new_method(self, layer: int) -> Lookup:
        return KMeansLookup(self, layer)


class KMeansLookup(BucketLookup):
    """Buckets of keys, chosen by the inner products of centroids with queries."""

    def __init__(self, config: KMeans, layer: int) -> None:
        self.config, self.layer = config, layer
        super().__init__(config, config.learnt.buckets)

    def _centroids(self, at: Tensor, heads: int) -> Float[Tensor, "h c d"]:
        learnt = self.config.learnt.layer(self.layer, at.device, at.dtype, (self.first_head, heads))
        return learnt.rotated_centroids if self.config.rope else learnt.centroids

    def note(self, seen: Seen) -> Int64[Tensor, "b h n t"]:
        keys = seen.keys if self.config.rope else needed(seen.unrotated, self.config)
        return nearest(keys, self._centroids(keys, keys.shape[1]))

    def ask(self, query: Query, heads: int) -> Float[Tensor, "b h q c"]:
        asking = query.queries if self.config.rope else needed(query.unrotated, self.config)
        return compared(asking.detach(), self._centroids(asking, heads))


def compared(query: Float[Tensor, "b hg q d"], centroids: Float[Tensor, "h c d"]) -> Float[Tensor, "b h q c"]:
    """Mean inner product of the group's queries with every centroid."""
    return of_group(query, len(centroids), centroids.dtype, lambda asking: torch.bmm(asking, centroids.mT))
