"""Where keys point, in float64: one launch, in which every key is read once."""

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
    ok = (rows < count)[:, None] & (widths < WIDTH)[None, :]
    key = tl.load(keys + row * lane + rows.to(tl.int64)[:, None] * step + widths[None, :], mask=ok, other=0.0)
    key = key.to(tl.float64)
    along = tl.load(mean + row * WIDTH + widths, mask=widths < WIDTH, other=0.0)
    length = tl.sqrt(tl.sum(key * key, 1))
    found = tl.sum(key * along[None, :], 1) / tl.maximum(length, LEAST)
    tl.store(out + row * count + rows, found, mask=rows < count)
