"""Buckets of the keys of all heads at once, each head a lane: k-means, assignment, shares of attention.

The form for one head is `algorithms/saap.py`; this one gives the same results.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.algorithms.saap import APART, LONG_RANGE, to_learn_from
from kvsketch.attention import NO_MASS
from kvsketch.kernels.groups import sums_of_groups
from kvsketch.kernels.native import assign as in_c

PRODUCTS_AT_ONCE = 1 << 24  # of keys with centroids: 64 MiB of float32


def assign(keys: Float[Tensor, "l n d"], centroids: Float[Tensor, "l c d"]) -> Int64[Tensor, "l n"]:
    """The bucket of every key: the centroid with the largest inner product."""
    found = in_c.assign(keys, centroids)
    if found is not None:
        return found
    step = max(1, PRODUCTS_AT_ONCE // max(1, centroids.shape[0] * centroids.shape[1]))
    into = centroids.transpose(1, 2)
    parts = [torch.bmm(part.to(into.dtype), into).argmax(2) for part in keys.split(step, dim=1)]
    return torch.cat(parts, 1) if parts else keys.new_empty(len(keys), 0, dtype=torch.int64)


def spherical_k_means(
    keys: Float[Tensor, "l n d"], start: Int64[Tensor, "l c"], iterations: int = 10
) -> Float[Tensor, "l c d"]:
    """Centroids of length 1 for every lane, starting from the keys numbered `start`; see `algorithms.saap`."""
    lanes, count = start.shape
    if count > keys.shape[1]:
        raise ValueError(f"{count} buckets need at least as many keys, got {keys.shape[1]}")
    centroids = F.normalize(_of_lanes(keys, start), dim=2)
    for _ in range(iterations):
        buckets = assign(keys, centroids)
        index = buckets[..., None].expand_as(keys)
        sums = sums_of_groups(keys, buckets, count)
        sizes = torch.zeros(lanes, count, dtype=torch.int64, device=keys.device)
        empty = sizes.scatter_add_(1, buckets, torch.ones_like(buckets)) == 0
        if bool(empty.any()):
            # The n-th empty bucket of a lane starts again at the n-th worst fitting key.
            fit = F.cosine_similarity(keys, centroids.gather(1, index), dim=2)
            worst = fit.argsort(dim=1)[:, :count].gather(1, (empty.cumsum(1) - 1).clamp_min(0))
            sums = torch.where(empty[..., None], _of_lanes(keys, worst), sums)
        centroids = F.normalize(sums, dim=2)
    return centroids


def bucket_shares(
    queries: Float[Tensor, "l q d"],
    keys: Float[Tensor, "l n d"],
    buckets: Int64[Tensor, "l n"],
    count: int,
    scale: float,
    query_positions: Int64[Tensor, " q"],
    key_positions: Int64[Tensor, " n"],
    farther_than: int = APART,
    sinks: int = 1,
    softcap: float | None = None,
) -> Float[Tensor, "l q c"]:
    """A·H_k over earlier keys more than `farther_than` away, for every lane; queries and keys are rotated.

    Two passes over the keys, never with all logits at once, find the log of the sum of exponentials, and then every
    bucket's share of it. A query that sees nothing has no shares.
    """
    lse = queries.new_full(queries.shape[:2], NO_MASS)

    def far_logits() -> Iterator[tuple[slice, Tensor]]:
        for part, products in _products(queries, keys):
            seen = to_learn_from(query_positions, key_positions[part], farther_than, sinks)
            logits = products.mul_(scale)
            if softcap is not None:
                logits = torch.tanh(logits / softcap) * softcap
            yield part, logits.masked_fill_(~seen, NO_MASS)

    for _, found in far_logits():
        lse = torch.logaddexp(lse, found.logsumexp(2))
    finite = lse.masked_fill(lse == NO_MASS, 0.0)[..., None]
    shares = queries.new_zeros(*queries.shape[:2], count)
    for part, found in far_logits():
        shares.scatter_add_(2, buckets[:, None, part].expand_as(found), found.sub_(finite).exp_())
    return shares


def long_range(
    queries: Float[Tensor, "l q d"],
    keys: Float[Tensor, "l n d"],
    query_positions: Int64[Tensor, " q"],
    key_positions: Int64[Tensor, " n"],
    farther_than: int = LONG_RANGE,
    sinks: int = 1,
) -> Bool[Tensor, "l q"]:
    """For every lane, the queries whose best key, of all they see but the sinks, is more than `farther_than` away."""
    best = queries.new_full(queries.shape[:2], NO_MASS)
    place = torch.zeros_like(best, dtype=torch.int64)
    for part, products in _products(queries, keys):
        seen = to_learn_from(query_positions, key_positions[part], -1, sinks)
        found = products.masked_fill_(~seen, NO_MASS).max(2)
        better = found.values > best  # the first of equals, as without parts
        best = torch.where(better, found.values, best)
        place = torch.where(better, found.indices + part.start, place)
    return (best > NO_MASS) & (query_positions - key_positions[place] > farther_than)


def _products(queries: Float[Tensor, "l q d"], keys: Float[Tensor, "l n d"]) -> Iterator[tuple[slice, Tensor]]:
    """Products of all queries with some of the keys at a time."""
    step = max(1, PRODUCTS_AT_ONCE // max(1, queries.shape[0] * queries.shape[1]))
    for first in range(0, keys.shape[1], step):
        part = slice(first, first + step)
        yield part, torch.bmm(queries, keys[:, part].transpose(1, 2))


def _of_lanes(x: Float[Tensor, "l n d"], index: Int64[Tensor, "l m"]) -> Float[Tensor, "l m d"]:
    return x.gather(1, index[..., None].expand(*index.shape, x.shape[2]))
