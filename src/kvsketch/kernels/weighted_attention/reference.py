"""Weighted attention in plain torch, in blocks of queries so that the logits stay small."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvsketch import attention
from kvsketch.attention import Partial, WeightedTokens

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
    rows, heads, queries, _ = query.shape
    block = max(1, LOGITS_AT_ONCE // max(1, rows * heads * tokens.count))
    if queries <= block:
        return attention.weighted_attention(query, tokens, scale, visible=visible, softcap=softcap)
    parts = [
        attention.weighted_attention(
            query[:, :, start : start + block],
            tokens,
            scale,
            visible=visible if visible is None or visible.shape[2] == 1 else visible[:, :, start : start + block],
            softcap=softcap,
        )
        for start in range(0, queries, block)
    ]
    return Partial(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))


def log_normalizer(
    query: Float[Tensor, "b hg q d"],
    keys: Float[Tensor, "b h n d"],
    log_mass: Float[Tensor, "b h n"],
    scale: float,
    *,
    softcap: float | None = None,
) -> Float[Tensor, "b hg q"]:
    """Log of the denominator alone, Σ b·exp(s): from keys that have no values."""
    rows, heads, queries, _ = query.shape
    block = max(1, LOGITS_AT_ONCE // max(1, rows * heads * keys.shape[2]))
    parts = [query[:, :, :0, 0].to(log_mass.dtype)]
    for start in range(0, queries, block):
        part = query[:, :, start : start + block]
        logits = attention.logits_of(part, keys, scale, softcap)
        parts.append(torch.logsumexp(logits + log_mass[:, :, None], dim=-1).reshape(part.shape[:3]))
    return torch.cat(parts, 2)
