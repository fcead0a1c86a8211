"""Weighted attention for many queries, as of a prompt: a program for every block of a head's queries.

It goes through the entries a block at a time and keeps, for each query, the largest logit and the sums below it, so
that memory grows with queries and entries, not with their product. Among new tokens (`CAUSAL`) a query sees itself and
the valid ones before it.
"""

import triton
import triton.language as tl

from kvsketch.kernels.gpu.softmax import LEAST_MASS, LN_2, NOTHING, entries, more


@triton.jit
def attend_many(
    query, keys, values, log_mass, log_value, valid, out, lse,  # where they begin
    query_strides, key_strides, value_strides, mass_strides, extra_strides, valid_row,  # by row, head and step
    queries, count, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, HAS: tl.constexpr,
    CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one head of a row. Blocks that see most begin first."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    which = tl.program_id(1).to(tl.int64)
    row, query_head = which // HEADS, which % HEADS
    head = query_head // GROUP
    steps = first + tl.arange(0, ROWS)
    real = steps < queries
    widths, value_widths = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    places = row * query_strides[0] + query_head * query_strides[1] + steps.to(tl.int64) * query_strides[2]
    asked = tl.load(
        query + places[:, None] + widths[None, :], mask=real[:, None] & (widths < WIDTH)[None, :], other=0.0
    )
    keys += row * key_strides[0] + head * key_strides[1]
    values += row * value_strides[0] + head * value_strides[1]
    log_mass += row * mass_strides[0] + head * mass_strides[1]
    log_value += row * extra_strides[0] + head * extra_strides[1]
    valid += row * valid_row

    top = tl.full([ROWS], NOTHING, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    last = tl.minimum(count, first + ROWS) if CAUSAL else count
    for begin in tl.range(0, last, AT_ONCE):
        at = begin + tl.arange(0, AT_ONCE)
        ok = at < last
        key, value, of_mass, of_value, ok = entries(
            keys, values, log_mass, log_value, key_strides[2], value_strides[2], at, ok,
            HAS, WIDTH, VALUE_WIDTH, KEY_BLOCK, VALUE_BLOCK,
        )  # fmt: skip
        visible = ok[None, :]
        if CAUSAL:
            visible &= at[None, :] <= steps[:, None]
        if HAS & 4:
            there = tl.load(valid + at, mask=ok, other=0) != 0
            visible &= there[None, :] | (at[None, :] == steps[:, None])  # padding sees itself alone
        top, mass, found = more(
            asked, key, value, of_mass, of_value, visible, top, mass, found, scale, softcap, SOFTCAP
        )

    some = tl.where(mass > 0.0, tl.maximum(mass, LEAST_MASS), 1.0)
    answers = which * queries + steps
    tl.store(
        out + answers[:, None] * VALUE_WIDTH + value_widths[None, :],
        (found / some[:, None]).to(out.dtype.element_ty),
        mask=real[:, None] & (value_widths < VALUE_WIDTH)[None, :],
    )
    tl.store(lse + answers, tl.where(mass > 0.0, (top + tl.log2(some)) * LN_2, NOTHING), mask=real)
