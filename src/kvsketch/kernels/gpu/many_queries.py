"""Weighted attention of many queries in Triton, as of a prompt: no logits in memory. `attend_many.py` is the kernel."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvsketch.attention import NO_MASS, Partial, WeightedTokens, weighted_attention
from kvsketch.kernels import gpu
from kvsketch.kernels.gpu.attention import can_read_tokens, doubled


class Blocks(NamedTuple):
    """How a launch is cut up. `whole`: blocks that all queries see come without masks."""

    queries: int
    entries: int
    warps: int
    stages: int
    whole: bool


USUAL = Blocks(128, 64, 8, 2, whole=True)  # takes 96 KiB of shared memory
DEEP = Blocks(128, 64, 8, 3, whole=True)  # 129 KiB
LARGE = Blocks(128, 128, 8, 3, whole=True)  # 225 KiB
SHARED = {"deep": 133_000, "large": 231_000}  # bytes that a processor must have for these
WIDE = Blocks(64, 32, 4, 2, whole=True)  # heads wider than 128
SINGLE = Blocks(16, 32, 4, 2, whole=False)  # float32: its products take many registers


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
    if not gpu.wanted_on(query.device) or query.stride(3) != 1 or query.numel() == 0:
        return None
    widest = max(width, value_width)
    if widest > gpu.MOST_WIDTH and gpu.too_wide(query.device, query.dtype, widest):
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
    """Compare the kernel with the definition: with weights, among new tokens, and where slots are empty."""
    draw, at = torch.Generator().manual_seed(0), torch.arange(150, device=device)
    query, keys, values = (
        torch.randn(1, heads, 150, 128, generator=draw, device="cpu").to(device, dtype) for heads in (4, 2, 2)
    )
    mass = torch.randn(1, 2, 150, generator=draw, device="cpu").to(device)
    empty = torch.zeros_like(mass, dtype=torch.bool)
    empty[:, 1, 20:90:7] = True
    holed = mass.masked_fill(empty, NO_MASS)
    strange_keys, strange_values = (x.masked_fill(empty[..., None], float("nan")) for x in (keys, values))
    cases = (
        (WeightedTokens(keys, values, mass), WeightedTokens(keys, values, mass), False),
        (WeightedTokens(keys, values), WeightedTokens(keys, values), True),
        (WeightedTokens(strange_keys, strange_values, holed), WeightedTokens(keys, values, holed), False),
    )
    for tokens, same, causal in cases:
        visible = (at[:, None] >= at)[None, None] if causal else None
        right = weighted_attention(query.double(), doubled(same), 0.1, visible=visible)
        found = _attended(query, tokens, 0.1, None, causal, None)
        gpu.assert_like(found.out, right.out, found.lse, right.lse)


def _attended(
    query: Tensor,
    tokens: WeightedTokens,
    scale: float,
    softcap: float | None,
    causal: bool,
    valid: Tensor | None,
    blocks: Blocks | None = None,
) -> Partial:
    rows, heads, queries, width = query.shape
    keys, values, value_width = tokens.keys, tokens.values, tokens.values.shape[3]
    weights = [keys if x is None else x for x in (tokens.log_mass, tokens.log_value)]
    by_head = [x.expand(keys.shape[:3]).stride()[:2] if x is not keys else (0, 0) for x in weights]
    there = keys if valid is None else valid.to(torch.int8).contiguous()
    out = query.new_empty(rows, heads, queries, value_width)
    lse = query.new_empty(rows, heads, queries, dtype=torch.float32)
    if blocks is None:
        blocks = _blocks(query, tokens, causal)
    block = min(blocks.queries, gpu.power_of_two(queries, 16))
    from kvsketch.kernels.gpu.attend_many import attend_many as kernel

    with gpu.current(query.device):
        kernel[(-(-queries // block), rows * heads)](
            *(query, keys, values, *weights, there, out, lse),
            *(query.stride()[:3], keys.stride()[:3], values.stride()[:3], *by_head, there.stride(0)),
            *(queries, keys.shape[2], float(scale), float(softcap or 1.0)),
            HEADS=heads, GROUP=heads // keys.shape[1], WIDTH=width, VALUE_WIDTH=value_width,
            HAS=gpu.bits(tokens.log_mass, tokens.log_value, valid),
            CAUSAL=causal, SOFTCAP=softcap is not None, ROWS=block, AT_ONCE=blocks.entries,
            KEY_BLOCK=gpu.power_of_two(width, 16), VALUE_BLOCK=gpu.power_of_two(value_width, 16), WHOLE=blocks.whole,
            num_warps=blocks.warps if block == blocks.queries else 4, num_stages=blocks.stages,
        )  # fmt: skip
    return Partial(out, lse)


def _blocks(query: Tensor, tokens: WeightedTokens, causal: bool) -> Blocks:
    """How a launch is cut up on this GPU: the larger blocks are, the less often entries are read."""
    if tokens.keys.dtype == query.dtype == torch.float32:
        return SINGLE
    if max(query.shape[3], tokens.values.shape[3]) > 128:
        return WIDE
    if tokens.keys.dtype == torch.float32:  # entries of float32 take twice the room
        return USUAL
    room = gpu.shared_memory(query.device)
    if room >= SHARED["large"] and query.shape[2] >= LARGE.queries and not causal and tokens.log_value is None:
        return LARGE
    return DEEP if room >= SHARED["deep"] else USUAL
