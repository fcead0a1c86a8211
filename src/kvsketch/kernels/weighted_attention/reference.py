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
    """`lse` of `attend`, from keys that have no values."""
    precise = torch.float64 if query.dtype == torch.float64 else torch.float32
    queries = attention.fold_groups(query, keys.shape[1]).to(precise)
    block = max(1, LOGITS_AT_ONCE // max(1, keys.shape[0] * keys.shape[1] * keys.shape[2]))
    wide = keys.to(precise).transpose(-1, -2)
    parts = [queries[:, :, :0, 0]]
    for start in range(0, queries.shape[2], block):
        logits = queries[:, :, start : start + block] @ wide * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        parts.append(torch.logsumexp(logits + log_mass[:, :, None], dim=-1))
    return torch.cat(parts, 2).reshape(query.shape[:3])
