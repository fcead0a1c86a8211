"""A classifier's weights in bytes: in C and on GPUs a step has half as much to read as with bfloat16.

A weight is an integer from -127 to 127, times the step of its column, times the level of its row. With steps alone, a
few inner units, whose weights are thirty times as large as others', would set the steps of all columns. A level is the
square root of its row's mean absolute weight. Two in a hundred of the buckets that a query visits are others than with
weights in bfloat16, and find as much ([results](../../../../docs/results.md#a-classifier-in-bytes)). Both the bytes and
the weights are held.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int8, Int32
from torch import Tensor

from kvsketch.kernels.sources import Layer

MOST = 127
SIDE, DEEP = 32, 4  # so many columns, and rows of each, lie together
LARGE, ROUNDED = 1 << 17, torch.bfloat16  # bytes of a layer's weights for a KV head, and their dtype: see `pays`
MOST_ROWS = 1 << 13  # with more C would have too few bits left for the numbers that weights are multiplied by


class Rounded(NamedTuple):
    """Integers for weights, the factors of their columns and rows, and the sums of columns."""

    weights: Int8[Tensor, "h _ _ s f"]  # blocks of columns, and in these blocks of rows
    steps: Float[Tensor, "h c"]
    levels: Float[Tensor, "h k"]
    sums: Int32[Tensor, "h c"]


class ByColumn(NamedTuple):
    """The same with the bytes of a column side by side, and bounds on a query's inner layer times `levels`.

    The bound is the first of `bounds` times the query's length, plus the second.
    """

    weights: Int8[Tensor, "h c k"]
    steps: Float[Tensor, "h c"]
    levels: Float[Tensor, "h k"]
    bounds: Float[Tensor, "h 2"]


def pays(weights: Float[Tensor, "h k c"]) -> bool:
    """Whether bytes pay: where answers are rounded as much anyway, and caches do not keep the weights between steps."""
    return weights.dtype == ROUNDED and weights[0].nbytes > LARGE


def in_bytes(weights: Float[Tensor, "h k c"]) -> Rounded | None:
    """The nearest bytes; None where their shape does not divide into blocks, or a number is not finite."""
    _, rows, columns = weights.shape
    if rows % DEEP or columns % SIDE or not 0 < rows <= MOST_ROWS:
        return None
    whole, steps, levels = _of_heads(weights)
    if not bool(steps.isfinite().all() and levels.isfinite().all()):
        return None
    blocks = whole.unflatten(1, (-1, DEEP)).unflatten(3, (-1, SIDE))
    return Rounded(blocks.permute(0, 3, 1, 4, 2).contiguous(), steps, levels, whole.sum(1, dtype=torch.int32))


def by_column(weights: Float[Tensor, "h k c"], inner: Layer) -> ByColumn | None:
    """The nearest bytes of a last layer that follows an inner one; None where a number is not finite."""
    whole, steps, levels = _of_heads(weights)
    first, bias = (x.float() for x in inner)
    bounds = torch.stack([(x * levels[:, None]).amax((1, 2)) for x in (first.norm(dim=1, keepdim=True), bias.abs())], 1)
    if not all(bool(x.isfinite().all()) for x in (steps, levels, bounds)):
        return None
    return ByColumn(whole.mT.contiguous(), steps, levels, bounds)


def _of_heads(
    weights: Float[Tensor, "h k c"],
) -> tuple[Int8[Tensor, "h k c"], Float[Tensor, "h c"], Float[Tensor, "h k"]]:
    """Head by head: intermediate numbers are four times as large."""
    whole, steps, levels = map(torch.stack, zip(*map(_of_head, weights), strict=True))
    return whole, steps, levels


def _of_head(weights: Float[Tensor, "k c"]) -> tuple[Int8[Tensor, "k c"], Float[Tensor, " c"], Float[Tensor, " k"]]:
    wide, tiny = weights.float(), torch.finfo(torch.float32).tiny
    levels = wide.abs().mean(1).sqrt_().clamp_min_(tiny)
    level = wide / levels[:, None]
    steps = level.abs().amax(0).div_(MOST)
    return level.div_(steps.clamp_min(tiny)).round_().to(torch.int8), steps, levels
