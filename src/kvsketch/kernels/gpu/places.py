"""Places of lanes: copied by their numbers, or numbered, the filled or the least ones first: one launch for each."""

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
    """Where some of a lane's places come: it depends on how many places before them, and of all, hold something."""
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
    held = tl.load(there + at.to(tl.int64) * step, mask=at < count, other=0)
    return (held != 0).to(tl.int32)  # bytes viewed as bool may be any


@triton.jit(do_not_specialize=["count", "most"])
def least(
    x, out,  # where they begin
    count, most,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Where a lane's places come, those of the `most` least first: the largest of these is found by halving.

    The bits of numbers, those of numbers below 0 turned over, are in the order of their size: 64 steps at most.
    """
    x += tl.program_id(0).to(tl.int64) * count
    out += tl.program_id(0).to(tl.int64) * count
    low = _ordered(tl.full([], float("-inf"), tl.float64))
    high = _ordered(tl.full([], float("inf"), tl.float64))
    while low < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        upto = tl.zeros([BLOCK], tl.int32)
        for first in range(0, count, BLOCK):
            upto += (_numbers(x, first, count, BLOCK) <= _number(middle)).to(tl.int32)
        found = tl.sum(upto, 0)
        low = tl.where(found < most, middle + 1, tl.where(found == most, middle, low))
        high = tl.where(found < most, high, middle)
    largest = _number(high)
    under = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        under += (_numbers(x, first, count, BLOCK) < largest).to(tl.int32)
    room = most - tl.sum(under, 0)  # for some of those that are as large
    smaller, alike = 0, 0  # before these
    for first in range(0, count, BLOCK):
        numbers = _numbers(x, first, count, BLOCK)
        less, same = (numbers < largest).to(tl.int32), (numbers == largest).to(tl.int32)
        both = tl.cumsum(less + (same << 16), 0)
        fewer, equal = smaller + (both & 0xFFFF), alike + (both >> 16)
        upto = fewer + tl.minimum(equal, room)
        taken = (less > 0) | ((same > 0) & (equal <= room))
        here = first + tl.arange(0, BLOCK)
        tl.store(out + tl.where(taken, upto - 1, most + here - upto), here.to(tl.int64), mask=here < count)
        smaller += tl.sum(less, 0)
        alike += tl.sum(same, 0)


@triton.jit
def _numbers(x, first, count, BLOCK: tl.constexpr):
    """Some numbers; NaN becomes the largest, and places that are not there are neither less nor more than any."""
    at = first + tl.arange(0, BLOCK)
    found = tl.load(x + at, mask=at < count, other=0.0)
    return tl.where(at < count, tl.where(found == found, found, float("inf")), float("nan"))


@triton.jit
def _ordered(number):
    """A number's bits, in the order of size."""
    bits = number.to(tl.int64, bitcast=True)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@triton.jit
def _number(ordered):
    """The number of such bits."""
    return (ordered ^ ((ordered >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)
