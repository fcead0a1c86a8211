"""Saap, for one KV head: buckets of keys, a classifier that says which of them a query should visit, and the visit.

Paper: Mazaré, Szilvasy, Lomeli, Massa, Murray, Jégou, Douze, *Inference-time sparse attention with asymmetric
indexing* (2025), sections 3 to 5 and appendix A. Buckets are made of keys before rotation, and the classifier sees
queries before rotation; attention itself is over rotated ones. Randomness comes in as `start` and in the classifier.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.attention import NO_MASS, Partial, exact_attention

APART = 2047  # queries learn from keys that are farther away than this: nearer ones are read in any case
LONG_RANGE = 1024  # and only queries whose best key is farther away than this


def assign(keys: Float[Tensor, "n d"], centroids: Float[Tensor, "c d"]) -> Int64[Tensor, " n"]:
    """The bucket of every key: that of the centroid with the largest inner product, the nearest on the sphere."""
    return (keys @ centroids.T).argmax(1)


def spherical_k_means(
    keys: Float[Tensor, "n d"], start: Int64[Tensor, " c"], iterations: int = 10
) -> Float[Tensor, "c d"]:
    """Centroids of length 1, from the keys with the numbers `start`. Appendix A: ten iterations, random start.

    An empty bucket begins again at the key that the centroid of the key's own bucket fits worst, each empty bucket at
    another key: the paper leaves that to its library.
    """
    if len(start) > len(keys):
        raise ValueError(f"{len(start)} buckets need at least as many keys, got {len(keys)}")
    centroids = F.normalize(keys[start], dim=1)
    for _ in range(iterations):
        buckets = assign(keys, centroids)
        sums = torch.zeros_like(centroids).index_add(0, buckets, keys)
        empty = (torch.bincount(buckets, minlength=len(start)) == 0).nonzero()[:, 0]
        fit = F.cosine_similarity(keys, centroids[buckets], dim=1)
        sums[empty] = keys[fit.argsort()[: len(empty)]]
        centroids = F.normalize(sums, dim=1)
    return centroids


def bucket_shares(
    queries: Float[Tensor, "q d"],
    keys: Float[Tensor, "n d"],
    buckets: Int64[Tensor, " n"],
    count: int,
    scale: float,
    visible: Bool[Tensor, "q n"],
) -> Float[Tensor, "q c"]:
    """A·H_k: each bucket's share of a query's attention, which the classifier learns (Equation 1).

    Queries and keys are rotated here. Rows of queries that see nothing are 0.
    """
    logits = (queries @ keys.T * scale).masked_fill(~visible, NO_MASS)
    attention = torch.softmax(logits, 1).masked_fill(~visible, 0.0)  # NaN in rows that see nothing
    return torch.zeros(len(queries), count, dtype=attention.dtype).index_add(1, buckets, attention)


def to_learn_from(
    query_positions: Int64[Tensor, " q"], key_positions: Int64[Tensor, " n"], apart: int = APART, sinks: int = 1
) -> Bool[Tensor, "q n"]:
    """Pairs of a query and an earlier key that is far away and not a sink. Section 4, appendix A."""
    return (query_positions[:, None] - key_positions > apart) & (key_positions >= sinks)


def long_range(
    queries: Float[Tensor, "q d"],
    keys: Float[Tensor, "n d"],
    query_positions: Int64[Tensor, " q"],
    key_positions: Int64[Tensor, " n"],
    away: int = LONG_RANGE,
    sinks: int = 1,
) -> Bool[Tensor, " q"]:
    """Queries whose best key, among all they see but the sink, is farther away than this. Appendix A."""
    seen = to_learn_from(query_positions, key_positions, -1, sinks)
    best = (queries @ keys.T).masked_fill(~seen, NO_MASS).argmax(1)
    return seen.any(1) & (query_positions - key_positions[best] > away)


@dataclass(frozen=True)
class QueryClassifier:
    """f_q after training: two layers with ReLU between them; the batch normalization is part of the first.

    Without a first layer it is linear: cheaper than what was published.
    """

    first: Float[Tensor, "h d"] | None
    first_bias: Float[Tensor, " h"] | None
    second: Float[Tensor, "c h"]
    second_bias: Float[Tensor, " c"]

    def log_probabilities(self, queries: Float[Tensor, "q d"]) -> Float[Tensor, "q c"]:
        """How much of its attention a query has in every bucket, in logs; queries as they are before rotation."""
        if self.first is not None and self.first_bias is not None:
            queries = torch.relu(queries @ self.first.T + self.first_bias)
        return torch.log_softmax(queries @ self.second.T + self.second_bias, 1)


def fold_normalization(
    weight: Float[Tensor, "h d"],
    bias: Float[Tensor, " h"],
    mean: Float[Tensor, " h"],
    variance: Float[Tensor, " h"],
    gain: Float[Tensor, " h"],
    offset: Float[Tensor, " h"],
    epsilon: float = 1e-5,
) -> tuple[Float[Tensor, "h d"], Float[Tensor, " h"]]:
    """A layer that does what this one does with the batch normalization after it, whose averages are fixed."""
    factor = gain * torch.rsqrt(variance + epsilon)
    return factor[:, None] * weight, factor * (bias - mean) + offset


def divergence(log_probabilities: Float[Tensor, "q c"], shares: Float[Tensor, "q c"]) -> Float[Tensor, ""]:
    """KLDiv(f_q(Q), A·H_k), the mean over queries. Equation 1."""
    return F.kl_div(log_probabilities, shares, reduction="batchmean")


def visited(probabilities: Float[Tensor, "g c"], probes: int) -> Int64[Tensor, " l"]:
    """The buckets that the queries of a group visit together: the largest sums of probabilities. Section 5."""
    return probabilities.sum(0).topk(probes).indices


def attend(
    queries: Float[Tensor, "g d"],
    keys: Float[Tensor, "n d"],
    values: Float[Tensor, "n e"],
    buckets: Int64[Tensor, " n"],
    visit: Int64[Tensor, " l"],
    scale: float,
) -> Partial:
    """Attention of a group's rotated queries over all keys of the visited buckets, with no top-k of them. Section 4."""
    visible = torch.isin(buckets, visit)
    return exact_attention(
        queries[None, :, None], keys[None, None], values[None, None], scale, visible=visible[None, None, None]
    )


def selectivity(buckets: Int64[Tensor, " n"], visit: Int64[Tensor, " l"]) -> float:
    """The share of keys that is read."""
    return float(torch.isin(buckets, visit).double().mean())
