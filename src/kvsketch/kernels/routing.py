"""Which buckets queries expect their attention in, for all KV heads of a layer at once.

The form for one head is `algorithms/saap.py`. Queries of a group ask together (Saap, section 5).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


def classified(
    query: Float[Tensor, "b hg q d"],
    first: Float[Tensor, "h d k"] | None,
    first_bias: Float[Tensor, "h 1 k"] | None,
    second: Float[Tensor, "h k2 c"],
    second_bias: Float[Tensor, "h 1 c"],
) -> Float[Tensor, "b h q c"]:
    """Mean probability of every bucket over the group, by the classifiers; queries as they are before rotation."""

    def probabilities(asking: Tensor) -> Tensor:
        inner = asking
        if first is not None and first_bias is not None:
            inner = torch.relu(torch.baddbmm(first_bias, asking, first))
        return torch.softmax(torch.baddbmm(second_bias, inner, second).float(), 2)

    return _of_group(query, second.shape[0], second.dtype, probabilities)


def compared(query: Float[Tensor, "b hg q d"], centroids: Float[Tensor, "h c d"]) -> Float[Tensor, "b h q c"]:
    """Mean inner product of the group's queries with every centroid."""
    return _of_group(query, len(centroids), centroids.dtype, lambda asking: torch.bmm(asking, centroids.mT))


def _of_group(
    query: Float[Tensor, "b hg q d"], heads: int, dtype: torch.dtype, score: Callable[[Tensor], Tensor]
) -> Float[Tensor, "b h q c"]:
    """Scores of every query by its KV head's rule, and their mean over the group."""
    rows, _, queries, width = query.shape
    grouped = query.to(dtype).unflatten(1, (heads, -1)).transpose(0, 1)  # [h, b, g, q, d]
    scores = score(grouped.reshape(heads, -1, width))
    return scores.view(heads, rows, -1, queries, scores.shape[2]).mean(2).transpose(0, 1)
