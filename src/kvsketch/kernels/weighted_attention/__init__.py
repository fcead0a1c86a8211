"""Attention over weighted tokens, and causal attention of new tokens among themselves.

`reference.py` is plain torch and runs anywhere. Few queries go to a kernel in C, `native/attention.c`, or in Triton,
`gpu/attend.py`. Many queries go, on a CPU, to `native/prompt.c`, or to torch's own kernel (`fused.py`) where there is
no C; on a GPU to torch's flash attention (`gpu/flash.py`) if the tokens have no weights, else to
`gpu/attend_many.py`. A faster form for another device is one more line in the two functions below.

`lse=False` says that the answer will not be merged with others. If neither a kernel for few queries nor one for CPUs
serves the call, and the tokens have no weights, torch's own attention is then the fastest; its `lse` is NaN.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens, fold_groups, join_queries, log_of, unfold_groups
from kvsketch.kernels import few_queries
from kvsketch.kernels.gpu import flash, many_queries
from kvsketch.kernels.native import prompt as in_c
from kvsketch.kernels.sources import Entries
from kvsketch.kernels.weighted_attention import fused, reference
from kvsketch.kernels.weighted_attention.reference import log_normalizer

MASK_AT_ONCE = 1 << 24  # elements, 64 MiB of float32: a mask of all queries against all keys would be n²


def weighted_attention(
    query: Float[Tensor, "b hg q d"],
    tokens: WeightedTokens,
    scale: float,
    *,
    softcap: float | None = None,
    lse: bool = True,
) -> Partial:
    """Attention over weighted tokens, all of them visible to all queries."""
    if tokens.count == 0 or query.shape[2] == 0:  # torch's kernels divide by these numbers
        return reference.attend(query, tokens, scale)
    found = few_queries.attend(query, [Entries(tokens)], tokens.keys.shape[1], scale, softcap)
    if found is None:
        found = in_c.attend(query, tokens, scale, softcap)
    if found is not None:
        return found
    if fused.can_run(query, softcap):
        return fused.attend_biased(query, tokens, scale)
    if softcap is None and tokens.log_mass is None and tokens.log_value is None:
        if not lse:
            return _answer_alone(query, tokens.keys, tokens.values, scale, causal=False)
        found = flash.attend(query, tokens.keys, tokens.values, scale)
    if found is None:
        found = many_queries.attend(query, tokens, scale, softcap)
    return reference.attend(query, tokens, scale, softcap=softcap) if found is None else found


def causal_attention(
    query: Float[Tensor, "b hg q d"],
    keys: Float[Tensor, "b h q d"],
    values: Float[Tensor, "b h q e"],
    scale: float,
    *,
    valid: Bool[Tensor, "b q"] | None = None,
    softcap: float | None = None,
    lse: bool = True,
) -> Partial:
    """Attention of q tokens among themselves: each sees itself and the valid ones before it."""
    if query.shape[2] <= 1:
        # A single token sees itself even if it is padding, so no row of the batch is empty.
        return weighted_attention(query, WeightedTokens(keys, values), scale, softcap=softcap, lse=lse)
    found = in_c.attend(query, WeightedTokens(keys, values), scale, softcap, causal=True, valid=valid)
    if found is not None:
        return found
    if valid is None and fused.can_run(query, softcap):
        return fused.softmax_attention(query, keys, values, scale, causal=True)
    if valid is None and softcap is None:
        if not lse and _has_kernel(query, keys, values):
            return _answer_alone(query, keys, values, scale, causal=True)
        found = flash.attend(query, keys, values, scale, causal=True)
    if found is None:
        found = many_queries.attend(query, WeightedTokens(keys, values), scale, softcap, causal=True, valid=valid)
    if found is not None:
        return found
    count = keys.shape[2]
    size = max(16, MASK_AT_ONCE // max(1, keys.shape[0] * count))
    blocks = [
        _causal_block(query, keys, values, scale, valid, softcap, start, min(start + size, count))
        for start in range(0, count, size)
    ]
    return join_queries(blocks)


def _has_kernel(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether torch has a kernel for this causal call; if not, it makes a matrix of all logits, on a GPU in one piece.

    On a GPU its only kernel for groups of queries is the one in flash.py.
    """
    return query.device.type != "cuda" or query.shape[1] == keys.shape[1] or flash.fits(query, values)


def _answer_alone(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
    """Attention by the call that transformers makes; the group is folded into rows if there is no mask to repeat."""
    folded = query if causal else fold_groups(query, keys.shape[1])
    out = F.scaled_dot_product_attention(
        folded, keys, values, scale=scale, is_causal=causal, enable_gqa=folded.shape[1] != keys.shape[1]
    )
    unknown = torch.full(query.shape[:3], float("nan"), dtype=torch.float32, device=query.device)
    return Partial(unfold_groups(out, query.shape[1]), unknown)


def _causal_block(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    valid: Tensor | None,
    softcap: float | None,
    start: int,
    stop: int,
) -> Partial:
    """Queries start…stop-1 against all keys up to stop-1."""
    at = torch.arange(stop, device=query.device)
    visible = (at[start:, None] >= at)[None, None]  # [1, 1, q, n]
    if valid is not None:
        # A padding token sees only itself: its answer is never used, but must not be NaN.
        visible = visible & valid[:, None, None, :stop] | (at[start:, None] == at)
    block, keys, values = query[:, :, start:stop], keys[:, :, :stop], values[:, :, :stop]
    if fused.can_run(query, softcap):
        return fused.softmax_attention(block, keys, values, scale, bias=log_of(visible))
    return reference.attend(block, WeightedTokens(keys, values), scale, visible=visible, softcap=softcap)


__all__ = ["causal_attention", "log_normalizer", "weighted_attention"]
