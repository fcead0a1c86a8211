"""What attention does with a block of keys and values: sums of exp2 of the logits less the largest one so far."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(float("-inf"))
LEAST_MASS = tl.constexpr(1e-19)  # of the largest weight, as in `weighted_attention/fused.py`


@triton.jit
def more(
    asked, key, value, of_mass, of_value, visible, top, mass, found, scale, softcap,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The largest logit of each query so far, its sum of masses and of weighted values, with some entries more.

    Logarithms are of base 2. `visible` says which query sees which entry, `of_mass` and `of_value` are the entries'.
    """
    if asked.dtype == tl.float32:  # products are of 16 bits where queries or entries are
        asked = asked.to(key.dtype)
    else:
        key, value = key.to(asked.dtype), value.to(asked.dtype)
    logits = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
    if SOFTCAP:
        logits = softcap * (2 * tl.sigmoid(2 * logits / softcap) - 1)
    logits *= LOG2_E
    masses = tl.where(visible, logits + of_mass[None, :], NOTHING)
    shares = tl.where(visible, logits + of_value[None, :], NOTHING)
    higher = tl.maximum(top, tl.max(tl.maximum(masses, shares), 1))
    level = tl.where(higher == NOTHING, 0.0, higher)
    lost = tl.exp2(top - level)
    mass = mass * lost + tl.sum(tl.exp2(masses - level[:, None]), 1)
    shares = tl.exp2(shares - level[:, None]).to(value.dtype)
    found = found * lost[:, None] + tl.dot(shares, value, input_precision="ieee")
    return higher, mass, found


@triton.jit
def entries(
    keys, values, log_mass, log_value, key_step, value_step, at, ok,
    HAS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys, values and weights of a block of entries, and which of them there are."""
    key, value = pairs(keys, values, key_step, value_step, at, ok, ok, WIDTH, VALUE_WIDTH, KEY_BLOCK, VALUE_BLOCK)
    of_mass, of_value = weights(log_mass, log_value, at, ok, HAS)
    if HAS & 3:  # an empty slot may hold anything
        ok &= tl.maximum(of_mass, of_value) > NOTHING
        value = tl.where(ok[:, None], value, 0.0)
    return key, value, of_mass, of_value, ok


@triton.jit
def pairs(
    keys, values, key_step, value_step, at, ok, held,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys of a block of entries that are `ok`, values of those that are `held` too, and zeros for the others."""
    widths, value_widths = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    far = at.to(tl.int64)[:, None]
    key = tl.load(keys + far * key_step + widths[None, :], mask=ok[:, None] & (widths < WIDTH)[None, :], other=0.0)
    value = tl.load(
        values + far * value_step + value_widths[None, :],
        mask=held[:, None] & (value_widths < VALUE_WIDTH)[None, :],
        other=0.0,
    )
    return key, value


@triton.jit
def weights(log_mass, log_value, at, ok, HAS: tl.constexpr):
    """Logarithms, of base 2, of what entries weigh in the denominator and in the sum of values."""
    of_mass = (at * 0).to(tl.float32)
    if HAS & 1:
        of_mass = tl.load(log_mass + at, mask=ok, other=NOTHING) * LOG2_E
    of_value = of_mass
    if HAS & 2:
        of_value = tl.load(log_value + at, mask=ok, other=NOTHING) * LOG2_E
    return of_mass, of_value
