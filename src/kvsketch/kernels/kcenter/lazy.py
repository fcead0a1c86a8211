"""Greedy k-center that looks at all points once for several centres, and chooses the same ones.

Distances to the nearest centre only fall. So the m farthest points are candidates: as long as the
best of them is farther than any other point was at the start of the pass, it is the next centre,
however the other points' distances have fallen. How accepted centres change all distances is one matrix product.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.kernels.distances import squared_norms
from kvsketch.kernels.kcenter.common import Clustering, distances_to

CANDIDATES = 16  # per pass; 8 to 64 cost about the same on a CPU


def k_center(
    points: Float[Tensor, "l n d"],
    wanted: Int64[Tensor, " l"],
    valid: Bool[Tensor, "l n"],
    candidates: int = CANDIDATES,
) -> Clustering:
    """`wanted[i]` centres for head i; the same as `reference.k_center` gives."""
    norms = squared_norms(points)
    distance = torch.full_like(norms, float("inf")).masked_fill_(~valid, float("-inf"))
    nearest = torch.zeros(norms.shape, dtype=torch.int64, device=points.device)
    most = int(wanted.max()) if wanted.numel() else 0
    # One column more than centres: what a finished head "chooses" goes there.
    centres = torch.full((len(points), most + 1), -1, device=points.device)
    chosen = torch.zeros_like(wanted)
    width = min(candidates, points.shape[1])
    while bool((going := (chosen < wanted) & (distance.amax(1) > 0)).any()):
        index, bound = farthest(distance, width)
        between = distances_to(points, norms, index)
        order = _accept(distance, index, bound, between, centres, chosen, wanted, going)
        chosen = chosen + (order >= 0).sum(1)
        near, which = between.masked_fill_((order < 0)[:, None], float("inf")).min(2)
        nearest = torch.where(near < distance, order.gather(1, which), nearest)
        distance = torch.minimum(distance, near)
        # A centre belongs to itself, and is not chosen again.
        accepted = torch.where(order >= 0, float("-inf"), distance.gather(1, index))
        distance.scatter_(1, index, accepted)
        nearest.scatter_(1, index, torch.where(order >= 0, order, nearest.gather(1, index)))
    take_equal_points(distance, nearest, centres, chosen, wanted)
    return Clustering(centres[:, :most], nearest, distance.clamp_min(0).sqrt())


def take_equal_points(distance: Tensor, nearest: Tensor, centres: Tensor, chosen: Tensor, wanted: Tensor) -> None:
    """Where every point left equals a centre, the next ones are simply the first."""
    left = distance == 0
    number = chosen[:, None] + left.cumsum(1) - 1
    lane, point = (left & (number < wanted[:, None])).nonzero(as_tuple=True)
    centres[lane, number[lane, point]] = point
    nearest[lane, point] = number[lane, point]


def farthest(distance: Float[Tensor, "l n"], width: int) -> tuple[Int64[Tensor, "l m"], Float[Tensor, " l"]]:
    """The farthest points in the order of their numbers, and a bound on the distances of all others."""
    size = distance.shape[1]
    top = distance.topk(min(width + 1, size), dim=1)
    index = top.indices[:, :width]
    bound = top.values[:, width] if width < size else torch.full_like(top.values[:, 0], float("-inf"))
    # Of equally far points the first is the next centre. Where topk left it out, it replaces the last that topk took.
    first = distance.argmax(1, keepdim=True)
    missing = ~(index == first).any(1)
    index = torch.cat([index[:, :-1], torch.where(missing[:, None], first, index[:, -1:])], 1)
    bound = torch.where(missing, top.values[:, 0], bound)
    return index.sort(1).values, bound


def _accept(
    distance: Tensor,
    index: Int64[Tensor, "l m"],
    bound: Float[Tensor, " l"],
    between: Float[Tensor, "l n m"],
    centres: Int64[Tensor, "l k"],
    chosen: Int64[Tensor, " l"],
    wanted: Int64[Tensor, " l"],
    going: Bool[Tensor, " l"],
) -> Int64[Tensor, "l m"]:
    """Choose centres among the candidates while it is certain; the number of each as a centre, or -1.

    Writes the new centres to `centres`. The best candidate of all is certain: there is none farther.
    """
    lane = torch.arange(len(index), device=index.device)
    here = distance.gather(1, index)
    among = between.gather(1, index[..., None].expand(-1, -1, index.shape[1]))  # [l, m, m]
    order = torch.full_like(index, -1)
    last = centres.shape[1] - 1
    for step in range(index.shape[1]):
        value, best = here.max(1)
        if step:
            going = going & (value > bound) & (chosen < wanted)
            if not bool(going.any()):
                break
        order[lane, best] = torch.where(going, chosen, order[lane, best])
        centres[lane, torch.where(going, chosen, last)] = torch.where(going, index[lane, best], -1)
        here = torch.where(going[:, None], torch.minimum(here, among[lane, :, best]), here)
        here[lane, best] = torch.where(going, float("-inf"), here[lane, best])
        chosen = chosen + going
    return order
