"""Weighted attention for few queries: everything that a lane reads, in one launch, read where it lies.

A lane is a KV head of a row of the batch; its queries are rows of one tile. What a lane reads comes in parts: all of
a part's entries, or runs of them. They are read in rounds of entries that lie side by side; the last round of a run
may be short. All rounds, one after another, are cut evenly into splits, whatever the parts and runs, and each split
is a program. It keeps its largest logit, and its sums of weights and of weighted values; the last program of a lane
merges those of all splits in their order, so that the answer is the same every time. The lengths of runs are read only
on the device.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kvsketch.kernels.gpu.numbers import plain
from kvsketch.kernels.gpu.softmax import LEAST_MASS, LN_2, NOTHING, more, pairs, weights


@triton.jit
def attend(
    query, out, lse, sums, tops, done,  # where they begin
    pointers, strides, sizes,  # of parts: see `_part`
    query_row, query_head, query_step, queries, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BY_QUERY: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, PARTS: tl.constexpr, HAS: tl.constexpr, KEY_STEPS: tl.constexpr,
    VALUE_STEPS: tl.constexpr, SOFTCAP: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, SPLIT_BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One split of one lane, or of one of its queries where each reads other runs."""
    if EARLY:  # this program has begun already, and what it reads may not be there yet
        gdc_wait()
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

    total = 0
    for part in tl.static_range(PARTS):
        total += _rounds(lane, step, pointers[part], sizes[part], HAS[part], AT_ONCE)
    start, stop = split * total // SPLITS, (split + 1) * total // SPLITS
    top = tl.full([ROWS], NOTHING, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        rounds = _rounds(lane, step, pointers[part], sizes[part], HAS[part], AT_ONCE)
        top, mass, found = _part(
            asked, lane, step, tl.maximum(start, 0), tl.minimum(stop, rounds), top, mass, found,
            pointers[part], strides[part], sizes[part], scale, softcap,
            HAS[part], KEY_STEPS[part], VALUE_STEPS[part], WIDTH, VALUE_WIDTH, SOFTCAP, AT_ONCE, KEY_BLOCK, VALUE_BLOCK,
        )  # fmt: skip
        start -= rounds
        stop -= rounds
    place = program * SPLITS + split
    _keep(sums, tops, place, top, mass, found, per_program, VALUE_WIDTH, VALUE_BLOCK, ROWS)

    tl.debug_barrier()  # all that this program stores comes before it says that it is done
    if tl.atomic_add(done + program, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(done + program, 0)  # for the next call
        for first in range(0, per_program, TOGETHER):
            numbers = first + tl.arange(0, TOGETHER)
            query_at = (row * HEADS + head) * GROUP + (numbers if BY_QUERY else numbers // queries)
            answers = query_at * queries + (step if BY_QUERY else numbers % queries)
            _merge(
                out, lse, sums, tops, program, numbers, answers, per_program,
                VALUE_WIDTH, VALUE_BLOCK, SPLITS, SPLIT_BLOCK,
            )  # fmt: skip


@triton.jit
def _slot(lane, slots, HAS: tl.constexpr):
    """Which of a part's lanes it is, below 0 where the part has none of its entries."""
    slot = lane.to(tl.int64)
    if HAS & 4:
        slot = tl.load(slots + lane)
    return slot


@triton.jit
def _runs(slot, step, sizes):
    """Where a lane's list of runs begins, for the query at hand."""
    return (slot * sizes[3] + tl.where(sizes[3] > 1, step, 0)) * plain(sizes[2])


@triton.jit
def _listed(slot, step, begins, lengths, sizes, LIST: tl.constexpr):
    """Where each run of a lane begins, and how long it is; nothing of a lane that is not there."""
    number = tl.arange(0, LIST)
    runs = _runs(tl.maximum(slot, 0), step, sizes)
    real = number < tl.where(slot >= 0, plain(sizes[2]), 0)
    begin = tl.load(begins + runs + number, mask=real, other=0).to(tl.int32)
    return begin, tl.load(lengths + runs + number, mask=real, other=0).to(tl.int32)


@triton.jit
def _rounds(lane, step, pointers, sizes, HAS: tl.constexpr, AT_ONCE: tl.constexpr):
    """How many rounds it takes to read a lane's entries of a part."""
    slot = _slot(lane, pointers[4], HAS)
    if HAS >= 8:
        _, length = _listed(slot, step, pointers[5], pointers[6], sizes, 1 << (HAS // 8 - 1))
        rounds = tl.sum(tl.cdiv(length, AT_ONCE), 0)
    else:
        count = plain(sizes[0]).to(tl.int32)
        rounds = tl.where(slot >= 0, tl.cdiv(count, AT_ONCE), 0)
    return rounds


@triton.jit
def _part(
    asked, lane, step, start, stop, top, mass, found, pointers, strides, sizes, scale, softcap,
    HAS: tl.constexpr, KEY_STEP: tl.constexpr, VALUE_STEP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    SOFTCAP: tl.constexpr, AT_ONCE: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest logits of a lane's queries so far, and sums of exp2 relative to them, with some of a part added."""
    keys, values, log_mass, log_value, slots, begins, lengths = pointers
    key_row, key_head, value_row, value_head, mass_row, mass_head, extra_row, extra_head = strides
    part_heads = sizes[1]

    slot = _slot(lane, slots, HAS)
    row, head = tl.maximum(slot, 0) // part_heads, tl.maximum(slot, 0) % part_heads
    keys += row * key_row + head * key_head
    values += row * value_row + head * value_head
    log_mass += row * plain(mass_row) + head * plain(mass_head)
    log_value += row * plain(extra_row) + head * plain(extra_head)
    ends, shifts, befores, uptos = 0, 0, 0, 0
    if HAS >= 8:
        begin, length = _listed(slot, step, begins, lengths, sizes, 1 << (HAS // 8 - 1))
        rounds = tl.cdiv(length, AT_ONCE)
        uptos = tl.cumsum(rounds, 0)
        befores = uptos - rounds
        shifts = begin - befores * AT_ONCE
        ends = begin + length
    numbers = tl.arange(0, AT_ONCE)
    count = plain(sizes[0]).to(tl.int32)
    # Which entries are read, and their weights, is found a round ahead, so that keys and values are on their way while
    # others are worked on. An empty slot may hold anything: its value is not loaded, and its key's products are not
    # looked at. Keys do not wait for weights.
    next_at, next_end = _place(start, ends, shifts, befores, uptos, count, HAS, AT_ONCE)
    if HAS & 3:
        there = numbers < next_end - next_at
        mass_ahead, value_ahead = weights(log_mass + next_at, log_value + next_at, numbers, there, HAS)
    for place in tl.range(start, stop):
        at, end = next_at, next_end
        ok = numbers < end - at
        held = ok
        of_mass = tl.zeros([AT_ONCE], tl.float32)
        of_value = of_mass
        if HAS & 3:
            of_mass = mass_ahead
            of_value = of_mass
            if HAS & 2:
                of_value = value_ahead
            held = ok & (tl.maximum(of_mass, of_value) > NOTHING)
        next_at, next_end = _place(place + 1, ends, shifts, befores, uptos, count, HAS, AT_ONCE)
        if HAS & 3:
            there = numbers < next_end - next_at
            mass_ahead, value_ahead = weights(log_mass + next_at, log_value + next_at, numbers, there, HAS)
        far = at.to(tl.int64)
        key, value = pairs(
            keys + far * KEY_STEP, values + far * VALUE_STEP, KEY_STEP, VALUE_STEP, numbers, ok, held,
            WIDTH, VALUE_WIDTH, KEY_BLOCK, VALUE_BLOCK,
        )  # fmt: skip
        top, mass, found = more(
            asked, key, value, of_mass, of_value, held[None, :], top, mass, found, scale, softcap, SOFTCAP
        )
    return top, mass, found


@triton.jit
def _place(place, ends, shifts, befores, uptos, count, HAS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Where the entries of a round begin, and where those that may be read end."""
    at = tl.zeros([], tl.int32) + place * AT_ONCE
    end = count
    if HAS >= 8:
        here = (befores <= place) & (place < uptos)  # one run, or none
        at += tl.sum(tl.where(here, shifts, 0), 0)
        end = tl.sum(tl.where(here, ends, 0), 0)
    return at, end


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
    VALUE_WIDTH: tl.constexpr, VALUE_BLOCK: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr,
):  # fmt: skip
    """The answers of some queries from those of all splits."""
    widths, splits = tl.arange(0, VALUE_BLOCK), tl.arange(0, SPLIT_BLOCK)
    real = numbers < real_rows
    there = real[None, :] & (splits < SPLITS)[:, None]
    own = (program * SPLITS + splits).to(tl.int64)[:, None] * real_rows
    parts = tl.load(  # all loads are under way before any of them is waited for
        sums + (own + numbers[None, :])[:, :, None] * VALUE_WIDTH + widths[None, None, :],
        mask=there[:, :, None] & (widths < VALUE_WIDTH)[None, None, :],
        other=0.0,
    )
    top = tl.load(tops + 2 * own + numbers[None, :], mask=there, other=NOTHING)
    mass = tl.load(tops + 2 * own + real_rows + numbers[None, :], mask=there, other=0.0)
    highest = tl.max(top, 0)
    level = tl.where(highest == NOTHING, 0.0, highest)
    shares = tl.exp2(top - level[None, :])
    total = tl.sum(mass * shares, 0)
    some = tl.where(total > 0.0, tl.maximum(total, LEAST_MASS), 1.0)
    found = tl.sum(parts * shares[:, :, None], 0) / some[:, None]
    places = answers.to(tl.int64)
    tl.store(
        out + places[:, None] * VALUE_WIDTH + widths[None, :],
        found.to(out.dtype.element_ty),
        mask=real[:, None] & (widths < VALUE_WIDTH)[None, :],
    )
    tl.store(lse + places, tl.where(total > 0.0, (highest + tl.log2(some)) * LN_2, NOTHING), mask=real)
