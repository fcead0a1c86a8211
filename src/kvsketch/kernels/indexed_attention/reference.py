"""Attention over segments by definition: over all rows, with those outside the segments masked."""

from jaxtyping import Float
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens
from kvsketch.kernels.sources import Segments
from kvsketch.kernels.weighted_attention.reference import attend_where

MASK_AT_ONCE = 1 << 24  # elements of logits: 64 MiB of float32


def attend(
    query: Float[Tensor, "b hg q d"],
    pairs: Float[Tensor, "b h n de"],
    segments: Segments,
    scale: float,
    *,
    softcap: float | None = None,
) -> Partial:
    """Attention of every query over the rows of its segments, some queries at a time."""
    count, width = pairs.shape[2], query.shape[3]
    return attend_where(
        query,
        WeightedTokens(pairs[..., :width], pairs[..., width:]),
        scale,
        lambda start, stop: segments.part(start, stop).mask(count),
        softcap=softcap,
        at_once=MASK_AT_ONCE,
    )
