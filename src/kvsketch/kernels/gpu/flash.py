"""Torch's flash attention on a GPU, with the log of the denominator, which its public function does not give.

For entries without weights: new tokens among themselves, and a past that is held as it was.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens, weighted_attention
from kvsketch.kernels import gpu
from kvsketch.kernels.gpu.attention import doubled

WHAT = "torch's flash attention"
DTYPES = (torch.float16, torch.bfloat16)
STEP = 8  # widths are a multiple of it


def attend(
    query: Float[Tensor, "b hg q d"],
    keys: Float[Tensor, "b h n d"],
    values: Float[Tensor, "b h n e"],
    scale: float,
    *,
    causal: bool = False,
) -> Partial | None:
    """Attention over all tokens, or causally among new ones; None where torch has no such kernel."""
    if query.device.type != "cuda" or not fits(query, values) or keys.dtype != query.dtype:
        return None
    if query.shape[3] % STEP or query.numel() * keys.shape[2] == 0:
        return None
    if any(x.stride(3) != 1 for x in (query, keys, values)) or not gpu.can_read(query.device, query, keys, values):
        return None
    if not gpu.works(WHAT, query.device, query.dtype, _check, triton=False):
        return None
    return attended(query, keys, values, scale, causal)


def fits(query: Tensor, values: Tensor) -> bool:
    """Whether the kernel is made for such numbers and widths; torch's own call fills widths up to STEP."""
    return query.dtype in DTYPES and query.shape[3] == values.shape[3] <= gpu.MOST_WIDTH


def attended(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
    """What the operator says; keys and values are those of a group's one head, and are not repeated."""
    by_step = (x.transpose(1, 2) for x in (query, keys, values))
    counts = query.shape[2], keys.shape[2]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *by_step, None, None, *counts, 0.0, causal, False, scale=scale
    )
    return Partial(out.transpose(1, 2), lse)


def _check(device: torch.device, dtype: torch.dtype) -> None:
    """Hold the operator against the definition."""
    draw, at = torch.Generator().manual_seed(0), torch.arange(150, device=device)
    query, keys, values = (
        torch.randn(2, heads, 150, 64, generator=draw, device="cpu").to(device, dtype) for heads in (4, 2, 2)
    )
    for causal in (False, True):
        visible = (at[:, None] >= at)[None, None] if causal else None
        right = weighted_attention(query.double(), doubled(WeightedTokens(keys, values)), 0.1, visible=visible)
        found = attended(query, keys, values, 0.1, causal)
        gpu.assert_like(found.out, right.out, found.lse, right.lse)
