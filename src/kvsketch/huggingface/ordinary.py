"""Ordinary attention, for keys without a link to a cache of kvsketch: equal to stock, also with softcap and sinks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvsketch.attention import Partial, WeightedTokens, merge
from kvsketch.huggingface.frequencies import GUARD
from kvsketch.kernels.weighted_attention import reference


def ordinary_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """Ordinary attention over the keys that came, as stock computes it."""
    queries, count = query.shape[2], key.shape[2]
    guard = getattr(module, GUARD, None)
    if guard is not None:
        guard.check_not_dropped(count)
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    partly_new = attention_mask is None and causal and 1 < queries < count  # a chunk after an ordinary cache
    if partly_new or (attention_mask is not None and attention_mask.ndim == 2):
        if attention_mask is not None:  # it covers all tokens, and a layer may have only the latest
            attention_mask = attention_mask[:, -count:]
        attention_mask = _mask_of_all_keys(query, count, attention_mask)
    if attention_mask is not None and attention_mask.shape[-1] != count:
        raise ValueError(
            f"the attention mask {tuple(attention_mask.shape)} is not for the {count} keys of this layer: a model with "
            "sliding layers and a kvsketch cache takes a 2-D padding mask, rows × tokens"
        )
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scale, **kwargs)
    if attention_mask is None and causal and queries > 1:
        at = torch.arange(count, device=query.device)
        attention_mask = (at[count - queries :, None] >= at)[None, None]
    if dropout or (attention_mask is not None and attention_mask.is_floating_point()):
        return _eager_attention(query, key, value, attention_mask, dropout, scale, softcap, s_aux), None
    part = reference.attend(query, WeightedTokens(key, value), scale, visible=attention_mask, softcap=softcap)
    return as_output(with_sinks(part, s_aux), query), None


def _eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention with all weights in memory: for dropout in training, or a mask that is added to logits."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    logits = query @ key.transpose(2, 3) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    elif attention_mask is not None:
        logits = logits + attention_mask
    if s_aux is not None:
        logits = torch.cat([logits, s_aux.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)], 3)
    weights = logits.softmax(3, dtype=torch.float32)[..., : key.shape[2]].to(value.dtype)
    return (F.dropout(weights, dropout) @ value).transpose(1, 2).contiguous()


def _mask_of_all_keys(query: Tensor, count: int, padding: Tensor | None) -> Tensor | None:
    """Stock's mask of new queries for `count` keys, the last of which are the queries' own."""
    rows, _, new, _ = query.shape
    return sdpa_mask(
        rows,
        new,
        count,
        count - new,
        0,
        attention_mask=padding,
        allow_is_causal_skip=False,
        device=query.device,
    )


def with_sinks(part: Partial, s_aux: Tensor | None) -> Partial:
    """The part with a learned sink (gpt-oss), if there is one: one more set, with mass and no value."""
    if s_aux is None:
        return part
    sinks = s_aux.float()[None, :, None].expand(part.lse.shape)
    return merge(part, Partial(torch.zeros_like(part.out), sinks))


def as_output(part: Partial, query: Tensor) -> Tensor:
    """The answer as transformers wants it."""
    out = part.out if part.out.dtype == query.dtype else part.out.to(query.dtype)
    out = out.transpose(1, 2)
    return out if out.is_contiguous() else out.contiguous()  # with a single token it is
