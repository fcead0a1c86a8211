"""Distances between many points, from their products: |x|² + |y|² - 2⟨x, y⟩."""

from jaxtyping import Float
from torch import Tensor

ROUNDING = 1e-13  # relative; some hundred times that of float64


def squared_norms(points: Float[Tensor, "l n d"]) -> Float[Tensor, "l n"]:
    """|x|², less a rounding error: so that two equal points are at distance 0 and not at some small one."""
    return points.square().sum(2) * (1 - ROUNDING)


def squared_distances(
    points: Float[Tensor, "l n d"],
    norms: Float[Tensor, "l n"],
    others: Float[Tensor, "l m d"],
    other_norms: Float[Tensor, "l m"],
) -> Float[Tensor, "l n m"]:
    """Of every point to every other, in float64; norms from `squared_norms`."""
    sums = norms[:, :, None] + other_norms[:, None]
    return sums.baddbmm_(points, others.transpose(1, 2), alpha=-2).clamp_min_(0)
