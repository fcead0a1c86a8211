"""The walk of the experiments with less work: half of the products, in strips that fit a cache, and few calls per step.

A strip of STRIP tokens needs products with the tokens before it, whose signs are known by then: one matrix product
gives its y. Then its own tokens follow one by one. Signs equal the reference's except where rounding decides.
"""

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.kernels.balanced_walk.reference import ONES

STRIP = 64  # tokens
NOTHING = -60.0  # a logit whose exponential is nothing beside 1, but not denormal: denormal numbers are slow
PIECE = 32  # blocks whose products with a strip are made at a time: 2 MiB of float32 for blocks of 256


def halving_signs(
    keys: Float[Tensor, "l n d"],
    values: Float[Tensor, "l n e"],
    uniforms: Float[Tensor, "l n"],
    sizes: Int64[Tensor, " l"],
    scale: float,
    gain: float,
) -> Float[Tensor, "l n"]:
    """Signs of the first `sizes` tokens of every block; see `reference.halving_signs`."""
    precise = torch.float64 if keys.dtype == torch.float64 else torch.float32
    real = (torch.arange(keys.shape[1], device=keys.device) < sizes[:, None]).to(precise)
    keys, values = keys.to(precise), values.to(precise)
    mean = torch.bmm((real / sizes[:, None].clamp_min(1))[:, None], keys)
    keys = (keys - mean).mul_(scale**0.5)
    lengths, value_lengths = (torch.linalg.vector_norm(x, dim=2).square() * real for x in (keys, values))
    largest = lengths.amax(1)  # of all logits: ⟨k, k'⟩ is largest where k = k'
    diagonal = torch.exp(lengths - largest[:, None]) * (value_lengths + ONES) * real
    gains = gain / (diagonal.sum(1) / sizes.clamp_min(1)).clamp_min(1e-30)
    chances = (0.5 - uniforms).to(precise)  # + where y · gain is below it
    signs = torch.zeros_like(chances)
    positive = torch.zeros_like(gains)
    # All products are made in the same memory: fresh memory costs more than some of the arithmetic.
    room = keys.new_empty(2, min(PIECE, len(keys)) * min(STRIP, keys.shape[1]) * keys.shape[1])
    for start in range(0, keys.shape[1], STRIP):
        strip = slice(start, min(start + STRIP, keys.shape[1]))
        y, own = _products(keys, values, largest, signs, strip, room)
        y *= gains[:, None]
        own *= gains[:, None, None]
        _walk(y, own, chances, sizes, signs, positive, strip)
    return signs


def _products(
    keys: Float[Tensor, "l n d"],
    values: Float[Tensor, "l n e"],
    largest: Float[Tensor, " l"],
    signs: Float[Tensor, "l n"],
    strip: slice,
    room: Float[Tensor, "2 p"],
) -> tuple[Float[Tensor, "l m"], Float[Tensor, "l m m"]]:
    """A strip's y from the signs before it, and the products among its own tokens."""
    sums, own = list[Tensor](), list[Tensor]()
    for first in range(0, len(keys), PIECE):
        some = slice(first, first + PIECE)
        shape = (len(keys[some]), strip.stop - strip.start, strip.stop)
        logits, found = (
            torch.bmm(x[some, strip], x[some, : strip.stop].transpose(1, 2), out=place[: math.prod(shape)].view(shape))
            for x, place in zip((keys, values), room, strict=True)
        )
        found.add_(ONES).mul_(logits.sub_(largest[some, None, None]).clamp_min_(NOTHING).exp_())
        sums.append(torch.bmm(found[:, :, : strip.start], signs[some, : strip.start, None])[:, :, 0])
        own.append(found[:, :, strip.start :].clone())
    return torch.cat(sums), torch.cat(own)


def _walk(
    y: Float[Tensor, "l m"],
    own: Float[Tensor, "l m m"],
    chances: Float[Tensor, "l n"],
    sizes: Int64[Tensor, " l"],
    signs: Float[Tensor, "l n"],
    positive: Float[Tensor, " l"],
    strip: slice,
) -> None:
    """Write the signs of a strip, one token after the other, all blocks together."""
    half, least = sizes // 2, int(sizes.min())
    for j in range(strip.start, strip.stop):
        i = j - strip.start
        sign = torch.where(y[:, i] < chances[:, j], 1.0, -1.0).to(y.dtype)
        if 2 * j >= least:  # some block may have half of one sign
            sign.masked_fill_(positive >= half, -1.0)
            sign.masked_fill_(j - positive >= half, 1.0)
            sign.masked_fill_(sizes <= j, 0.0)
        signs[:, j] = sign
        positive += sign > 0
        y[:, i + 1 :].addcmul_(sign[:, None], own[:, i, i + 1 :])
