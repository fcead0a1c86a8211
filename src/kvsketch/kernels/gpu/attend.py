"""Weighted attention for few queries: everything that a lane reads, in one launch, read where it lies.

A lane is a KV head of a row of the batch, its queries are rows of one tile. What a lane reads comes in parts, each all
of its entries or runs of them; the entries of a part are cut evenly into splits, whatever the runs, and each split is a
program. It keeps its largest logit, its sums of weights and of weighted values; the last program of a lane merges those
of all splits, in their order, so that the answer is the same every time. Lengths are read on the device only.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=["sizes", "splits", "all_splits"])  # they change from step to step
def attend(
    query, out, lse, sums, tops, done,  # where they begin
    pointers, strides, sizes, splits, all_splits,  # of parts: see `_split`
    query_row, query_head, query_step, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, BY_QUERY: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PARTS: tl.constexpr, HAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):  # fmt: skip
    """One split of one lane, or of one of its queries where each reads other runs."""
    program, split = tl.program_id(0), tl.program_id(1)
    lane, step = program, 0
    per_program: tl.constexpr = GROUP if BY_QUERY else GROUP * QUERIES
    if BY_QUERY:
        lane, step = program // QUERIES, program % QUERIES
    row, head = lane // HEADS, lane % HEADS
    rows = tl.arange(0, ROWS)
    real = rows < per_program
    query_heads = head * GROUP + (rows if BY_QUERY else rows // QUERIES)
    steps = step + (rows * 0 if BY_QUERY else rows % QUERIES)
    widths = tl.arange(0, KEY_BLOCK)
    places = row.to(tl.int64) * query_row + query_heads.to(tl.int64) * query_head + steps * query_step
    asked = tl.load(
        query + places[:, None] + widths[None, :], mask=real[:, None] & (widths < WIDTH)[None, :], other=0.0
    )

    first = 0
    for part in tl.static_range(PARTS):
        if (split >= first) & (split < first + splits[part]):
            top, mass, found = _split(
                asked, lane, step, split - first, pointers[part], strides[part], sizes[part], splits[part], scale,
                softcap, HAS[part], WIDTH, VALUE_WIDTH, SOFTCAP, ROWS, AT_ONCE, KEY_BLOCK, VALUE_BLOCK,
            )  # fmt: skip
            _keep(
                sums, tops, program * all_splits + split, top, mass, found, per_program, VALUE_WIDTH, VALUE_BLOCK, ROWS
            )
        first += splits[part]

    tl.debug_barrier()  # all that this program has stored, before it says so
    if tl.atomic_add(done + program, 1, sem="acq_rel") == all_splits - 1:
        for number in range(per_program):
            query_at = (row * HEADS + head) * GROUP + (number if BY_QUERY else number // QUERIES)
            answer = query_at * QUERIES + (step if BY_QUERY else number % QUERIES)
            _merge(
                out, lse, sums, tops, program, number, answer, all_splits, per_program, VALUE_WIDTH, VALUE_BLOCK,
                SPLIT_BLOCK,
            )  # fmt: skip
        tl.store(done + program, 0)  # for the next call


@triton.jit
def _split(
    asked, lane, step, split, pointers, strides, sizes, splits, scale, softcap,
    HAS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest logit of a lane's queries in a part of its entries, and the sums of exp2 of what is below it."""
    keys, values, log_mass, log_value, slots, begins, ends = pointers
    key_row, key_head, key_step, value_row, value_head, value_step, mass_row, mass_head, extra_row, extra_head = strides
    count, part_heads, segments, by_query = sizes
    has_mass: tl.constexpr = HAS & 1
    has_extra: tl.constexpr = HAS & 2
    has_slots: tl.constexpr = HAS & 4
    search: tl.constexpr = HAS // 8 - 1  # halvings of the list of runs; -1 where all entries are read

    slot = lane
    if has_slots:
        slot = tl.load(slots + lane)
    there = slot >= 0  # this part has entries of the lane
    slot = tl.maximum(slot, 0).to(tl.int64)
    row, head = slot // part_heads, slot % part_heads
    keys += row * key_row + head * key_head
    values += row * value_row + head * value_head
    total = count.to(tl.int64)
    if search >= 0:
        runs = (slot * by_query + tl.where(by_query > 1, step, 0)) * segments
        total = tl.load(ends + runs + segments - 1)
    total = tl.where(there, total, 0)
    each = tl.cdiv(tl.cdiv(total, splits), AT_ONCE) * AT_ONCE
    start = split * each
    stop = tl.minimum(start + each, total)

    top = tl.full([ROWS], NOTHING, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    widths, value_widths = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    for begin in tl.range(start, stop, AT_ONCE):
        at = begin + tl.arange(0, AT_ONCE)
        ok = at < stop
        if search >= 0:
            at = _place(at, begins + runs, ends + runs, segments, ok, search)
        key = tl.load(
            keys + at[:, None] * key_step + widths[None, :], mask=ok[:, None] & (widths < WIDTH)[None, :], other=0.0
        )
        value = tl.load(
            values + at[:, None] * value_step + value_widths[None, :],
            mask=ok[:, None] & (value_widths < VALUE_WIDTH)[None, :],
            other=0.0,
        )
        of_mass = tl.zeros([AT_ONCE], tl.float32)
        if has_mass:
            of_mass = tl.load(log_mass + row * mass_row + head * mass_head + at, mask=ok, other=NOTHING) * LOG2_E
        of_value = of_mass
        if has_extra:
            of_value = tl.load(log_value + row * extra_row + head * extra_head + at, mask=ok, other=NOTHING) * LOG2_E
        if has_mass | has_extra:  # in an empty slot may be anything
            ok &= tl.maximum(of_mass, of_value) > NOTHING
            value = tl.where(ok[:, None], value, 0.0)
        logits = tl.dot(asked.to(key.dtype), tl.trans(key), input_precision="ieee") * scale
        if SOFTCAP:
            logits = softcap * (2 * tl.sigmoid(2 * logits / softcap) - 1)
        logits *= LOG2_E
        masses = tl.where(ok[None, :], logits + of_mass[None, :], NOTHING)
        shares = tl.where(ok[None, :], logits + of_value[None, :], NOTHING)
        higher = tl.maximum(top, tl.max(tl.maximum(masses, shares), 1))
        level = tl.where(higher == NOTHING, 0.0, higher)
        lost = tl.exp2(top - level)
        mass = mass * lost + tl.sum(tl.exp2(masses - level[:, None]), 1)
        weights = tl.exp2(shares - level[:, None]).to(value.dtype)
        found = found * lost[:, None] + tl.dot(weights, value, input_precision="ieee")
        top = higher
    return top, mass, found


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
    sums, tops, place, top, mass, found,
    REAL: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows, widths = tl.arange(0, ROWS), tl.arange(0, VALUE_BLOCK)
    real = rows < REAL
    base = place.to(tl.int64) * REAL
    tl.store(tops + 2 * base + rows, top, mask=real)
    tl.store(tops + 2 * base + REAL + rows, mass, mask=real)
    tl.store(
        sums + (base + rows[:, None]) * VALUE_WIDTH + widths[None, :],
        found,
        mask=real[:, None] & (widths < VALUE_WIDTH)[None, :],
    )


@triton.jit
def _merge(
    out, lse, sums, tops, program, number, answer, all_splits,
    REAL: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):  # fmt: skip
    """A query's answer from those of all splits."""
    splits, widths = tl.arange(0, SPLIT_BLOCK), tl.arange(0, VALUE_BLOCK)
    base = (program * all_splits + splits).to(tl.int64) * REAL
    top = tl.load(tops + 2 * base + number, mask=splits < all_splits, other=NOTHING)
    mass = tl.load(tops + 2 * base + REAL + number, mask=splits < all_splits, other=0.0)
    highest = tl.max(top, 0)
    shares = tl.where(top == NOTHING, 0.0, tl.exp2(top - tl.where(highest == NOTHING, 0.0, highest)))
    found = tl.load(
        sums + (base[:, None] + number) * VALUE_WIDTH + widths[None, :],
        mask=(splits < all_splits)[:, None] & (widths < VALUE_WIDTH)[None, :],
        other=0.0,
    )
    total = tl.sum(mass * shares, 0)
    some = tl.where(total > 0.0, total, 1.0)
    found = tl.sum(found * shares[:, None], 0) / some
    place = answer.to(tl.int64)
    tl.store(out + place * VALUE_WIDTH + widths, found.to(out.dtype.element_ty), mask=widths < VALUE_WIDTH)
    tl.store(lse + place, tl.where(total > 0.0, (highest + tl.log2(some)) * LN_2, NOTHING))
