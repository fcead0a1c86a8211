"""Random buckets: what any other way to choose buckets has to beat."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.caches.core.checks import check_count, check_seed
from kvsketch.caches.core.query import Query
from kvsketch.caches.core.tokens import Seen
from kvsketch.caches.lookup.buckets import BucketLookup
from kvsketch.caches.lookup.config import BucketedConfig
from kvsketch.caches.lookup.store import Lookup
from kvsketch.kernels.draws import uniforms

KEYS, QUERIES = 0, 1  # what a number is drawn for


@dataclass(frozen=True, kw_only=True)
class RandomBuckets(BucketedConfig):
    """Keeps everything, puts tokens into buckets at random, and reads buckets at random."""

    name: ClassVar[str] = "random_buckets"

    buckets: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("buckets", self.buckets, least=1, most=1 << 24)
        check_seed(self.seed)

    def new_method(self, layer: int) -> Lookup:
        return RandomLookup(self, layer)


class RandomLookup(BucketLookup):
    """Draws a bucket for every token by the token's rank, and visits for every query by the rank of its token."""

    def __init__(self, config: RandomBuckets, layer: int) -> None:
        self.seed, self.layer = config.seed, layer
        super().__init__(config, config.buckets)

    def note(self, seen: Seen) -> Int64[Tensor, "b h n t"]:
        head = self.first_head + torch.arange(seen.keys.shape[1], device=seen.keys.device)[:, None]
        drawn = uniforms(self.seed, self.layer, head, seen.ranks[:, None], KEYS)
        return (drawn * self.buckets).long()[..., None]

    def ask(self, query: Query, heads: int) -> Float[Tensor, "b h q c"]:
        sizes = (heads, self.buckets)
        head, bucket = (torch.arange(size, device=query.queries.device) for size in sizes)
        rank = query.ranks_in_row[:, None, :, None]
        return uniforms(self.seed, self.layer, (self.first_head + head)[:, None, None], rank, QUERIES, bucket)
