"""Distances between many points, from their products: |x|² + |y|² - 2⟨x, y⟩, in float64.

They decide which point is the farthest or the nearest, so they must not depend on the order in which
products were summed. Two things see to that: norms are made a rounding error too small, so that equal points
are at distance 0 and not at some tiny one; and distances are rounded to 24 bits, so that points that
are equally far compare as equal.
"""

from jaxtyping import Float
from torch import Tensor

ROUNDING = 1e-13  # relative; some hundred times that of float64
BITS = 24  # of float64's 53


def squared_norms(points: Float[Tensor, "l n d"]) -> Float[Tensor, "l n"]:
    """|x|², less a rounding error."""
    return points.square().sum(2) * (1 - ROUNDING)


def squared_distances(
    points: Float[Tensor, "l n d"],
    norms: Float[Tensor, "l n"],
    others: Float[Tensor, "l m d"],
    other_norms: Float[Tensor, "l m"],
) -> Float[Tensor, "l n m"]:
    """From every point to each of `others`; points in float64, norms from `squared_norms`."""
    sums = norms[:, :, None] + other_norms[:, None]
    return rounded(sums.baddbmm_(points, others.transpose(1, 2), alpha=-2).clamp_min_(0))


def rounded(x: Tensor, bits: int = BITS) -> Tensor:
    """float64 numbers rounded to so many bits, whatever their size (Veltkamp 1968)."""
    split = x * splitting_at(bits)
    return split.sub_(split - x)


def splitting_at(bits: int) -> float:
    """The factor by which `rounded` multiplies numbers."""
    return 2.0 ** (53 - bits) + 1
