"""The data to learn from, out of all shards: keys for k-means, and queries with their shares of attention."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.fitting.settings import FitSettings, generator
from kvsketch.fitting.shards import ShardLayer, long_range_queries, read_layer
from kvsketch.kernels.buckets import assign, bucket_shares, spherical_k_means
from kvsketch.kernels.groups import sums_of_groups


@dataclass(frozen=True)
class Clusters:
    """Centroids of keys before rotation, and of the same keys after it; and what they say of a query's attention.

    They say the logit of a bucket's mean key, and the log of how many keys it has: a linear map of queries.
    """

    before: Float[Tensor, "l c d"]
    rotated: Float[Tensor, "l c d"]
    weight: Float[Tensor, "l d c"]
    bias: Float[Tensor, "l 1 c"]


@dataclass(frozen=True)
class Pool:
    """Queries before rotation, and the shares of attention that the classifier should give for them."""

    queries: Float[Tensor, "l p d"]
    shares: Float[Tensor, "l p c"]


def cluster(paths: list[Path], lengths: list[int], layer: int, settings: FitSettings, device: str) -> Clusters:
    """Spherical k-means of a random sample of keys, for all KV heads."""
    draw = generator(settings.seed, layer, "keys")
    before, after = sample_keys(paths, lengths, layer, settings, draw)
    lanes, count = before.shape[:2]
    start = torch.stack([torch.randperm(count, generator=draw)[: settings.buckets] for _ in range(lanes)]).to(device)
    centroids, rotated = (spherical_k_means(keys.to(device), start, settings.iterations) for keys in (before, after))
    buckets = assign(before.to(device), centroids).cpu()
    sizes = torch.zeros(lanes, settings.buckets).scatter_add_(1, buckets, torch.ones(lanes, count))
    means = (
        sums_of_groups(before, buckets, settings.buckets)
        / sizes.clamp_min(1)[..., None]
        * read_layer(paths[0], layer).scale
    )
    shares = sizes.clamp_min(0.5) / count  # an empty bucket is not impossible
    return Clusters(centroids, rotated, means.transpose(1, 2).to(device), shares.log()[:, None].to(device))


def sample_keys(
    paths: list[Path], lengths: list[int], layer: int, settings: FitSettings, draw: torch.Generator
) -> tuple[Float[Tensor, "h m d"], Float[Tensor, "h m d"]]:
    """Keys before and after rotation, of the same tokens for every KV head, each text in its share; without sinks."""
    sinks, total = settings.shards.sinks, sum(length - settings.shards.sinks for length in lengths)
    chosen = torch.randperm(total, generator=draw)[: settings.keys_at_most].sort().values
    before, after, first = list[Tensor](), list[Tensor](), 0
    for path, length in zip(paths, lengths, strict=True):
        here = chosen[(chosen >= first) & (chosen < first + length - sinks)] - first + sinks
        shard = read_layer(path, layer)
        before.append(shard.keys_before[:, here].float())
        after.append(shard.keys[:, here].float())
        first += length - sinks
    return torch.cat(before, 1), torch.cat(after, 1)


def fill_pool(
    paths: list[Path], layer: int, centroids: Float[Tensor, "l c d"], settings: FitSettings, device: str
) -> Pool:
    """Long-range queries of every KV head, the same number from every text; a head with none learns from other queries.

    If a head has fewer queries than another, some of its queries are there more than once.
    """
    each = -(-settings.pool // len(paths))
    has_far = long_range_queries(paths, layer) > 0
    lanes = range(len(centroids))
    queries, shares = [list[Tensor]() for _ in lanes], [list[Tensor]() for _ in lanes]
    for path in paths:
        shard = read_layer(path, layer, device)
        buckets = assign(shard.keys_before.float(), centroids)
        for lane in lanes:
            chosen = queries_of(shard, lane, long_range_only=bool(has_far[lane]))[:each]
            queries[lane].append(shard.queries_before[chosen].float())
            shares[lane].append(shares_of(shard, chosen, lane, shard.keys, buckets, centroids.shape[1], settings))
    together = [torch.cat(parts)[: settings.pool] for parts in queries]
    size = max(map(len, together))
    repeated = [torch.arange(size, device=device) % len(part) for part in together]
    return Pool(
        torch.stack([part[index] for part, index in zip(together, repeated, strict=True)]),
        torch.stack([torch.cat(part)[index] for part, index in zip(shares, repeated, strict=True)]),
    )


def queries_of(shard: ShardLayer, lane: int, *, long_range_only: bool) -> Int64[Tensor, " q"]:
    """The numbers of a KV head's queries in a shard."""
    of_head = shard.query_heads == lane
    return (of_head & shard.query_is_far if long_range_only else of_head).nonzero()[:, 0]


def shares_of(
    shard: ShardLayer,
    chosen: Int64[Tensor, " q"],
    lane: int,
    keys: Float[Tensor, "l n d"],
    buckets: Int64[Tensor, "l n"],
    count: int,
    settings: FitSettings,
) -> Float[Tensor, "q c"]:
    """Each bucket's share of the far attention of some queries of a KV head; with keys of 0, its share of far keys."""
    return bucket_shares(
        shard.queries[chosen].float()[None], keys[lane].float()[None], buckets[lane][None], count, shard.scale,
        shard.query_positions[chosen], shard.key_positions, settings.shards.apart, settings.shards.sinks,
        shard.softcap,
    )[0]  # fmt: skip
