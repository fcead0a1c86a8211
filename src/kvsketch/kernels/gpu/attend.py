"""Weighted attention for few queries: everything that a lane reads, in one launch, read where it lies.

A lane is a KV head of a row of the batch, its queries are rows of one tile. What a lane reads comes in parts, each all
of its entries or runs of them; all together, one behind the other, are cut evenly into splits, whatever the parts and
runs, and each split is a program. It keeps its largest logit, its sums of weights and of weighted values; the last
program of a lane merges those of all splits, in their order, so that the answer is the same every time. How long runs
are is read on the device only.
"""

import triton
import triton.language as tl

from kvsketch.kernels.gpu.softmax import LEAST_MASS, LN_2, NOTHING, more, pairs, weights

MOST_LISTED = tl.constexpr(6)  # halvings of a list of runs that is rather held as a whole


@triton.jit
def attend(
    query, out, lse, sums, tops, done,  # where they begin
    pointers, strides, sizes,  # of parts: see `_part`
    query_row, query_head, query_step, queries, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BY_QUERY: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, PARTS: tl.constexpr, HAS: tl.constexpr, SOFTCAP: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One split of one lane, or of one of its queries where each reads other runs."""
    program, split = tl.program_id(0), tl.program_id(1)
    lane, step = program, 0
    per_program = GROUP if BY_QUERY else GROUP * queries
    if BY_QUERY:
        lane, step = program // queries, program % queries
    row, head = lane // HEADS, lane % HEADS
    rows = tl.arange(0, ROWS)
    real = rows < per_program
    query_heads = head * GROUP + (rows if BY_QUERY else rows // queries)
    steps = step + (rows * 0 if BY_QUERY else rows % queries)
    widths = tl.arange(0, KEY_BLOCK)
    places = row.to(tl.int64) * query_row + query_heads.to(tl.int64) * query_head + steps * query_step
    asked = tl.load(
        query + places[:, None] + widths[None, :], mask=real[:, None] & (widths < WIDTH)[None, :], other=0.0
    )

    total = tl.zeros([], tl.int64)
    for part in tl.static_range(PARTS):
        total += _count(lane, step, pointers[part], sizes[part], HAS[part])
    each = tl.cdiv(total, SPLITS)
    start = split * each
    stop = tl.minimum(start + each, total)
    top = tl.full([ROWS], NOTHING, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        count = _count(lane, step, pointers[part], sizes[part], HAS[part])
        top, mass, found = _part(
            asked, lane, step, tl.maximum(start, 0), tl.minimum(stop, count), top, mass, found,
            pointers[part], strides[part], sizes[part], scale, softcap,
            HAS[part], WIDTH, VALUE_WIDTH, SOFTCAP, AT_ONCE, KEY_BLOCK, VALUE_BLOCK,
        )  # fmt: skip
        start -= count
        stop -= count
    place = program * SPLITS + split
    _keep(sums, tops, place, top, mass, found, per_program, VALUE_WIDTH, VALUE_BLOCK, ROWS)

    tl.debug_barrier()  # all that this program has stored, before it says so
    if tl.atomic_add(done + program, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(done + program, 0)  # for the next call
        for first in range(0, per_program, TOGETHER):
            numbers = first + tl.arange(0, TOGETHER)
            query_at = (row * HEADS + head) * GROUP + (numbers if BY_QUERY else numbers // queries)
            answers = query_at * queries + (step if BY_QUERY else numbers % queries)
            _merge(
                out, lse, sums, tops, program, numbers, answers, per_program,
                VALUE_WIDTH, VALUE_BLOCK, SPLITS, SPLITS_AT_ONCE,
            )  # fmt: skip


@triton.jit
def _slot(lane, slots, HAS: tl.constexpr):
    """Which of a part's lanes it is, below 0 where the part has none of its entries."""
    slot = lane.to(tl.int64)
    if HAS & 4:
        slot = tl.load(slots + lane)
    return slot


@triton.jit
def plain(number):
    """A number that changes from step to step comes as 2n + 3: of a 1, or of sixteens, Triton makes kernels anew."""
    return (number - 3) // 2


@triton.jit
def _runs(slot, step, sizes):
    """Where a lane's list of runs begins, for the query at hand."""
    return (slot * sizes[3] + tl.where(sizes[3] > 1, step, 0)) * plain(sizes[2])


@triton.jit
def _count(lane, step, pointers, sizes, HAS: tl.constexpr):
    """How many entries of a part a lane reads."""
    slot = _slot(lane, pointers[4], HAS)
    count = tl.zeros([], tl.int64) + plain(sizes[0])
    if HAS >= 8:
        last = _runs(tl.maximum(slot, 0), step, sizes) + plain(sizes[2]) - 1
        count = tl.load(pointers[6] + last)
    return tl.where(slot >= 0, count, 0)


@triton.jit
def _part(
    asked, lane, step, start, stop, top, mass, found, pointers, strides, sizes, scale, softcap,
    HAS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, SOFTCAP: tl.constexpr,
    AT_ONCE: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest logit of a lane's queries so far, and the sums of exp2 of what is below it, with some of a part."""
    keys, values, log_mass, log_value, slots, begins, ends = pointers
    key_row, key_head, key_step, value_row, value_head, value_step, mass_row, mass_head, extra_row, extra_head = strides
    part_heads = sizes[1]
    search: tl.constexpr = HAS // 8 - 1  # halvings of the list of runs; -1 where all entries are read

    slot = tl.maximum(_slot(lane, slots, HAS), 0)
    row, head = slot // part_heads, slot % part_heads
    keys += row * key_row + head * key_head
    values += row * value_row + head * value_head
    log_mass += row * plain(mass_row) + head * plain(mass_head)
    log_value += row * plain(extra_row) + head * plain(extra_head)
    runs = _runs(slot, step, sizes)
    # Places in runs and weights are found a round ahead, so that keys and values are on their way while others are
    # worked on. Nothing is loaded of an empty slot, in which may be anything.
    ahead = start + tl.arange(0, AT_ONCE)
    there = ahead < stop
    if search >= 0 and search <= MOST_LISTED:
        befores, shifts = _listed(begins + runs, ends + runs, plain(sizes[2]), search)
        ahead = _placed(ahead, befores, shifts)
    if search > MOST_LISTED:
        ahead = _place(ahead, begins + runs, ends + runs, plain(sizes[2]), there, search)
    if HAS & 3:
        mass_ahead, value_ahead = weights(log_mass, log_value, ahead, there, HAS)
    for begin in tl.range(start, stop, AT_ONCE):
        at, ok = ahead, there
        of_mass = tl.zeros([AT_ONCE], tl.float32)
        of_value = of_mass
        if HAS & 3:
            of_mass = mass_ahead
            of_value = of_mass
            if HAS & 2:
                of_value = value_ahead
            ok &= tl.maximum(of_mass, of_value) > NOTHING
        ahead = begin + AT_ONCE + tl.arange(0, AT_ONCE)
        there = ahead < stop
        if search >= 0 and search <= MOST_LISTED:
            ahead = _placed(ahead, befores, shifts)
        if search > MOST_LISTED:
            ahead = _place(ahead, begins + runs, ends + runs, plain(sizes[2]), there, search)
        if HAS & 3:
            mass_ahead, value_ahead = weights(log_mass, log_value, ahead, there, HAS)
        key, value = pairs(keys, values, key_step, value_step, at, ok, WIDTH, VALUE_WIDTH, KEY_BLOCK, VALUE_BLOCK)
        top, mass, found = more(
            asked, key, value, of_mass, of_value, ok[None, :], top, mass, found, scale, softcap, SOFTCAP
        )
    return top, mass, found


@triton.jit
def _listed(begins, ends, segments, SEARCH: tl.constexpr):
    """Of each run how many entries are in those before it, and how much farther it lies from its place than they do."""
    number = tl.arange(0, 1 << SEARCH)
    real = number < segments
    begin, before = _begin_and_before(begins, ends, number, real)
    last_begin, last_before = _begin_and_before(begins, ends, number - 1, real & (number > 0))
    shift = (begin - before) - (last_begin - last_before)
    return tl.where(real, before, 0x7FFFFFFF), tl.where(real, shift, 0)


@triton.jit
def _begin_and_before(begins, ends, number, real):
    begin = tl.load(begins + number, mask=real, other=0).to(tl.int32)
    return begin, tl.load(ends + number - 1, mask=real & (number > 0), other=0).to(tl.int32)


@triton.jit
def _placed(at, befores, shifts):
    """Which entry is the at-th of those in runs: farther by the shifts of all runs that begin up to there.

    They sum up to what the last of these runs is farther by, so that runs may come in any order, and be empty.
    """
    return at + tl.sum(tl.where(befores[None, :] <= at.to(tl.int32)[:, None], shifts[None, :], 0), 1)


@triton.jit
def _place(at, begins, ends, segments, ok, SEARCH: tl.constexpr):
    """Which entry is the at-th of those in runs: the first run that ends behind it is looked for by halving."""
    low = at * 0
    high = low + segments
    for _ in tl.static_range(SEARCH):
        middle = (low + high) // 2
        behind = tl.load(ends + middle, mask=ok & (middle < segments), other=0) > at
        high = tl.where(behind, middle, high)
        low = tl.where(behind | (low >= high), low, middle + 1)
    before = tl.load(ends + low - 1, mask=ok & (low > 0), other=0)
    return tl.load(begins + low, mask=ok, other=0) + at - before


@triton.jit
def _keep(
    sums, tops, place, top, mass, found, real_rows,
    VALUE_WIDTH: tl.constexpr, VALUE_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows, widths = tl.arange(0, ROWS), tl.arange(0, VALUE_BLOCK)
    real = rows < real_rows
    base = place.to(tl.int64) * real_rows
    tl.store(tops + 2 * base + rows, top, mask=real)
    tl.store(tops + 2 * base + real_rows + rows, mass, mask=real)
    tl.store(
        sums + (base + rows[:, None]) * VALUE_WIDTH + widths[None, :],
        found,
        mask=real[:, None] & (widths < VALUE_WIDTH)[None, :],
    )


@triton.jit
def _merge(
    out, lse, sums, tops, program, numbers, answers, real_rows,
    VALUE_WIDTH: tl.constexpr, VALUE_BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The answers of some queries from those of all splits."""
    widths = tl.arange(0, VALUE_BLOCK)
    real = numbers < real_rows
    top, mass = _tops(tops, tl.arange(0, SPLITS), program, numbers, real_rows, SPLITS)
    highest = tl.max(top, 0)
    level = tl.where(highest == NOTHING, 0.0, highest)
    total = tl.sum(mass * tl.exp2(top - level[None, :]), 0)
    found = tl.zeros([numbers.shape[0], VALUE_BLOCK], tl.float32)
    for first in tl.static_range(0, SPLITS, AT_ONCE):
        splits = first + tl.arange(0, AT_ONCE)
        top, mass = _tops(tops, splits, program, numbers, real_rows, SPLITS)
        base = (program * SPLITS + splits).to(tl.int64)[:, None] * real_rows + numbers[None, :]
        part = tl.load(
            sums + base[:, :, None] * VALUE_WIDTH + widths[None, None, :],
            mask=real[None, :, None] & (widths < VALUE_WIDTH)[None, None, :],
            other=0.0,
        )
        found += tl.sum(part * tl.exp2(top - level[None, :])[:, :, None], 0)
    some = tl.where(total > 0.0, tl.maximum(total, LEAST_MASS), 1.0)
    found /= some[:, None]
    places = answers.to(tl.int64)
    tl.store(
        out + places[:, None] * VALUE_WIDTH + widths[None, :],
        found.to(out.dtype.element_ty),
        mask=real[:, None] & (widths < VALUE_WIDTH)[None, :],
    )
    tl.store(lse + places, tl.where(total > 0.0, (highest + tl.log2(some)) * LN_2, NOTHING), mask=real)


@triton.jit
def _tops(tops, splits, program, numbers, real_rows, SPLITS: tl.constexpr):
    """The largest logits that some splits have found of some queries, and the sums of what is below them."""
    base = 2 * (program * SPLITS + splits).to(tl.int64)[:, None] * real_rows + numbers[None, :]
    there = (numbers < real_rows)[None, :]
    return tl.load(tops + base, mask=there, other=NOTHING), tl.load(tops + base + real_rows, mask=there, other=0.0)
