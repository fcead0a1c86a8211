"""Which buckets queries visit: two launches, one for what a classifier expects, one for the choice.

The classifier of a KV head is cut by its buckets: a program makes the inner layer for itself and the last layer for its
slice, and the last program of a head turns logits into the mean probability over the group. The choice is a program for
every head and query: it sorts buckets by what they are worth, and writes down the runs of those within the limits.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(float("-inf"))
LEAST = tl.constexpr(-(1 << 63))  # behind everything, whatever it is worth


@triton.jit
def classify(
    query, first, first_bias, second, second_bias, logits, scores, done,  # where they begin
    query_strides, count,  # by row, head and step
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, BUCKETS: tl.constexpr,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr,
    BUCKET_BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean probability of every bucket over the queries of a group."""
    lane, part = tl.program_id(0), tl.program_id(1)
    row, head = lane // HEADS, (lane % HEADS).to(tl.int64)
    rows = tl.arange(0, ROWS)
    real = rows < GROUP * count
    widths, buckets = tl.arange(0, KEY_BLOCK), part * SLICE + tl.arange(0, SLICE)
    places = (row.to(tl.int64) * query_strides[0] + (head * GROUP + rows // count) * query_strides[1]
              + (rows % count) * query_strides[2])  # fmt: skip
    asked = tl.load(
        query + places[:, None] + widths[None, :], mask=real[:, None] & (widths < WIDTH)[None, :], other=0.0
    ).to(second.dtype.element_ty)
    inner_width: tl.constexpr = HIDDEN if HIDDEN else WIDTH
    second += head * inner_width * BUCKETS
    found = tl.zeros([ROWS, SLICE], tl.float32)
    if HIDDEN:
        first += head * WIDTH * HIDDEN
        for begin in tl.range(0, HIDDEN, AT_ONCE):
            units = begin + tl.arange(0, AT_ONCE)
            before = tl.load(
                first + widths[:, None] * HIDDEN + units[None, :],
                mask=(widths < WIDTH)[:, None] & (units < HIDDEN)[None, :],
                other=0.0,
            )
            bias = tl.load(first_bias + head * HIDDEN + units, mask=units < HIDDEN, other=0.0).to(tl.float32)
            inner = tl.dot(asked, before, input_precision="ieee") + bias[None, :]
            inner = tl.maximum(inner, 0.0).to(second.dtype.element_ty)
            found += _last_layer(inner, second, units, buckets, HIDDEN, BUCKETS)
    else:
        found += _last_layer(asked, second, widths, buckets, WIDTH, BUCKETS)
    found += tl.load(second_bias + head * BUCKETS + buckets, mask=buckets < BUCKETS, other=0.0).to(tl.float32)[None, :]
    own = logits + lane.to(tl.int64) * GROUP * count * BUCKETS
    tl.store(own + rows[:, None] * BUCKETS + buckets[None, :], found, mask=real[:, None] & (buckets < BUCKETS)[None, :])

    tl.debug_barrier()  # all that this program has stored, before it says so
    if tl.atomic_add(done + lane, 1, sem="acq_rel") == SLICES - 1:
        every = tl.arange(0, BUCKET_BLOCK)
        for step in range(count):
            total = tl.zeros([BUCKET_BLOCK], tl.float32)
            for number in range(GROUP):
                at = own + (number * count + step) * BUCKETS + every
                logit = tl.load(at, mask=every < BUCKETS, other=NOTHING)
                share = tl.exp(logit - tl.max(logit, 0))
                total += share / tl.sum(share, 0)
            to = scores + (lane.to(tl.int64) * count + step) * BUCKETS + every
            tl.store(to, total / GROUP, mask=every < BUCKETS)


@triton.jit
def _last_layer(inner, second, units, buckets, INNER: tl.constexpr, BUCKETS: tl.constexpr):
    weights = tl.load(
        second + units[:, None] * BUCKETS + buckets[None, :],
        mask=(units < INNER)[:, None] & (buckets < BUCKETS)[None, :],
        other=0.0,
    )
    return tl.dot(inner, weights, input_precision="ieee")


@triton.jit
def visit(
    scores, sizes, edges, begin, length, read, left,  # where they begin
    queries, runs, staged_from, staged, most, mass,
    PROBES: tl.constexpr, BUCKETS: tl.constexpr, BUCKET_BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr,
    LIMITS: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Runs of the buckets that one query visits; `LIMITS`: 1 tokens, 2 a share of all, 4 mass."""
    number = tl.program_id(0).to(tl.int64)
    lane = number // queries
    every = tl.arange(0, BUCKET_BLOCK)
    there = every < BUCKETS
    score = tl.load(scores + number * BUCKETS + every, mask=there, other=0.0)
    size = tl.load(sizes + lane * BUCKETS + every, mask=there, other=0)
    each = tl.div_rn(score, tl.maximum(size, 1).to(tl.float32)) if PER_TOKEN else score  # as torch rounds it
    worth = tl.where(size > 0, each, 0.0) if PER_TOKEN else score
    # Larger first, of equal ones the earlier: the bits of numbers from 0 on are in the order of their size, those of
    # numbers below 0 in the other.
    bits = tl.where(worth == 0.0, 0.0, worth).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = (bits.to(tl.int64) << 32) + (BUCKET_BLOCK - 1 - every)
    order = tl.where(there, order, LEAST)
    ranked = tl.sort(order, descending=True)
    bucket = BUCKET_BLOCK - 1 - (ranked & 0xFFFFFFFF)
    taken = every < PROBES  # there are as many
    bucket = tl.where(taken, bucket, 0)
    tokens = tl.load(sizes + lane * BUCKETS + bucket, mask=taken, other=0)
    if LIMITS & 3:
        enough = most * tl.sum(size, 0).to(tl.float32) if LIMITS & 2 else most
        taken &= (tl.cumsum(tokens, 0).to(tl.float32) <= enough) | (every == 0)
    if LIMITS & 4:
        expected = tl.load(scores + number * BUCKETS + bucket, mask=every < PROBES, other=0.0)
        taken &= (tl.cumsum(expected, 0) - expected < mass) | (every == 0)

    # see `attend.py`: no kernels anew as these grow
    runs, staged_from, staged = (runs - 3) // 2, (staged_from - 3) // 2, (staged - 3) // 2
    width = PROBES * runs + 1
    begin += number * width
    length += number * width
    for run in range(runs):
        edge = edges + (lane * runs + run) * (BUCKETS + 1) + bucket
        start = tl.load(edge, mask=every < PROBES, other=0)
        stop = tl.load(edge + 1, mask=taken, other=0)
        tl.store(begin + run * PROBES + every, start, mask=every < PROBES)
        tl.store(length + run * PROBES + every, tl.where(taken, stop - start, 0), mask=every < PROBES)
    tl.store(begin + width - 1, staged_from)
    tl.store(length + width - 1, staged)
    tl.store(read + number, tl.sum(tl.where(taken, tokens, 0), 0) + staged)
    if LEFT:
        weight = tl.where(size > 0, tl.log(tl.maximum(size, 1).to(tl.float32)), NOTHING)
        tl.store(left + number * BUCKETS + every, weight, mask=there)
        tl.debug_barrier()  # those of what is visited come after
        tl.store(left + number * BUCKETS + bucket, bucket * 0.0 + NOTHING, mask=taken)
