"""Attention over segments by definition: over all rows, those of no segment masked."""

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens, weighted_attention
from kvsketch.kernels.indexed_attention.segments import Segments

MASK_AT_ONCE = 1 << 24  # elements of logits: 64 MiB of float32


def attend(
    query: Float[Tensor, "b hg q d"],
    keys: Float[Tensor, "b h n d"],
    values: Float[Tensor, "b h n e"],
    segments: Segments,
    scale: float,
    *,
    softcap: float | None = None,
) -> Partial:
    """Attention of every query over the rows of its segments, some queries at a time."""
    count = keys.shape[2]
    step = max(1, MASK_AT_ONCE // max(1, query.shape[0] * query.shape[1] * count))
    parts = [
        weighted_attention(
            query[:, :, start : start + step],
            WeightedTokens(keys, values),
            scale,
            visible=segments.part(start, start + step).mask(count),
            softcap=softcap,
        )
        for start in range(0, query.shape[2], step)
    ]
    return Partial(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))
