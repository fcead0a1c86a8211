"""What both forms of k-center share: their result, their points, and their distance."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int64
from torch import Tensor

COARSE = 2.0**20  # float64 has 52 bits behind the first one


@dataclass(frozen=True)
class Clustering:
    """Centres among the points of each head, in the order of choice, and what each point belongs to."""

    centres: Int64[Tensor, "... k"]  # which points they are; -1 where a head has fewer
    nearest: Int64[Tensor, "... n"]  # number of each point's centre, in the order of choice
    distance: Float[Tensor, "... n"]  # of each point from its centre


def prepare(
    points: Float[Tensor, "l n d"], valid: Bool[Tensor, "l n"]
) -> tuple[Float[Tensor, "l n d"], Float[Tensor, "l 1"]]:
    """The points with mean 0 and no coordinate beyond 2, which changes no comparison of distances; and their unit.

    In float64: where two points are equally far to seven digits, as happens among thousands, the order
    of summation would choose between them in float32, and every form would choose its own.
    """
    held = valid[..., None]
    points = points.double().masked_fill(~held, 0)
    unit = points.abs().amax((1, 2), keepdim=True).clamp_min(1e-300)
    points = points / unit
    mean = points.sum(1, keepdim=True) / held.sum(1, keepdim=True).clamp_min(1)
    return (points - mean).masked_fill(~held, 0), unit[..., 0]


def norms_of(points: Float[Tensor, "l n d"]) -> Float[Tensor, "l n"]:
    """|x|², and half of COARSE."""
    return points.square().sum(2) + COARSE / 2


def distances_to(
    points: Float[Tensor, "l n d"], norms: Float[Tensor, "l n"], index: Int64[Tensor, "l m"]
) -> Float[Tensor, "l n m"]:
    """Squared, of all points to the chosen ones: |x|² + |c|² - 2⟨x, c⟩, with norms from `norms_of`.

    Adding COARSE and taking it away rounds to multiples of 2⁻³²: points that are equally far compare as
    equal, and equal points are at distance 0, in whatever order products were summed.
    """
    chosen = points.gather(1, index[..., None].expand(-1, -1, points.shape[2]))
    sums = norms[:, :, None] + norms.gather(1, index)[:, None]
    return sums.baddbmm_(points, chosen.transpose(1, 2), alpha=-2).sub_(COARSE).clamp_min_(0)
