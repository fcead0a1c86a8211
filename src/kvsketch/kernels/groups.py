"""Sums of vectors by group, the same in every run."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def sums_of_groups(x: Float[Tensor, "l n w"], groups: Int64[Tensor, "l n"], count: int) -> Float[Tensor, "l {count} w"]:
    """The sums of a lane's vectors in each of `count` groups.

    On a GPU scatter_add_ adds in whatever order numbers come; for index_put_ torch sorts the places first.
    """
    sums = x.new_zeros(len(x), count, x.shape[2])
    if x.device.type == "cpu":
        return sums.scatter_add_(1, groups[..., None].expand_as(x), x)
    lanes = torch.arange(len(x), device=x.device)[:, None].expand_as(groups)
    return sums.index_put_((lanes, groups), x, accumulate=True)
