"""k-means buckets with queries assigned like keys: what Saap compares its classifier with (section 6.1)."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.caches.bucketed import BucketedPast
from kvsketch.caches.question import Arriving, Question
from kvsketch.caches.saap import IndexedConfig, nearest, needed
from kvsketch.kernels.routing import compared


@dataclass(frozen=True, kw_only=True)
class KMeans(IndexedConfig):
    """Keeps everything and reads the buckets whose centroids are nearest to the queries.

    `rope=True`: buckets are made of keys as they are after rotation, and queries are compared as they are after it.
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

    def slots(self, layer: int) -> BucketedPast:
        return KMeansPast(self, layer)


class KMeansPast(BucketedPast):
    """Buckets of keys, chosen by the inner products of centroids with queries."""

    def __init__(self, config: KMeans, layer: int) -> None:
        super().__init__(config, config.learnt.buckets)
        self.config: KMeans = config
        self.layer = layer

    def _centroids(self, at: Tensor) -> Float[Tensor, "h c d"]:
        learnt = self.config.learnt.layer(self.layer, at.device, at.dtype)
        return learnt.rotated_centroids if self.config.rope else learnt.centroids

    def label(self, arriving: Arriving) -> Int64[Tensor, "b h n t"]:
        keys = arriving.keys if self.config.rope else needed(arriving.unrotated, self.config)
        return nearest(keys, self._centroids(keys))

    def scores(self, question: Question) -> Float[Tensor, "b h q c"]:
        asking = question.queries if self.config.rope else needed(question.unrotated, self.config)
        return compared(asking.detach(), self._centroids(asking))
