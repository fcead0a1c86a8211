"""Weighted attention for many queries, as of a prompt: a program for every block of a head's queries.

It goes through the entries a block at a time and keeps, for each query, the largest logit and the sums relative to it,
so that memory grows with queries and entries, not with their product. Among new tokens (`CAUSAL`) a query sees itself
and the valid tokens before it.

Blocks that all of its queries see whole (`WHOLE`) come first, without masks, which take as long as the products; the
rest comes with masks. An empty slot may hold anything: if that makes an answer NaN, all blocks come again with masks.
"""

import triton
import triton.language as tl

from kvsketch.kernels.gpu.softmax import LEAST_MASS, LN_2, LOG2_E, NOTHING, entries, more


@triton.jit
def attend_many(
    query, keys, values, log_mass, log_value, valid, out, lse,  # where they begin
    query_strides, key_strides, value_strides, mass_strides, extra_strides, valid_row,  # by row, head and step
    queries, count, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, HAS: tl.constexpr,
    CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head of a row. Blocks that see most begin first."""
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
    start = 0
    if WHOLE and HAS < 4:
        start = ((first + 1 if CAUSAL else count) // AT_ONCE) * AT_ONCE
        places = tl.arange(0, AT_ONCE).to(tl.int64)[:, None]
        key_places = keys + places * key_strides[2] + widths[None, :]
        value_places = values + places * value_strides[2] + value_widths[None, :]
        for begin in tl.range(0, start, AT_ONCE):
            far = begin + tl.zeros([], tl.int64)
            top, mass, found = _more(
                asked, key_places + far * key_strides[2], value_places + far * value_strides[2],
                log_mass + begin, log_value + begin, top, mass, found, scale, softcap,
                HAS, SOFTCAP, AT_ONCE, WIDTH, VALUE_WIDTH, KEY_BLOCK, VALUE_BLOCK,
            )  # fmt: skip
        if HAS:
            wrong = tl.max((mass != mass).to(tl.int32), 0)
            wrong = tl.maximum(wrong, tl.max(tl.max((found != found).to(tl.int32), 1), 0)) > 0
            start = tl.where(wrong, 0, start)
            top = tl.where(wrong, NOTHING, top)
            mass = tl.where(wrong, 0.0, mass)
            found = tl.where(wrong, 0.0, found)
    for begin in tl.range(start, last, AT_ONCE):
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


@triton.jit
def _more(
    asked, keys, values, log_mass, log_value, top, mass, found, scale, softcap,
    HAS: tl.constexpr, SOFTCAP: tl.constexpr, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """As `more` in softmax.py, for a block that all queries see: places of its keys and values, and its weights."""
    at = tl.arange(0, AT_ONCE)
    if WIDTH == KEY_BLOCK:
        key = tl.load(keys)
    else:
        key = tl.load(keys, mask=(tl.arange(0, KEY_BLOCK) < WIDTH)[None, :], other=0.0)
    if asked.dtype == tl.float32:
        asked = asked.to(key.dtype)
    logits = tl.dot(asked, tl.trans(key.to(asked.dtype)), input_precision="ieee")
    if SOFTCAP:
        logits = softcap * LOG2_E * (2 * tl.sigmoid(2 * scale / softcap * logits) - 1)
    else:
        logits *= scale * LOG2_E
    masses = logits
    if HAS & 1:
        masses = logits + (tl.load(log_mass + at) * LOG2_E)[None, :]
    shares = masses
    higher = tl.maximum(top, tl.max(masses, 1))
    if HAS & 2:
        shares = logits + (tl.load(log_value + at) * LOG2_E)[None, :]
        higher = tl.maximum(higher, tl.max(shares, 1))
    level = higher
    if HAS:
        level = tl.where(higher == NOTHING, 0.0, higher)
    lost = tl.exp2(top - level)
    weights = tl.exp2(masses - level[:, None])
    mass = mass * lost + tl.sum(weights, 1)
    if HAS & 2:
        weights = tl.exp2(shares - level[:, None])
    if VALUE_WIDTH == VALUE_BLOCK:
        value = tl.load(values)
    else:
        value = tl.load(values, mask=(tl.arange(0, VALUE_BLOCK) < VALUE_WIDTH)[None, :], other=0.0)
    value = value.to(asked.dtype)
    found = tl.dot(weights.to(value.dtype), value, found * lost[:, None], input_precision="ieee")
    return higher, mass, found
