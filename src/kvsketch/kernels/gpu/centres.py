"""Greedy k-center: many centres each time that all points are read.

The farthest points are candidates, as in `kcenter/lazy.py`, but a thousand of them instead of sixteen: their distances
from one another are a matrix that tensor cores make at once (`between`). Taking a centre then means reading one row of
it (`choose`, a program for each lane), and how the new centres change all points' distances is a product again
(`approach`). Only the comparing goes step by step.

Squared distances are |x|² + |y|² - 2⟨x, y⟩ in float32, from exact products; those at the end (`measure`) are made from
differences.
"""

import triton
import triton.language as tl

SAME = tl.constexpr(1e-5)  # of a squared norm: points as near as that count as one, as equal points are after rounding
FARTHEST = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["count"])
def squares(
    points, norms, valid, lane_step, row_step, count,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Squared norms; points that are not there may hold anything."""
    rows, lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    there = rows < count
    ok = tl.load(valid + lane * count + rows, mask=there, other=0) != 0
    point = _rows(points + lane * lane_step, rows, there, row_step, WIDTH, BLOCK).to(tl.float32)
    point = tl.where(ok[:, None], point, 0.0)
    tl.store(norms + lane * count + rows, tl.sum(point * point, 1), mask=there)


@triton.jit(do_not_specialize=["count", "candidates"])
def between(
    points, norms, chosen, wanted, places, found, lane_step, row_step, count, candidates,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Squared distances of a lane's candidates from one another, a tile of them."""
    tile, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(chosen + lane) < tl.load(wanted + lane):
        points += lane * lane_step
        norms += lane * count
        places += lane * candidates
        one = tile // (SIZE // TILE) * TILE + tl.arange(0, TILE)
        other = tile % (SIZE // TILE) * TILE + tl.arange(0, TILE)
        ok, other_ok = one < candidates, other < candidates
        place, other_place = tl.load(places + one, mask=ok, other=0), tl.load(places + other, mask=other_ok, other=0)
        norm, other_norm = tl.load(norms + place), tl.load(norms + other_place)
        x = _rows(points, place, ok & (norm > 0.0), row_step, WIDTH, BLOCK)
        y = _rows(points, other_place, other_ok & (other_norm > 0.0), row_step, WIDTH, BLOCK)
        squared = norm[:, None] - 2 * tl.dot(x, tl.trans(y)) + other_norm[None, :]  # rounded as in `approach`
        squared = tl.where(squared > SAME * other_norm[None, :], squared, 0.0)
        tl.store(found + (lane * SIZE + one[:, None]) * SIZE + other[None, :], squared)


@triton.jit(do_not_specialize=["count", "candidates", "most"])
def choose(
    distance, nearest, centres, chosen, wanted, places, bounds, found, new, count, candidates, most,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Take centres among a lane's candidates while it is certain: no other point was farther than `bounds`.

    The farthest point of all is among them, so the first is certain. Candidates are in the order of their numbers, and
    of equally far ones the first is taken. A centre's own distance is -inf: it is not taken again.
    """
    lane = tl.program_id(0).to(tl.int64)
    distance += lane * count
    nearest += lane * count
    found += lane * SIZE * SIZE
    at = tl.arange(0, SIZE)
    ok = at < candidates
    place = tl.load(places + lane * candidates + at, mask=ok, other=0)
    far = tl.load(distance + place, mask=ok, other=-FARTHEST)
    bound = tl.maximum(tl.load(bounds + lane), 0.0)  # points at distance 0 equal a centre
    begin, end = tl.load(chosen + lane).to(tl.int32), tl.load(wanted + lane).to(tl.int32)

    number = begin
    taken = at * 0 - 1  # the numbers of candidates as centres
    farthest, which = tl.max(far, 0, return_indices=True)
    going = (number < end) & (farthest > 0.0)
    while going:
        near = tl.load(found + which * SIZE + at)
        taken = tl.where(at == which, number, taken)
        far = tl.where(near < far, near, far)
        far = tl.where(at == which, -FARTHEST, far)
        number += 1
        farthest, which = tl.max(far, 0, return_indices=True)
        going = (number < end) & (farthest > bound)

    tl.store(centres + lane * most + taken, place, mask=taken >= 0)
    tl.store(distance + place, at * 0.0 - FARTHEST, mask=taken >= 0)
    tl.store(nearest + place, taken.to(tl.int64), mask=taken >= 0)
    tl.store(chosen + lane, number.to(tl.int64))
    tl.store(new + lane, number - begin)


@triton.jit(do_not_specialize=["count", "most"])
def approach(
    points, norms, distance, nearest, centres, chosen, new, lane_step, row_step, count, most,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """What the new centres of a lane do to some of its points: of equally near ones the first counts."""
    rows, lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    fresh = tl.load(new + lane)
    if fresh > 0:
        points += lane * lane_step
        norms += lane * count
        begin = tl.load(chosen + lane) - fresh
        centres += lane * most + begin
        far = tl.load(distance + lane * count + rows, mask=rows < count, other=-FARTHEST)
        there = far > -FARTHEST
        norm = tl.load(norms + rows, mask=there, other=0.0)
        point = _rows(points, rows, there, row_step, WIDTH, BLOCK)
        least = tl.full([ROWS], FARTHEST, tl.float32)
        which = rows * 0
        for start in tl.range(0, fresh, AT_ONCE):
            numbers = start + tl.arange(0, AT_ONCE)
            ok = numbers < fresh
            place = tl.load(centres + numbers, mask=ok, other=0)
            centre = _rows(points, place, ok, row_step, WIDTH, BLOCK)
            square = tl.load(norms + place, mask=ok, other=FARTHEST)
            near, one = tl.min(square[None, :] - 2 * tl.dot(point, tl.trans(centre)), 1, return_indices=True)
            which = tl.where(near < least, start + one, which)
            least = tl.where(near < least, near, least)
        least += norm
        least = tl.where(least > SAME * norm, least, 0.0)
        tl.store(distance + lane * count + rows, least, mask=least < far)
        tl.store(nearest + lane * count + rows, begin + which, mask=least < far)


@triton.jit(do_not_specialize=["count", "most"])
def measure(
    points, distance, nearest, centres, lane_step, row_step, count, most,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """How far each point is from its centre: inf where a lane has none, 0 for points that are not there."""
    rows, lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    points += lane * lane_step
    far = tl.load(distance + lane * count + rows, mask=rows < count, other=-FARTHEST)
    has = (far > -FARTHEST) & (far < FARTHEST)
    number = tl.load(nearest + lane * count + rows, mask=has, other=0)
    place = tl.load(centres + lane * most + number, mask=has, other=0)
    point = _rows(points, rows, has, row_step, WIDTH, BLOCK).to(tl.float32)
    apart = point - _rows(points, place, has, row_step, WIDTH, BLOCK).to(tl.float32)
    far = tl.where(has, tl.sqrt(tl.sum(apart * apart, 1)), tl.maximum(far, 0.0))
    tl.store(distance + lane * count + rows, far, mask=rows < count)


@triton.jit
def _rows(points, places, ok, step, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Some points, and zeros for those that are not there."""
    widths = tl.arange(0, BLOCK)
    return tl.load(
        points + places.to(tl.int64)[:, None] * step + widths[None, :],
        mask=ok[:, None] & (widths < WIDTH)[None, :],
        other=0.0,
    )
