"""Which buckets queries visit: three launches, two for what a classifier expects, one for the choice.

The inner layer of a KV head is cut by its units, and the last one by its buckets; the last program of a head turns
logits into the mean probability over the group. The choice is a program for every head and query: it finds the buckets
that are worth most, in the order of their worth, and writes down the runs of those within the limits. Where a GPU has
that (`EARLY`), programs are there before the launch before theirs has ended, and wait for it themselves.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvsketch.kernels.gpu.attend import plain

NOTHING = tl.constexpr(float("-inf"))
LEAST = tl.constexpr(-(1 << 63))  # behind everything, whatever it is worth
LEAST_BITS = tl.constexpr(-(1 << 31))


@triton.jit
def inner(
    query, first, first_bias, hidden,  # where they begin
    query_strides, count,  # by row, head and step
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, SLICE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some units of the inner layer, for all queries of a group."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()  # not sooner: all kernels before this one are done when the next one begins
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
    own = hidden + lane.to(tl.int64) * GROUP * count * HIDDEN
    tl.store(
        own + rows[:, None] * HIDDEN + units[None, :],
        tl.maximum(found, 0.0).to(hidden.dtype.element_ty),
        mask=real[:, None] & there[None, :],
    )


@triton.jit
def last(
    query, hidden, weights, bias, logits, scores, done,  # where they begin
    query_strides, count,  # by row, head and step
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, BUCKETS: tl.constexpr,
    ROWS: tl.constexpr, KEY_BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr,
    BUCKET_BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Mean probability of every bucket over the queries of a group."""
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
    own = logits + lane.to(tl.int64) * GROUP * count * BUCKETS
    tl.store(own + rows[:, None] * BUCKETS + buckets[None, :], found, mask=real[:, None] & there[None, :])

    tl.debug_barrier()  # all that this program has stored, before it says so
    if tl.atomic_add(done + lane, 1, sem="acq_rel") == SLICES - 1:
        tl.store(done + lane, 0)  # for the next call
        numbers, every = tl.arange(0, GROUP_BLOCK), tl.arange(0, BUCKET_BLOCK)
        asking, held = numbers < GROUP, every < BUCKETS
        for step in range(count):
            at = own + (numbers[:, None] * count + step) * BUCKETS + every[None, :]
            logit = tl.load(at, mask=asking[:, None] & held[None, :], other=NOTHING)
            highest = tl.where(asking, tl.max(logit, 1), 0.0)
            share = tl.exp(logit - highest[:, None])
            mass = tl.where(asking, tl.sum(share, 1), 1.0)
            total = tl.sum(share / mass[:, None], 0)
            to = scores + (lane.to(tl.int64) * count + step) * BUCKETS + every
            tl.store(to, total / GROUP, mask=held)


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


@triton.jit
def visit(
    scores, sizes, edges, staged_at, begin, length, read, left,  # where they begin
    queries, runs, most, mass,
    PROBES: tl.constexpr, BUCKETS: tl.constexpr, BUCKET_BLOCK: tl.constexpr, PLACES: tl.constexpr,
    PER_TOKEN: tl.constexpr, LIMITS: tl.constexpr, LEFT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Runs of the buckets that one query visits; `LIMITS`: 1 tokens, 2 a share of all, 4 mass."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    number = tl.program_id(0).to(tl.int64)
    lane = number // queries
    runs = plain(runs)
    staged_from, staged = tl.load(staged_at), tl.load(staged_at + 1)
    width = PROBES * runs + 1
    begin += number * width
    length += number * width
    every = tl.arange(0, BUCKET_BLOCK)
    there = every < BUCKETS
    score = tl.load(scores + number * BUCKETS + every, mask=there, other=0.0)
    size = tl.load(sizes + lane * BUCKETS + every, mask=there, other=0)
    bits = _worth(score, size, PER_TOKEN)
    if PLACES <= 64:
        # The least bits that are taken lie between the least of so many blocks' largest and the largest of all: halved
        # until as many are above as are wanted; then those that are taken, closely packed, in any order.
        bits = tl.where(there, bits, LEAST_BITS)
        largest = tl.max(tl.reshape(bits, [PLACES, BUCKET_BLOCK // PLACES]), 1)
        least = tl.min(largest, 0).to(tl.int64)
        beyond = tl.max(largest, 0).to(tl.int64) + 1
        while beyond - least > 1:
            trial = least + (beyond - least) // 2
            count = tl.sum((bits >= trial.to(tl.int32)).to(tl.int32), 0)
            least = tl.where(count == PROBES, trial - 1, tl.where(count > PROBES, trial, least))
            beyond = tl.where(count == PROBES, trial, tl.where(count > PROBES, beyond, trial))
        least = least.to(tl.int32)
        above, equal = (bits > least).to(tl.int32), (there & (bits == least)).to(tl.int32)
        wanted = PROBES - tl.sum(above, 0)
        above_to, equal_to = tl.cumsum(above, 0), tl.cumsum(equal, 0)
        chosen = (above > 0) | ((equal > 0) & (equal_to <= wanted))
        tl.store(begin + above_to + tl.minimum(equal_to, wanted) - 1, every.to(tl.int64), mask=chosen)
        tl.debug_barrier()
        places = tl.arange(0, PLACES)
        listed = places < PROBES
        taken = listed
        bucket = tl.load(begin + places, mask=taken, other=0)
        tl.debug_barrier()  # what is there is overwritten
        tokens = tl.load(sizes + lane * BUCKETS + bucket, mask=taken, other=0)
        expected = tl.load(scores + number * BUCKETS + bucket, mask=taken, other=0.0)
        order = (_worth(expected, tokens, PER_TOKEN).to(tl.int64) << 32) + (BUCKET_BLOCK - 1 - bucket)
        order = tl.where(taken, order, LEAST)  # of equal ones the earlier comes first
        upto = (order[None, :] >= order[:, None]) & taken[None, :]  # who comes before whom, or is the same
        at = tl.sum(upto.to(tl.int32), 1) - 1
        if LIMITS & 3:
            enough = most * tl.sum(size, 0).to(tl.float32) if LIMITS & 2 else most
            taken &= (tl.sum(tl.where(upto, tokens[None, :], 0), 1).to(tl.float32) <= enough) | (at == 0)
        if LIMITS & 4:
            taken &= (tl.sum(tl.where(upto, expected[None, :], 0.0), 1) - expected < mass) | (at == 0)
    else:
        order = (bits.to(tl.int64) << 32) + (BUCKET_BLOCK - 1 - every)
        order = tl.where(there, order, LEAST)
        ranked = tl.sort(order, descending=True)
        bucket = BUCKET_BLOCK - 1 - (ranked & 0xFFFFFFFF)
        at = every
        listed = every < PROBES  # there are as many
        taken = listed
        bucket = tl.where(taken, bucket, 0)
        tokens = tl.load(sizes + lane * BUCKETS + bucket, mask=taken, other=0)
        if LIMITS & 3:
            enough = most * tl.sum(size, 0).to(tl.float32) if LIMITS & 2 else most
            taken &= (tl.cumsum(tokens, 0).to(tl.float32) <= enough) | (every == 0)
        if LIMITS & 4:
            expected = tl.load(scores + number * BUCKETS + bucket, mask=every < PROBES, other=0.0)
            taken &= (tl.cumsum(expected, 0) - expected < mass) | (every == 0)

    for run in range(runs):
        edge = edges + (lane * runs + run) * (BUCKETS + 1) + bucket
        start = tl.load(edge, mask=listed, other=0)
        stop = tl.load(edge + 1, mask=taken, other=0)
        long = tl.where(taken, stop - start, 0)
        tl.store(begin + run * PROBES + at, start, mask=listed)
        tl.store(length + run * PROBES + at, long, mask=listed)
    tl.store(begin + width - 1, staged_from)
    tl.store(length + width - 1, staged)
    tl.store(read + number, tl.sum(tl.where(taken, tokens, 0), 0) + staged)
    if LEFT:
        weight = tl.where(size > 0, tl.log(tl.maximum(size, 1).to(tl.float32)), NOTHING)
        tl.store(left + number * BUCKETS + every, weight, mask=there)
        tl.debug_barrier()  # those of what is visited come after
        tl.store(left + number * BUCKETS + bucket, bucket * 0.0 + NOTHING, mask=taken)


@triton.jit
def _worth(score, size, PER_TOKEN: tl.constexpr):
    """What buckets are worth, as numbers in that order: more is larger.

    The bits of numbers from 0 on are in the order of their size, those of numbers below 0 in the other.
    """
    worth = score
    if PER_TOKEN:
        each = tl.div_rn(score, tl.maximum(size, 1).to(tl.float32))  # as torch rounds it
        worth = tl.where(size > 0, each, 0.0)
    bits = tl.where(worth == 0.0, 0.0, worth).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
