"""Greedy k-center in Triton, `kernels/gpu/centres.py`: None where Triton cannot be used.

Only for points of 16 bits. Their products are exact and summed in float32. So among points that are equally far, but
for a rounding error of their squared norms, it may choose another than `reference.py`, which uses float64; and points
nearer than 0.003 of their norm count as equal.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.kernels import gpu
from kvsketch.kernels.kcenter import lazy, reference
from kvsketch.kernels.kcenter.common import Clustering, joined

CANDIDATES = 1024  # per pass: 1,024 centres of 131,072 normal points take six passes; with four times as many five
AT_ONCE = 32  # lanes: 128 MiB for the distances between their candidates
ROWS, TILE = 128, 64  # points that a program reads, and candidates or centres that it compares with them
LEAST, MOST = 1e-20, 1e30  # bounds of the largest squared norm, within which float32 has all sums


def k_center(
    points: Float[Tensor, "l n d"], wanted: Int64[Tensor, " l"], valid: Bool[Tensor, "l n"], most: int
) -> Clustering | None:
    """The same as `reference.k_center` gives, with columns for `most` centres and distances in float32."""
    device, dtype, (lanes, count, width) = points.device, points.dtype, points.shape
    if not gpu.can_read(device, points) or dtype == torch.float32:
        return None
    if lanes * count * width * most == 0 or width > gpu.MOST_WIDTH or not gpu.works("k-center", device, dtype, _check):
        return None
    return gpu.tried(f"k-center of {dtype} × {width}", device, lambda: _in_parts(points, wanted, valid, most))


def _check(device: torch.device, dtype: torch.dtype) -> None:
    """Compare the kernels with torch in float64, on points between which no rounding decides, and on equal ones."""
    points = torch.randn(2, 200, 128, generator=torch.Generator().manual_seed(4), device="cpu").to(device, dtype)
    valid = torch.ones(2, 200, dtype=torch.bool, device=device)
    valid[1, ::3] = False
    wanted = torch.tensor([24, 15], device=device)
    found = _found(points, wanted, valid, 24, candidates=16)
    right = reference.k_center(points.double(), wanted, valid)
    assert found is not None, "normal points have usual norms"
    assert torch.equal(found.centres, right.centres), "the same centres"
    torch.testing.assert_close(found.distance[valid].double(), right.distance[valid], rtol=1e-5, atol=1e-5)
    equal = _found(points[:, :1].expand(-1, 200, -1), wanted, valid, 24, candidates=16)
    assert equal is not None
    assert not equal.distance[valid].any(), "equal points are at no distance"
    assert equal.centres[0].tolist() == list(range(24)), "and taken in their order"


def _in_parts(points: Tensor, wanted: Tensor, valid: Tensor, most: int) -> Clustering | None:
    parts = []
    for start in range(0, len(points), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        found = _found(points[some], wanted[some], valid[some], most)
        if found is None:
            return None
        parts.append(found)
    return joined(parts)


def _found(points: Tensor, wanted: Tensor, valid: Tensor, most: int, candidates: int = CANDIDATES) -> Clustering | None:
    """None where float32 might not hold the sums of squares."""
    points = points if points.stride(2) == 1 else points.contiguous()
    with gpu.current(points.device):
        norms = _norms(points, valid)
        largest = norms.amax(1)
        usual = (largest < MOST) & ((largest > LEAST) | (wanted == 0))
        return _clustered(points, norms, wanted, valid, most, candidates) if bool(usual.all()) else None


def _norms(points: Tensor, valid: Tensor) -> Tensor:
    """Squared norms, 0 for points that are not there."""
    from kvsketch.kernels.gpu.centres import squares

    lanes, count, width = points.shape
    norms = torch.empty(lanes, count, dtype=torch.float32, device=points.device)
    there = valid.to(torch.int8)
    squares[(-(-count // ROWS), lanes)](
        *(points, norms, there, *points.stride()[:2], count),
        WIDTH=width, BLOCK=gpu.power_of_two(width, 16), ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return norms


def _clustered(points: Tensor, norms: Tensor, wanted: Tensor, valid: Tensor, most: int, candidates: int) -> Clustering:
    """As many passes over the points as it takes; each of them waits for only one answer from the GPU."""
    from kvsketch.kernels.gpu.centres import approach, between, choose, measure

    device, (lanes, count, width), steps = points.device, points.shape, points.stride()[:2]
    candidates = min(candidates, count)
    size = gpu.power_of_two(candidates, TILE)
    distance = torch.full_like(norms, float("inf")).masked_fill_(~valid, float("-inf"))
    nearest = torch.zeros(lanes, count, dtype=torch.int64, device=device)
    centres = torch.full((lanes, most), -1, device=device)
    chosen, new = torch.zeros_like(wanted), torch.zeros(lanes, dtype=torch.int32, device=device)
    apart = torch.empty(lanes, size, size, dtype=torch.float32, device=device)
    rows, blocks = (-(-count // ROWS), lanes), {"WIDTH": width, "BLOCK": gpu.power_of_two(width, 16)}
    going = True
    while going:
        places, bounds = lazy.farthest(distance, candidates)
        between[((size // TILE) ** 2, lanes)](
            *(points, norms, chosen, wanted, places, apart, *steps, count, candidates),
            **blocks, SIZE=size, TILE=TILE, num_warps=4,
        )  # fmt: skip
        choose[(lanes,)](
            *(distance, nearest, centres, chosen, wanted, places, bounds, apart, new, count, candidates, most),
            SIZE=size, num_warps=4,
        )  # fmt: skip
        going = bool(((chosen < wanted) & (new > 0)).any())  # asked before the next launch, which takes longer
        approach[rows](
            *(points, norms, distance, nearest, centres, chosen, new, *steps, count, most),
            **blocks, ROWS=ROWS, AT_ONCE=TILE, num_warps=8, num_stages=2,
        )  # fmt: skip
    if bool((chosen < wanted).any()):
        lazy.take_equal_points(distance, nearest, centres, chosen, wanted)
    measure[(-(-count // TILE), lanes)](
        *(points, distance, nearest, centres, *steps, count, most), **blocks, ROWS=TILE, num_warps=4
    )
    return Clustering(centres, nearest, distance)
