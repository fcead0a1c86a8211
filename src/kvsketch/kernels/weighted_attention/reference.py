"""Weighted attention in plain torch, in blocks of queries so that the logits stay small."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvsketch import attention
from kvsketch.attention import Partial, WeightedTokens, join_queries

LOGITS_AT_ONCE = 1 << 25  # 128 MiB of float32


def attend(
    query: Float[Tensor, "b hg q d"],
    tokens: WeightedTokens,
    scale: float,
    *,
    visible: Bool[Tensor, "#b #h #q n"] | None = None,
    softcap: float | None = None,
) -> Partial:
    """`attention.weighted_attention`, one block of queries after another."""
    if visible is None or visible.shape[2] == 1:
        return attend_where(query, tokens, scale, lambda start, stop: visible, softcap=softcap)
    return attend_where(query, tokens, scale, lambda start, stop: visible[:, :, start:stop], softcap=softcap)


def attend_where(
    query: Float[Tensor, "b hg q d"],
    tokens: WeightedTokens,
    scale: float,
    visible: Callable[[int, int], Bool[Tensor, "#b #h #q n"] | None],
    *,
    softcap: float | None = None,
    at_once: int | None = None,
) -> Partial:
    """The same, with `visible(start, stop)` called to make the mask of each block of queries when its turn comes."""
    rows, heads, queries, _ = query.shape
    block = max(1, (at_once or LOGITS_AT_ONCE) // max(1, rows * heads * tokens.count))
    bounds = [(start, min(start + block, queries)) for start in range(0, queries, block)] or [(0, 0)]
    parts = [
        attention.weighted_attention(
            query[:, :, start:stop], tokens, scale, visible=visible(start, stop), softcap=softcap
        )
        for start, stop in bounds
    ]
    return parts[0] if len(parts) == 1 else join_queries(parts)


def log_normalizer(
    query: Float[Tensor, "b hg q d"],
    keys: Float[Tensor, "b h n d"],
    log_mass: Float[Tensor, "b h n"],
    scale: float,
    *,
    softcap: float | None = None,
) -> Float[Tensor, "b hg q"]:
    """Log of the denominator alone, Σ b·exp(s), for keys without values."""
    rows, heads, queries, _ = query.shape
    block = max(1, LOGITS_AT_ONCE // max(1, rows * heads * keys.shape[2]))
    parts = [query[:, :, :0, 0].to(log_mass.dtype)]
    for start in range(0, queries, block):
        part = query[:, :, start : start + block]
        logits = attention.logits_of(part, keys, scale, softcap)
        parts.append(torch.logsumexp(logits + log_mass[:, :, None], dim=-1).reshape(part.shape[:3]))
    return torch.cat(parts, 2)
