"""Places of lanes: copied by their numbers, and numbered, those that hold something first. A launch each."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["index_step", "count"])
def copy(
    x, index, out,  # where they begin
    lane, place, index_lane, index_step, count,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some of a lane's places, as they are."""
    row = tl.program_id(1).to(tl.int64)
    rows, widths = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    real = rows < count
    wanted = tl.load(index + row * index_lane + rows.to(tl.int64) * index_step, mask=real, other=0)
    ok = real[:, None] & (widths < WIDTH)[None, :]
    found = tl.load(x + row * lane + wanted[:, None] * place + widths[None, :], mask=ok)
    tl.store(out + (row * count + rows)[:, None] * WIDTH + widths[None, :], found, mask=ok)


@triton.jit(do_not_specialize=["step", "count"])
def number(
    there, out,  # where they begin
    lane, step, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Where some of a lane's places come, which depends on how many of those before them hold something, and of all."""
    row, start = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK
    there += row * lane
    before = tl.zeros([BLOCK], tl.int32)
    every = before
    for first in range(0, count, BLOCK):
        held = _held(there, first, step, count, BLOCK)
        every += held
        before += tl.where(first < start, held, 0)
    here = start + tl.arange(0, BLOCK)
    held = _held(there, start, step, count, BLOCK)
    upto = tl.sum(before, 0) + tl.cumsum(held, 0)
    place = tl.where(held > 0, upto - 1, tl.sum(every, 0) + here - upto)
    tl.store(out + row * count + place, here.to(tl.int64), mask=here < count)


@triton.jit
def _held(there, first, step, count, BLOCK: tl.constexpr):
    at = first + tl.arange(0, BLOCK)
    return tl.load(there + at.to(tl.int64) * step, mask=at < count, other=0).to(tl.int32)
