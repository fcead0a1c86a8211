"""The attention that queries expect in buckets, by a classifier: a launch for each of its layers.

The inner layer of a KV head is cut by its units, and the last one by its buckets. Where a GPU has that (`EARLY`),
programs begin before the launch ahead of theirs has ended, and wait for it themselves.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MOST = tl.constexpr(127 * 128)  # the largest whole number in two bytes, of 8 and of 7 bits
TINY = tl.constexpr(1e-30)  # so that nothing is divided by 0


@triton.jit
def inner(
    query, first, first_bias, hidden, levels, bounds, unit,  # where they begin
    query_strides, count,  # by row, head and step
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, SLICE: tl.constexpr, BYTES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some units of the inner layer, for all queries of a group.

    `BYTES`: times their levels, as integers in two bytes, times a unit that follows from the query's length alone: so
    it is the same for all slices.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()  # not sooner, so that all kernels before this one are done when the next one begins
    lane, part = tl.program_id(0), tl.program_id(1)
    head = (lane % HEADS).to(tl.int64)
    rows, units = tl.arange(0, ROWS), part * SLICE + tl.arange(0, SLICE)
    real, there = rows < GROUP * count, units < HIDDEN
    widths = tl.arange(0, KEY_BLOCK)
    weights = tl.load(
        first + head * WIDTH * HIDDEN + widths[:, None] * HIDDEN + units[None, :],
        mask=(widths < WIDTH)[:, None] & there[None, :],
        other=0.0,
    )
    bias = tl.load(first_bias + head * HIDDEN + units, mask=there, other=0.0).to(tl.float32)
    asked = _asked(query, lane, query_strides, count, HEADS, GROUP, WIDTH, ROWS, KEY_BLOCK)
    found = tl.dot(asked.to(weights.dtype), weights, input_precision="ieee") + bias[None, :]
    own = lane.to(tl.int64) * GROUP * count
    ok = real[:, None] & there[None, :]
    to = rows[:, None] * HIDDEN + units[None, :]
    found = tl.maximum(found, 0.0)
    if BYTES:
        level = tl.load(levels + head * HIDDEN + units, mask=there, other=0.0)
        length = tl.sqrt(tl.sum(asked.to(tl.float32) * asked.to(tl.float32), 1))
        each = (length * tl.load(bounds + 2 * head) + tl.load(bounds + 2 * head + 1)) / MOST + TINY
        expected = found * level[None, :] / each[:, None]
        whole = tl.floor(tl.where(expected < MOST + 64, expected, 0.0) + 0.5).to(tl.int32)  # `each` shows NaN and inf
        high = (whole + 64) >> 7
        hidden += 2 * own * HIDDEN
        tl.store(hidden + to, high.to(tl.int8), mask=ok)
        tl.store(hidden + GROUP * count * HIDDEN + to, (whole - high * 128).to(tl.int8), mask=ok)
        if part == 0:
            tl.store(unit + own + rows, each, mask=real)
    else:
        tl.store(hidden + own * HIDDEN + to, found.to(hidden.dtype.element_ty), mask=ok)


@triton.jit
def last(
    query, hidden, weights, bias, logits,  # where they begin
    query_strides, count,  # by row, head and step
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, BUCKETS: tl.constexpr,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, SLICE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Logits of some buckets."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    lane, part = tl.program_id(0), tl.program_id(1)
    head = (lane % HEADS).to(tl.int64)
    rows, buckets = tl.arange(0, ROWS), part * SLICE + tl.arange(0, SLICE)
    real, there = rows < GROUP * count, buckets < BUCKETS
    inner_width: tl.constexpr = HIDDEN if HIDDEN else WIDTH
    weights += head * inner_width * BUCKETS
    found = tl.zeros([ROWS, SLICE], tl.float32)
    if HIDDEN:
        hidden += lane.to(tl.int64) * GROUP * count * HIDDEN
        for begin in tl.range(0, HIDDEN, AT_ONCE):
            units = begin + tl.arange(0, AT_ONCE)
            given = tl.load(
                hidden + rows[:, None] * HIDDEN + units[None, :],
                mask=real[:, None] & (units < HIDDEN)[None, :],
                other=0.0,
            )
            found += _last_layer(given, weights, units, buckets, HIDDEN, BUCKETS)
    else:
        asked = _asked(query, lane, query_strides, count, HEADS, GROUP, WIDTH, ROWS, KEY_BLOCK)
        found += _last_layer(asked, weights, tl.arange(0, KEY_BLOCK), buckets, WIDTH, BUCKETS)
    found += tl.load(bias + head * BUCKETS + buckets, mask=there, other=0.0).to(tl.float32)[None, :]
    own = lane.to(tl.int64) * GROUP * count
    _keep(logits + own * BUCKETS, found, buckets, count, GROUP, BUCKETS, ROWS)


@triton.jit
def _keep(logits, found, buckets, count, GROUP: tl.constexpr, BUCKETS: tl.constexpr, ROWS: tl.constexpr):
    """Write a lane's logits, the group's of each step together."""
    rows = tl.arange(0, ROWS)
    to = (rows % count * GROUP + rows // count)[:, None] * BUCKETS + buckets[None, :]
    tl.store(logits + to, found, mask=(rows < GROUP * count)[:, None] & (buckets < BUCKETS)[None, :])


@triton.jit
def last_in_bytes(
    pairs, unit, weights, steps, bias, logits,  # where they begin
    count,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HIDDEN: tl.constexpr, BUCKETS: tl.constexpr, ROWS: tl.constexpr,
    DEEP: tl.constexpr, SLICE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Logits of some buckets; products are of bytes, and their sums exact.

    All weights are on their way before this waits for the inner layer, which has waited for whatever writes weights.
    """
    lane, part = tl.program_id(0), tl.program_id(1)
    head = (lane % HEADS).to(tl.int64)
    buckets, units = part * SLICE + tl.arange(0, SLICE), tl.arange(0, DEEP)
    there, inside = buckets < BUCKETS, units < HIDDEN
    some = tl.load(
        weights + (head * BUCKETS + buckets[:, None]) * HIDDEN + units[None, :],
        mask=there[:, None] & inside[None, :],
        other=0,
    )
    step = tl.load(steps + head * BUCKETS + buckets, mask=there, other=0.0)
    beside = tl.load(bias + head * BUCKETS + buckets, mask=there, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    asking = GROUP * count
    own, rows = lane.to(tl.int64) * asking, tl.arange(0, ROWS)
    both = tl.arange(0, 2 * ROWS)
    given = tl.load(
        pairs + (2 * own + both // ROWS * asking + both % ROWS)[:, None] * HIDDEN + units[None, :],
        mask=(both % ROWS < asking)[:, None] & inside[None, :],
        other=0,
    )
    real = rows < asking
    each = tl.load(unit + own + rows, mask=real, other=0.0)
    sums = _in_two(given, some, ROWS, DEEP, SLICE).to(tl.float32)
    found = tl.sum(tl.reshape(sums * tl.where(both < ROWS, 128.0, 1.0)[:, None], [2, ROWS, SLICE]), 0)
    found = found * each[:, None] * step[None, :] + beside[None, :]
    _keep(logits + own * BUCKETS, found, buckets, count, GROUP, BUCKETS, ROWS)


@triton.jit
def _in_two(given, weights, ROWS: tl.constexpr, DEEP: tl.constexpr, SLICE: tl.constexpr):
    """Products over the first half of the units and over the second, which need not wait for one another."""
    low, high = tl.split(tl.permute(tl.reshape(given, [2 * ROWS, 2, DEEP // 2]), (0, 2, 1)))
    first, second = tl.split(tl.permute(tl.reshape(weights, [SLICE, 2, DEEP // 2]), (0, 2, 1)))
    found = tl.dot(low, tl.trans(first), out_dtype=tl.int32)
    return found + tl.dot(high, tl.trans(second), out_dtype=tl.int32)


@triton.jit
def _asked(
    query, lane, strides, count,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """The queries of a group."""
    row, head = lane // HEADS, (lane % HEADS).to(tl.int64)
    rows, widths = tl.arange(0, ROWS), tl.arange(0, KEY_BLOCK)
    places = row.to(tl.int64) * strides[0] + (head * GROUP + rows // count) * strides[1] + (rows % count) * strides[2]
    real = rows < GROUP * count
    return tl.load(query + places[:, None] + widths[None, :], mask=real[:, None] & (widths < WIDTH)[None, :], other=0.0)


@triton.jit
def _last_layer(given, weights, units, buckets, INNER: tl.constexpr, BUCKETS: tl.constexpr):
    some = tl.load(
        weights + units[:, None] * BUCKETS + buckets[None, :],
        mask=(units < INNER)[:, None] & (buckets < BUCKETS)[None, :],
        other=0.0,
    )
    return tl.dot(given.to(some.dtype), some, input_precision="ieee")
