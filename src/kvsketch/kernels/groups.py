"""Sums of vectors by group, the same in every run."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def sums_of_groups(x: Float[Tensor, "l n w"], groups: Int64[Tensor, "l n"], count: int) -> Float[Tensor, "l {count} w"]:
    """The sum of each of so many groups of a lane's vectors.

    A GPU adds up what is scattered in whatever order it comes; where places are put, torch sorts them first.
    """
    sums = x.new_zeros(len(x), count, x.shape[2])
    if x.device.type == "cpu":
        return sums.scatter_add_(1, groups[..., None].expand_as(x), x)
    lanes = torch.arange(len(x), device=x.device)[:, None].expand_as(groups)
    return sums.index_put_((lanes, groups), x, accumulate=True)
