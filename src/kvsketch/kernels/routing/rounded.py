"""A classifier's weights in bytes, of which a step has half as much to read as in bfloat16, in C and on GPUs.

A weight is a whole number from -127 to 127, times a step of its column, times a level of its row. With steps alone,
those of all columns would be made for a few inner units whose weights are thirty times as large as others'. A level is
the root of its row's mean size. Of the buckets that a query visits two in a hundred are others than with weights in
bfloat16, and find as much ([results](../../../../docs/results.md#a-classifier-in-bytes)). Both are held.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int8, Int32
from torch import Tensor

from kvsketch.kernels.sources import Layer

MOST = 127
SIDE, DEEP = 32, 4  # columns, and rows of each, that lie together
LARGE, ROUNDED = 1 << 17, torch.bfloat16  # bytes of a layer's weights for a KV head, and in which numbers: see `pays`
MOST_ROWS = 1 << 13  # more, and C would have too few bits left for the numbers that weights are multiplied by


class Rounded(NamedTuple):
    """Whole numbers for weights, what a row's and a column's are to be multiplied by, and the sums of columns."""

    weights: Int8[Tensor, "h _ _ s f"]  # column blocks, and in these blocks of rows
    steps: Float[Tensor, "h c"]
    levels: Float[Tensor, "h k"]
    sums: Int32[Tensor, "h c"]


class ByColumn(NamedTuple):
    """The same with the bytes of a column side by side, and what bounds an inner layer of a query times `levels`.

    So many times the query's length, and so much beside that.
    """

    weights: Int8[Tensor, "h c k"]
    steps: Float[Tensor, "h c"]
    levels: Float[Tensor, "h k"]
    bounds: Float[Tensor, "h 2"]


def pays(weights: Float[Tensor, "h k c"]) -> bool:
    """Whether bytes pay: where answers are rounded as much, and weights do not stay near from step to step."""
    return weights.dtype == ROUNDED and weights[0].nbytes > LARGE


def in_bytes(weights: Float[Tensor, "h k c"]) -> Rounded | None:
    """The nearest bytes; None where their shape does not divide into blocks, or a number is none."""
    _, rows, columns = weights.shape
    if rows % DEEP or columns % SIDE or not 0 < rows <= MOST_ROWS:
        return None
    whole, steps, levels = _of_heads(weights)
    if not bool(steps.isfinite().all() and levels.isfinite().all()):
        return None
    blocks = whole.unflatten(1, (-1, DEEP)).unflatten(3, (-1, SIDE))
    return Rounded(blocks.permute(0, 3, 1, 4, 2).contiguous(), steps, levels, whole.sum(1, dtype=torch.int32))


def by_column(weights: Float[Tensor, "h k c"], inner: Layer) -> ByColumn | None:
    """The nearest bytes of the last layer behind an inner one; None where a number is none."""
    whole, steps, levels = _of_heads(weights)
    first, bias = (x.float() for x in inner)
    bounds = torch.stack([(x * levels[:, None]).amax((1, 2)) for x in (first.norm(dim=1, keepdim=True), bias.abs())], 1)
    if not all(bool(x.isfinite().all()) for x in (steps, levels, bounds)):
        return None
    return ByColumn(whole.mT.contiguous(), steps, levels, bounds)


def _of_heads(
    weights: Float[Tensor, "h k c"],
) -> tuple[Int8[Tensor, "h k c"], Float[Tensor, "h c"], Float[Tensor, "h k"]]:
    """One by one: what is in between is four times as large."""
    whole, steps, levels = map(torch.stack, zip(*map(_of_head, weights), strict=True))
    return whole, steps, levels


def _of_head(weights: Float[Tensor, "k c"]) -> tuple[Int8[Tensor, "k c"], Float[Tensor, " c"], Float[Tensor, " k"]]:
    wide, tiny = weights.float(), torch.finfo(torch.float32).tiny
    levels = wide.abs().mean(1).sqrt_().clamp_min_(tiny)
    level = wide / levels[:, None]
    steps = level.abs().amax(0).div_(MOST)
    return level.div_(steps.clamp_min(tiny)).round_().to(torch.int8), steps, levels
