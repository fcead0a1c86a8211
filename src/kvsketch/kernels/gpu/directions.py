"""Where keys point, and what they sum up to, in float64: one launch each, which reads every key once."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def towards(
    keys, mean, out,  # where they begin
    lane, step, count,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """⟨k, mean⟩ / ‖k‖ of some of a lane's keys."""
    row = tl.program_id(1).to(tl.int64)
    rows, widths = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    key = _keys(keys + row * lane, rows, widths, step, count, WIDTH)
    along = tl.load(mean + row * WIDTH + widths, mask=widths < WIDTH, other=0.0)
    length = tl.sqrt(tl.sum(key * key, 1))
    found = tl.sum(key * along[None, :], 1) / tl.maximum(length, LEAST)
    tl.store(out + row * count + rows, found, mask=rows < count)


@triton.jit(do_not_specialize=["count"])
def total(
    keys, out,  # where they begin
    lane, step, count,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """The sum of some of a lane's keys: sums of these are taken in one order, so that they are the same every time."""
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    rows, widths = part * SUMMED + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    found = tl.zeros([ROWS, BLOCK], tl.float64)
    for start in range(0, SUMMED, ROWS):
        found += _keys(keys + row * lane, rows + start, widths, step, count, WIDTH)
    out += (row * tl.num_programs(0) + part) * WIDTH
    tl.store(out + widths, tl.sum(found, 0), mask=widths < WIDTH)


@triton.jit
def _keys(keys, rows, widths, step, count, WIDTH: tl.constexpr):
    """Some keys, and zeros for those that are not there."""
    ok = (rows < count)[:, None] & (widths < WIDTH)[None, :]
    return tl.load(keys + rows.to(tl.int64)[:, None] * step + widths[None, :], mask=ok, other=0.0).to(tl.float64)
