"""Random buckets: what any other way to choose buckets has to beat."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.algorithms.draws import uniforms
from kvsketch.caches.base import check_count, check_seed
from kvsketch.caches.bucketed import BucketedConfig, BucketedPast
from kvsketch.caches.question import Arriving, Question

KEYS, QUERIES = 0, 1  # what a number is drawn for


@dataclass(frozen=True, kw_only=True)
class RandomBuckets(BucketedConfig):
    """Keeps everything and reads buckets at random, of tokens in buckets at random."""

    name: ClassVar[str] = "random_buckets"

    buckets: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("buckets", self.buckets, least=1, most=1 << 24)
        check_seed(self.seed)

    def slots(self, layer: int) -> BucketedPast:
        return RandomPast(self, layer)


class RandomPast(BucketedPast):
    """A bucket is drawn for every token by its rank, and visits for every query by that of its token."""

    def __init__(self, config: RandomBuckets, layer: int) -> None:
        super().__init__(config, config.buckets)
        self.config: RandomBuckets = config
        self.layer = layer

    def label(self, arriving: Arriving) -> Int64[Tensor, "b h n t"]:
        head = torch.arange(arriving.keys.shape[1], device=arriving.keys.device)[:, None]
        drawn = uniforms(self.config.seed, self.layer, head, arriving.ranks[:, None], KEYS)
        return (drawn * self.buckets).long()[..., None]

    def scores(self, question: Question) -> Float[Tensor, "b h q c"]:
        assert question.ranks is not None, "queries come with their ranks"
        sizes = (self.keys.shape[1], self.buckets)
        head, bucket = (torch.arange(size, device=question.queries.device) for size in sizes)
        rank = question.ranks[:, None, :, None]
        return uniforms(self.config.seed, self.layer, head[:, None, None], rank, QUERIES, bucket)
