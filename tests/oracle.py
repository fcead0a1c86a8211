"""What a compressed cache must answer, computed the slow way: all keys kept, weights by the one-head algorithm."""

import functools

import torch
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from kvsketch.algorithms.draws import uniforms
from kvsketch.algorithms.sampling import Sample, empty_sample, offer_token
from kvsketch.attention import WeightedTokens, exact_attention, merge, weighted_attention
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.config import BLOCK, MethodConfig

NAME = "oracle"
DROPPED = float("-inf")


def budget_of(config: MethodConfig) -> Budget:
    keep = config.budget_given
    assert not isinstance(keep, str), "the oracle does not know a layer's share of bytes"
    if isinstance(keep, float):
        return Budget(keep, None, config.floor())
    return Budget(None, keep, config.least_entries())


@functools.cache
def sample_after(config: MethodConfig, layer: int, head: int, left: int) -> Sample:
    """What the one-head algorithm holds of the ranks 0…left-1; keys and values are the ranks themselves."""
    if left == 0:
        nothing = torch.zeros(1)
        return empty_sample(config.plan(budget_of(config)), nothing, nothing)
    sample = sample_after(config, layer, head, left - BLOCK)
    ranks = torch.arange(left - BLOCK, left)
    for rank, uniform in zip(ranks, uniforms(config.seed, layer, head, ranks), strict=True):
        token = rank.float()[None]
        sample = offer_token(sample, token, token, uniform)
    return sample


@functools.cache
def log_weights(config: MethodConfig, layer: int, heads: int, length: int) -> torch.Tensor:
    """Log weight of each of a row's first tokens: sinks, past by the one-head sample, window. [h, length]"""
    window = config.window_size(budget_of(config), length)
    left = 0 if window is None else max(0, length - config.sinks - window) // BLOCK * BLOCK
    weights = torch.zeros(heads, length)
    weights[:, config.sinks : config.sinks + left] = DROPPED
    if config.name == "uniform" and left:
        for head in range(heads):
            sample = sample_after(config, layer, head, left)
            held = sample.log_weights if config.weights == "count" else torch.zeros(len(sample.keys))
            weights[head, config.sinks + sample.keys[:, 0].long()] = held
    return weights


def read(config, layer, query, keys, values, real, scale, softcap=None):
    """Attention of the last q tokens of one row, given all its keys so far and which tokens are real."""
    heads, count, new = keys.shape[1], keys.shape[2], query.shape[2]
    old = count - new
    among = torch.ones(new, new, dtype=torch.bool).tril() & real[old:] | torch.eye(new, dtype=torch.bool)
    part = exact_attention(
        query, keys[:, :, old:], values[:, :, old:], scale, visible=among[None, None], softcap=softcap
    )
    if not real[:old].any():
        return part
    weights = torch.full((heads, old), DROPPED)
    weights[:, real[:old]] = log_weights(config, layer, heads, int(real[:old].sum()))
    held = WeightedTokens(keys[:, :, :old], values[:, :, :old], weights[None].to(torch.float32))
    return merge(part, weighted_attention(query, held, scale, softcap=softcap))


def install(model, config: MethodConfig) -> None:
    """Have a model with a stock cache answer as it should with a cache of this method."""

    def attention(module, query, key, value, attention_mask=None, scaling=None, softcap=None, s_aux=None, **kwargs):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        rows, count = query.shape[0], key.shape[2]
        if attention_mask is not None and attention_mask.ndim == 4:  # a sliding layer
            part = weighted_attention(query, WeightedTokens(key, value), scale, visible=attention_mask, softcap=softcap)
            out, lse = part.out, part.lse
        else:
            real = torch.ones(rows, count, dtype=torch.bool) if attention_mask is None else attention_mask
            parts = [
                read(
                    config,
                    module.layer_idx,
                    query[r : r + 1],
                    key[r : r + 1],
                    value[r : r + 1],
                    real[r],
                    scale,
                    softcap,
                )
                for r in range(rows)
            ]
            out, lse = torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts])
        if s_aux is not None:
            share = torch.sigmoid(lse - s_aux[None, :, None])
            out = out * share[..., None]
        return out.to(query.dtype).transpose(1, 2).contiguous(), None

    def mask(*args, mask_function=causal_mask_function, local_size=None, attention_mask=None, **kwargs):
        if local_size is None:
            return attention_mask
        kwargs.pop("allow_is_causal_skip", None)
        return sdpa_mask(
            *args,
            mask_function=mask_function,
            local_size=local_size,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            **kwargs,
        )

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    model.set_attn_implementation(NAME)


__all__ = ["budget_of", "install", "log_weights", "read"]
