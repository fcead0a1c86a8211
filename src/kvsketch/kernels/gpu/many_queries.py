"""Weighted attention of many queries in Triton, as of a prompt: no logits in memory. `attend_many.py` is the kernel."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens, weighted_attention
from kvsketch.kernels import gpu
from kvsketch.kernels.gpu.attention import can_read_tokens, doubled

FLOAT32_ROWS = 16  # of a block: their products take many registers


def attend(
    query: Float[Tensor, "b hg q d"],
    tokens: WeightedTokens,
    scale: float,
    softcap: float | None = None,
    *,
    causal: bool = False,
    valid: Bool[Tensor, "b n"] | None = None,
) -> Partial | None:
    """Attention over weighted tokens, or causally among new ones of which some are valid.

    None where Triton does not do it: another device, numbers that do not lie side by side, wide heads, a wanted
    gradient.
    """
    width, value_width = query.shape[3], tokens.values.shape[3]
    if max(width, value_width) > gpu.MOST_WIDTH or query.stride(3) != 1 or query.numel() == 0:
        return None
    if query.shape[0] * query.shape[1] > gpu.MOST_ALONG_Y:
        return None
    if not gpu.can_read(query.device, query) or not can_read_tokens(tokens, query.device):
        return None
    if not gpu.works("attention of many queries", query.device, tokens.keys.dtype, _check):
        return None
    weights = [x is not None for x in (tokens.log_mass, tokens.log_value, valid)]
    kinds = f"{query.dtype} and {tokens.keys.dtype} × {width} and {value_width}, {causal}, {softcap}, {weights}"
    return gpu.tried(
        f"attention of many queries, {kinds}",
        query.device,
        lambda: _attended(query, tokens, scale, softcap, causal, valid),
    )


def _check(device: torch.device, dtype: torch.dtype) -> None:
    """Hold the kernel against the definition."""
    draw, at = torch.Generator().manual_seed(0), torch.arange(150, device=device)
    query, keys, values = (
        torch.randn(1, heads, 150, 128, generator=draw, device="cpu").to(device, dtype) for heads in (4, 2, 2)
    )
    mass = torch.randn(1, 2, 150, generator=draw, device="cpu").to(device)
    for tokens, causal in ((WeightedTokens(keys, values, mass), False), (WeightedTokens(keys, values), True)):
        visible = (at[:, None] >= at)[None, None] if causal else None
        right = weighted_attention(query.double(), doubled(tokens), 0.1, visible=visible)
        found = _attended(query, tokens, 0.1, None, causal, None)
        gpu.assert_like(found.out, right.out, found.lse, right.lse)


def _attended(
    query: Tensor, tokens: WeightedTokens, scale: float, softcap: float | None, causal: bool, valid: Tensor | None
) -> Partial:
    rows, heads, queries, width = query.shape
    keys, values, value_width = tokens.keys, tokens.values, tokens.values.shape[3]
    weights = [keys if x is None else x for x in (tokens.log_mass, tokens.log_value)]
    by_head = [x.expand(keys.shape[:3]).stride()[:2] if x is not keys else (0, 0) for x in weights]
    there = keys if valid is None else valid.to(torch.int8).contiguous()
    out = query.new_empty(rows, heads, queries, value_width)
    lse = query.new_empty(rows, heads, queries, dtype=torch.float32)
    wide = max(width, value_width) > 128
    most = FLOAT32_ROWS if keys.dtype == query.dtype == torch.float32 else 64 if wide else 128
    block = min(most, gpu.power_of_two(queries, 16))
    from kvsketch.kernels.gpu.attend_many import attend_many as kernel

    with gpu.current(query.device):
        kernel[(-(-queries // block), rows * heads)](
            *(query, keys, values, *weights, there, out, lse),
            *(query.stride()[:3], keys.stride()[:3], values.stride()[:3], *by_head, there.stride(0)),
            *(queries, keys.shape[2], float(scale), float(softcap or 1.0)),
            HEADS=heads, GROUP=heads // keys.shape[1], WIDTH=width, VALUE_WIDTH=value_width,
            HAS=gpu.bits(tokens.log_mass, tokens.log_value, valid),
            CAUSAL=causal, SOFTCAP=softcap is not None, ROWS=block, AT_ONCE=32 if wide or most == FLOAT32_ROWS else 64,
            KEY_BLOCK=gpu.power_of_two(width, 16), VALUE_BLOCK=gpu.power_of_two(value_width, 16),
            num_warps=8 if block == 128 else 4, num_stages=2,
        )  # fmt: skip
    return Partial(out, lse)
