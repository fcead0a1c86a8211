"""A classifier's weights in bytes, which `router.c` reads: half as much memory for a step to read as in bfloat16.

A weight is a whole number from -127 to 127, times a step of its column, times a level of its row: weights of a few
inner units are thirty times as large as those of the others, and a step of the column alone would be made for them.
The levels are roots of the rows' sizes, so that both are met half way. Then one of a hundred buckets is another one, as
in bfloat16 ([results](../../../../docs/results.md#a-classifier-in-bytes)).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int8, Int32
from torch import Tensor

MOST = 127
SIDE, DEEP = 32, 4  # columns, and rows of each, that lie together
MOST_ROWS = 1 << 16  # more, and whole numbers of 8 bits leave no room in a sum of 32


class Rounded(NamedTuple):
    """Whole numbers for weights, what a row's and a column's are to be multiplied by, and the sums of columns."""

    weights: Int8[Tensor, "h _ _ s f"]  # column blocks, and in these blocks of rows
    steps: Float[Tensor, "h c"]
    levels: Float[Tensor, "h k"]
    sums: Int32[Tensor, "h c"]


def in_bytes(weights: Float[Tensor, "h k c"]) -> Rounded | None:
    """The nearest bytes; None where their shape does not divide into blocks, or a number is none."""
    _, rows, columns = weights.shape
    if rows % DEEP or columns % SIDE or not 0 < rows < MOST_ROWS:
        return None
    wide, tiny = weights.float(), torch.finfo(torch.float32).tiny
    levels = wide.square().mean(2).sqrt().sqrt().clamp_min(tiny)
    wide = wide / levels[..., None]
    steps = wide.abs().amax(1) / MOST
    if not bool(steps.isfinite().all()):
        return None
    whole = (wide / steps.clamp_min(tiny)[:, None]).round_()
    blocks = whole.to(torch.int8).unflatten(1, (-1, DEEP)).unflatten(3, (-1, SIDE))
    return Rounded(blocks.permute(0, 3, 1, 4, 2).contiguous(), steps, levels, whole.sum(1).to(torch.int32))
