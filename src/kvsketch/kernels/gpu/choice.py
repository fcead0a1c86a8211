"""Which buckets queries visit: a program for every KV head and query.

It finds the buckets that are worth most, in the order of their worth, and writes down the runs of those that are within
the limits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvsketch.kernels.gpu.numbers import plain

NOTHING = tl.constexpr(float("-inf"))
LEAST = tl.constexpr(-(1 << 63))  # sorts after everything, whatever that is worth
LEAST_BITS = tl.constexpr(-(1 << 31))
TRIALS = tl.constexpr(8)  # the range where the least worth that is taken may lie is cut into so many parts at once


@triton.jit(do_not_specialize=["limit"])
def visit(
    scores, sizes, edges, staged_at, begin, length, read, left,  # where they begin
    queries, runs, limit, mass,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, PROBES: tl.constexpr, BUCKETS: tl.constexpr,
    BUCKET_BLOCK: tl.constexpr, PLACES: tl.constexpr, SORTED: tl.constexpr, PER_TOKEN: tl.constexpr,
    LIMITS: tl.constexpr, LEFT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Runs of the buckets that one query visits; `LIMITS`: 1 tokens, 2 a share of all, 4 mass.

    `GROUP`: the scores are logits of so many queries, of which it takes the mean probability; 0: they are scores.
    `limit` are the bits of a float64, which Triton would round: whole buckets hang on whether a share is reached.
    """
    number = tl.program_id(0).to(tl.int64)
    lane = number // queries
    runs = plain(runs)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    staged_from, staged = tl.load(staged_at), tl.load(staged_at + 1)
    width = PROBES * runs + 1
    begin += number * width
    length += number * width
    every = tl.arange(0, BUCKET_BLOCK)
    there = every < BUCKETS
    size = tl.load(sizes + lane * BUCKETS + every, mask=there, other=0)
    if GROUP:
        score = _probability(scores + number * GROUP * BUCKETS, GROUP, GROUP_BLOCK, BUCKETS, BUCKET_BLOCK)
    else:
        score = tl.load(scores + number * BUCKETS + every, mask=there, other=0.0)
    bits = _worth(score, size, PER_TOKEN)
    order = (bits.to(tl.int64) << 32) + (BUCKET_BLOCK - 1 - every)  # of equal ones the earlier comes first
    if not SORTED:
        bits = tl.where(there, bits, LEAST_BITS)
        least = _least(bits, PROBES, PLACES, BUCKET_BLOCK)
        # Pack the taken buckets closely, in any order: all that are worth more, and as many equal ones as are left.
        above, equal = (bits > least).to(tl.int32), (there & (bits == least)).to(tl.int32)
        counted = tl.cumsum(above + (equal << 16), 0)
        above_to, equal_to = counted & 0xFFFF, counted >> 16
        wanted = PROBES - tl.sum(above, 0)
        chosen = (above > 0) | ((equal > 0) & (equal_to <= wanted))
        to = above_to + tl.minimum(equal_to, wanted) - 1
        tl.store(begin + to, order, mask=chosen)
        if LIMITS & 4:
            tl.store(length + to, score.to(tl.int32, bitcast=True).to(tl.int64), mask=chosen)
        tl.debug_barrier()
        places = tl.arange(0, PLACES)
        listed = places < PROBES
        taken = listed
        order = tl.load(begin + places, mask=taken, other=LEAST)
        if LIMITS & 4:
            expected = tl.load(length + places, mask=taken, other=0).to(tl.int32).to(tl.float32, bitcast=True)
        tl.debug_barrier()  # from here on what was just loaded is overwritten
        bucket = tl.where(taken, BUCKET_BLOCK - 1 - (order & 0xFFFFFFFF), 0)
        tokens = tl.load(sizes + lane * BUCKETS + bucket, mask=taken, other=0)
        upto = (order[None, :] >= order[:, None]) & taken[None, :]  # which buckets come before which, or are the same
        at = tl.sum(upto.to(tl.int32), 1) - 1
        if LIMITS & 3:
            seen = tl.sum(tl.where(upto, tokens[None, :], 0), 1)
            taken &= (seen.to(tl.float64) <= _enough(limit, size, LIMITS)) | (at == 0)
        if LIMITS & 4:
            taken &= (tl.sum(tl.where(upto, expected[None, :], 0.0), 1) - expected < mass) | (at == 0)
    else:
        ranked = tl.sort(tl.where(there, order, LEAST), descending=True)
        at = every
        listed = every < PROBES  # there are as many
        taken = listed
        bucket = tl.where(taken, BUCKET_BLOCK - 1 - (ranked & 0xFFFFFFFF), 0)
        tokens = tl.load(sizes + lane * BUCKETS + bucket, mask=taken, other=0)
        if LIMITS & 3:
            taken &= (tl.cumsum(tokens, 0).to(tl.float64) <= _enough(limit, size, LIMITS)) | (every == 0)
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
        tl.debug_barrier()  # those of visited buckets are written after
        tl.store(left + number * BUCKETS + bucket, bucket * 0.0 + NOTHING, mask=taken)


@triton.jit
def _enough(limit, size, LIMITS: tl.constexpr):
    """How many tokens may be visited."""
    most = limit.to(tl.float64, bitcast=True)
    return most * tl.sum(size, 0).to(tl.float64) if LIMITS & 2 else most


@triton.jit
def _probability(
    logits, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, BUCKETS: tl.constexpr, BUCKET_BLOCK: tl.constexpr
):  # fmt: skip
    """Mean probability of every bucket over the queries of a group."""
    numbers, every = tl.arange(0, GROUP_BLOCK), tl.arange(0, BUCKET_BLOCK)
    asking, held = numbers < GROUP, every < BUCKETS
    at = logits + numbers[:, None] * BUCKETS + every[None, :]
    logit = tl.load(at, mask=asking[:, None] & held[None, :], other=NOTHING)
    highest = tl.max(logit, 1)
    highest = tl.where(highest == NOTHING, 0.0, highest)
    share = tl.exp(logit - highest[:, None])
    mass = tl.where(asking, tl.sum(share, 1), 1.0)
    return tl.sum(share / mass[:, None], 0) / GROUP


@triton.jit
def _least(bits, PROBES: tl.constexpr, PLACES: tl.constexpr, BUCKET_BLOCK: tl.constexpr):
    """A number with at most `PROBES` numbers above it, and at least `PROBES` not below it.

    It lies between the least of all blocks' largest and the largest of all: this range is cut until as many are above
    as are wanted.
    """
    largest = tl.max(tl.reshape(bits, [PLACES, BUCKET_BLOCK // PLACES]), 1)
    least = tl.min(largest, 0).to(tl.int64)
    beyond = tl.max(largest, 0).to(tl.int64) + 1
    numbers = tl.arange(0, TRIALS)
    while beyond - least > 1:
        trials = least + (beyond - least) * numbers // TRIALS
        counts = tl.sum((bits[None, :] >= trials.to(tl.int32)[:, None]).to(tl.int32), 1)
        exact = tl.max(tl.where(counts == PROBES, trials, least), 0)
        over = tl.min(tl.where(counts < PROBES, trials, beyond), 0)
        least = tl.max(tl.where(counts > PROBES, trials, least), 0)
        beyond = tl.where(exact > least, exact, over)
        least = tl.where(exact > least, exact - 1, least)
    return least.to(tl.int32)


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
