"""Weighted attention through torch's fused CPU kernel: no logits in memory, keys read once per KV head.

`softmax_attention` calls the kernel and returns the log of the denominator, which the public
`scaled_dot_product_attention` does not. `attend_biased` adds the weights, as a float32 bias on the logits.

With a ≠ b the values get more columns: the kernel averages [a/c·v, b/c] under the weights
c = max(a, b), and the answer is the ratio of the two averages.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kvsketch.attention import NO_MASS, Partial, WeightedTokens, fold_groups, unfold_groups

LEAST_MASS = 1e-19  # of the largest weight: about the square root of the least number, so that quotients stay finite


def can_run(query: Tensor, softcap: float | None) -> bool:
    """Whether the fused kernel takes these queries."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    return query.device.type == "cpu" and query.dtype in floats and softcap is None


def softmax_attention(
    query: Float[Tensor, "b hg q d"],
    keys: Float[Tensor, "b h n d"],
    values: Float[Tensor, "b h n e"],
    scale: float,
    *,
    bias: Float[Tensor, " b #h #q n"] | None = None,
    causal: bool = False,
) -> Partial:
    """Attention with its lse; bit for bit what `scaled_dot_product_attention` computes on the CPU.

    The kernel wants keys and values of one width, so the narrower is padded with zeros. For a row whose
    bias is `-inf` everywhere it returns 0 with lse 0; `attend_biased` sets that lse to `-inf`.
    """
    query, keys, values = (
        x if x.stride(3) == 1 else x.contiguous() for x in (query, keys, values)
    )  # else the kernel reads the wrong numbers
    if causal:
        keys, values = _in_rows(keys), _in_rows(values)
    key_width, value_width = keys.shape[-1], values.shape[-1]
    if key_width != value_width:
        width = max(key_width, value_width)
        query, keys, values = (F.pad(x, (0, width - x.shape[-1])) for x in (query, keys, values))
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (query, keys, values))
    attend = _AttendedWithGradient.apply if wanted else _attended
    out, lse = attend(query, keys, values, bias, scale, causal)
    return Partial(out[..., :value_width], lse)


def _in_rows(of_prompt: Tensor) -> Tensor:
    """The same with each head's tokens next to one another in memory.

    Models put a token's heads together, which the kernel reads more slowly: by 5 to 7 % for thousands of tokens.
    """
    return of_prompt if of_prompt.stride(2) == of_prompt.shape[3] else of_prompt.contiguous()


def _attended(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, attn_mask=bias, scale=scale
    )
    return out, lse


class _AttendedWithGradient(torch.autograd.Function):
    """The kernel, with the gradient of the lse too, which merging needs: torch's backward leaves that out.

    The gradient of the logits is P ∘ (dP - Σ dO ∘ O + d lse). One more column in O and in dO adds the last term.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse = _attended(query, keys, values, bias, scale, causal)
        ctx.save_for_backward(query, keys, values, bias, out, lse)
        ctx.scale, ctx.causal = scale, causal
        return out, lse

    @staticmethod
    def backward(ctx: Any, *of_answers: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, bias, out, lse = ctx.saved_tensors
        of_out, of_lse = of_answers
        width = query.shape[-1]
        query, keys, values = (F.pad(x, (0, 1)) for x in (query, keys, values))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            torch.cat([of_out, torch.ones_like(of_out[..., :1])], -1),
            query,
            keys,
            values,
            torch.cat([out, -of_lse[..., None].to(out.dtype)], -1),
            lse,
            0.0,
            ctx.causal,
            attn_mask=bias,
            scale=ctx.scale,
        )
        return (*(x[..., :width] for x in found), None, None, None)


def attend_biased(query: Float[Tensor, "b hg q d"], tokens: WeightedTokens, scale: float) -> Partial:
    """Weighted attention with the log weights as a bias."""
    values, log_weight, shares_mass = _one_weight(tokens)
    bias = None if log_weight is None else log_weight[:, :, None].float()  # bf16 has steps of 0.03 at log 256
    part = softmax_attention(fold_groups(query, tokens.keys.shape[1]), tokens.keys, values, scale, bias=bias)
    if log_weight is not None:
        part = _without_dead_rows(part, log_weight)
    return _finish(part, query, tokens.values.shape[-1], shares_mass)


def _one_weight(tokens: WeightedTokens) -> tuple[Tensor, Tensor | None, bool]:
    """Values and a single log weight for the kernel, and whether the values carry columns of mass."""
    if tokens.log_value is None:
        return tokens.values, tokens.log_mass, False
    log_mass = torch.zeros_like(tokens.log_value) if tokens.log_mass is None else tokens.log_mass
    log_weight = torch.maximum(log_mass, tokens.log_value).float()
    finite = log_weight.masked_fill(log_weight == NO_MASS, 0.0)
    value_share, mass_share = torch.exp(tokens.log_value - finite), torch.exp(log_mass - finite)
    rows, heads, count, _ = tokens.values.shape
    high, low = _split(mass_share.expand(rows, heads, count), tokens.values.dtype)
    scaled = (tokens.values * value_share[..., None]).to(tokens.values.dtype)
    return torch.cat([scaled, high[..., None], low[..., None]], -1), log_weight, True


def _split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two numbers of `dtype` whose sum is x."""
    high = x.to(dtype)
    return high, (x - high.float()).to(dtype)


def _without_dead_rows(part: Partial, log_weight: Tensor) -> Partial:
    """Heads that hold nothing answer 0 with lse `-inf`."""
    dead = (log_weight == NO_MASS).all(-1)[..., None]  # [b, h, 1]
    return Partial(part.out.masked_fill(dead[..., None], 0.0), part.lse.masked_fill(dead, NO_MASS))


def _finish(part: Partial, query: Tensor, width: int, shares_mass: bool) -> Partial:
    out, lse = part.out, part.lse
    if shares_mass:
        mass = out[..., width].float() + out[..., width + 1].float()
        lse = lse + torch.log(mass)
        out = out[..., :width].float() / mass.masked_fill(mass == 0.0, 1.0).clamp_min(LEAST_MASS)[..., None]
    return Partial(unfold_groups(out, query.shape[1]), lse.reshape(query.shape[:3]))
