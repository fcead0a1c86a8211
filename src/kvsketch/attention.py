"""Attention over weighted tokens: two types, one merge, and the definition everything else is tested against.

Exponential attention is a ratio of two sums over tokens, and both sums are linear in the tokens:

    Attn(q) = Σ_i a_i · exp(⟨q, k_i⟩ · scale) · v_i  /  Σ_i b_i · exp(⟨q, k_i⟩ · scale)

So a long sequence can be replaced by a few tokens with weights: `a` for what a token adds to the
answer (value weight), `b` for what it adds to the denominator (mass weight). Exact attention has
a = b = 1. Everything here works with log a and log b, so that nothing overflows.

Legend of shapes: b rows of the batch, h KV heads, g query heads per KV head, q queries, n entries,
d width of keys, e width of values. Query heads are ordered KV head first: head = h_index · g + g_index.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool, Float
from torch import Tensor

NO_MASS = float("-inf")  # the log weight of an empty slot


@dataclass(frozen=True)
class WeightedTokens:
    """Entries per row and KV head. A weight of None means one for all; `-inf` marks an empty slot."""

    keys: Float[Tensor, "b h n d"]
    values: Float[Tensor, "b h n e"]
    log_mass: Float[Tensor, " b #h n"] | None = None
    log_value: Float[Tensor, " b #h n"] | None = None  # None: the same as log_mass

    @property
    def count(self) -> int:
        """Number of slots per row and head, empty ones included."""
        return self.keys.shape[2]

    @property
    def weights(self) -> list[Tensor]:
        """The logs of weights that are given."""
        return [x for x in (self.log_mass, self.log_value) if x is not None]


def log_mass_of(present: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b 1 n"] | None:
    """Log weights of places where a row has a token: 0 where it does, `-inf` where not."""
    if present is None:
        return None
    return log_of(present)[:, None]


def log_of(present: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """0 where something is, `-inf` where nothing is."""
    return torch.zeros(present.shape, dtype=torch.float32, device=present.device).masked_fill(~present, NO_MASS)


@dataclass(frozen=True)
class Partial:
    """Attention over some of the tokens, with the log of its denominator: enough to merge it with the rest."""

    out: Float[Tensor, "b hg q e"]
    lse: Float[Tensor, "b hg q"]


def merge(*parts: Partial) -> Partial:
    """Attention over the union of the parts' tokens; order and grouping do not matter.

    Each answer counts with its share of the joint denominator, so this stays exact when a ≠ b, as
    long as every part has mass of its own: entries with a value weight but no mass belong into one
    `WeightedTokens` with those that carry the mass.
    """
    if len(parts) == 1:
        return parts[0]
    lse = reduce(torch.logaddexp, (part.lse for part in parts))
    finite = lse.masked_fill(lse == NO_MASS, 0.0)  # no tokens in any of them: shares of zero, not NaN
    shared = (torch.exp(part.lse - finite)[..., None] * part.out for part in parts)
    return Partial(reduce(torch.add, shared), lse)


def join_queries(parts: Sequence[Partial]) -> Partial:
    """The answers of blocks of queries that follow one another."""
    return Partial(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))


def exact_attention(
    query: Float[Tensor, "b hg q d"],
    keys: Float[Tensor, "b h n d"],
    values: Float[Tensor, "b h n e"],
    scale: float,
    *,
    visible: Bool[Tensor, "#b #h #q n"] | None = None,
    softcap: float | None = None,
) -> Partial:
    """Attention over all tokens, or over the visible ones: a = b = 1."""
    return weighted_attention(query, WeightedTokens(keys, values), scale, visible=visible, softcap=softcap)


def weighted_attention(
    query: Float[Tensor, "b hg q d"],
    tokens: WeightedTokens,
    scale: float,
    *,
    visible: Bool[Tensor, "#b #h #q n"] | None = None,
    softcap: float | None = None,
) -> Partial:
    """The estimate Σ a·exp(s)·v / Σ b·exp(s), by definition: the oracle of every faster form.

    Computed in float32 (float64 for float64 input) and returned in it. `softcap` bends the logits
    as Gemma 2 does, before the weights are added.
    """
    logits = logits_of(query, tokens.keys, scale, softcap)
    if visible is not None:
        logits = logits.masked_fill(~_repeat_for_groups(visible, logits.shape[2]), NO_MASS)

    masses = logits if tokens.log_mass is None else logits + tokens.log_mass[:, :, None]
    lse = torch.logsumexp(masses, dim=-1)
    finite = lse.masked_fill(lse == NO_MASS, 0.0)[..., None]
    shares = masses - finite
    if tokens.log_value is not None:
        # A value whose own mass is not there may outgrow all numbers; half of their range leaves room for sums.
        shares = (logits + tokens.log_value[:, :, None] - finite).clamp_max(math.log(torch.finfo(logits.dtype).max) / 2)
    out = torch.exp(shares) @ tokens.values.to(logits.dtype)
    return Partial(unfold_groups(out, query.shape[1]), lse.reshape(query.shape[:3]))


def logits_of(
    query: Float[Tensor, "b hg q d"], keys: Float[Tensor, "b h n d"], scale: float, softcap: float | None
) -> Float[Tensor, "b h gq n"]:
    """⟨q, k⟩ · scale, bent by the softcap; in float32, or float64 for float64 input."""
    precise = torch.float64 if query.dtype == torch.float64 else torch.float32
    logits = fold_groups(query, keys.shape[1]).to(precise) @ keys.to(precise).transpose(-1, -2) * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def fold_groups(query: Float[Tensor, "b hg q d"], heads: int) -> Float[Tensor, "b h gq d"]:
    """Queries of the heads that share a KV head, as rows of one matrix: the keys are read once, not g times."""
    rows, query_heads, queries, width = query.shape
    return query.reshape(rows, heads, query_heads // heads * queries, width)


def unfold_groups(out: Float[Tensor, "b h gq e"], query_heads: int) -> Float[Tensor, "b hg q e"]:
    """Undo `fold_groups`."""
    rows, heads, folded, width = out.shape
    return out.reshape(rows, query_heads, folded * heads // query_heads, width)


def _repeat_for_groups(visible: Bool[Tensor, "b h q n"], folded: int) -> Bool[Tensor, "b h gq n"]:
    """The mask of q queries for the g·q rows of `fold_groups`."""
    return visible if visible.shape[2] == 1 else visible.repeat(1, 1, folded // visible.shape[2], 1)
