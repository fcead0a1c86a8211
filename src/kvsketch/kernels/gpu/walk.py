"""The sign walk of BalanceKV's experiments: a program for every block, with half of the products, and none in memory.

A block's tokens come in strips. What the signs before a strip sum up to at its tokens is found from products that are
made again, a tile of earlier tokens at a time; then the products among its own tokens are written down, and its tokens
follow one by one. Keys are shifted by their mean without being touched: ⟨k - m, k' - m⟩ = ⟨k, k'⟩ - ⟨k, m⟩ - ⟨k', m⟩ +
⟨m, m⟩, so that products of numbers of 16 bits stay exact.
"""

import triton
import triton.language as tl


@triton.jit
def keep_half(
    keys, values, chances, sizes, kept, rooms,
    key_block, key_step, value_block, value_step, count, scale, gain, ones,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    STRIP: tl.constexpr,
):  # fmt: skip
    """Which half of a block's first tokens is kept: those whose sign is +."""
    block = tl.program_id(0).to(tl.int64)
    keys += block * key_block
    values += block * value_block
    chances += block * count
    kept += block * count
    own = rooms + block * (STRIP * STRIP + 2 * count)  # products among a strip's tokens
    along = own + STRIP * STRIP  # each token's product with the mean
    signs = along + count
    size = tl.load(sizes + block)
    at, widths, value_widths = tl.arange(0, STRIP), tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)

    mean = tl.zeros([KEY_BLOCK], tl.float32)
    for start in tl.range(0, size, STRIP):
        mean += tl.sum(_rows(keys, start + at, key_step, size, widths, WIDTH).to(tl.float32), 0)
    mean /= tl.maximum(size, 1)
    square = tl.sum(mean * mean, 0)
    largest = 0.0  # of all logits: ⟨k, k'⟩ is largest where k = k'
    for start in tl.range(0, size, STRIP):
        key = _rows(keys, start + at, key_step, size, widths, WIDTH).to(tl.float32)
        beside = tl.sum(key * mean[None, :], 1)
        tl.store(along + start + at, beside, mask=start + at < size)
        lengths = tl.sum(key * key, 1) - 2 * beside + square
        largest = tl.maximum(largest, tl.max(tl.where(start + at < size, lengths, 0.0), 0) * scale)
    diagonal = 0.0
    for start in tl.range(0, size, STRIP):
        key = _rows(keys, start + at, key_step, size, widths, WIDTH).to(tl.float32)
        value = _rows(values, start + at, value_step, size, value_widths, VALUE_WIDTH).to(tl.float32)
        lengths = tl.sum(key * key, 1) - 2 * tl.sum(key * mean[None, :], 1) + square
        products = tl.exp(lengths * scale - largest) * (tl.sum(value * value, 1) + ones)
        diagonal += tl.sum(tl.where(start + at < size, products, 0.0), 0)
    gains = gain / tl.maximum(diagonal / tl.maximum(size, 1), 1e-30)
    tl.debug_barrier()  # what was written is read by all

    positive = 0
    for start in range(0, size, STRIP):
        here = start + at
        key = _rows(keys, here, key_step, size, widths, WIDTH)
        value = _rows(values, here, value_step, size, value_widths, VALUE_WIDTH)
        beside = tl.load(along + here, mask=here < size, other=0.0)
        y = tl.zeros([STRIP], tl.float32)
        for before in tl.range(0, start, STRIP):
            others = before + at
            other_key = _rows(keys, others, key_step, size, widths, WIDTH)
            other_value = _rows(values, others, value_step, size, value_widths, VALUE_WIDTH)
            shift = tl.load(along + others)
            found = _products(key, other_key, value, other_value, beside, shift, square, largest, scale, ones)
            y += tl.sum(found * tl.load(signs + others)[None, :], 1)
        found = _products(key, key, value, value, beside, beside, square, largest, scale, ones) * gains
        tl.store(own + at[:, None] * STRIP + at[None, :], found)
        tl.debug_barrier()
        positive = _walk(own, chances, signs, kept, start, size, y * gains, positive, STRIP)
        tl.debug_barrier()


@triton.jit
def _walk(own, chances, signs, kept, start, size, y, positive, STRIP: tl.constexpr):
    """The signs of a strip, one token after the other: + where y is below its chance, until half of all have a sign."""
    at = tl.arange(0, STRIP)
    chance = tl.load(chances + start + at, mask=start + at < size, other=0.0)
    found = tl.zeros([STRIP], tl.float32)
    half = size // 2
    for i in range(tl.minimum(STRIP, size - start)):
        products = tl.load(own + i * STRIP + at)  # where it lies does not depend on signs
        here = at == i
        plus = tl.sum(tl.where(here, y - chance, 0.0), 0) < 0.0
        plus = (plus & (positive < half)) | (start + i - positive >= half)
        sign = tl.where(plus, 1.0, -1.0)
        positive += tl.where(plus, 1, 0)
        y += sign * products
        found = tl.where(here, sign, found)
    tl.store(signs + start + at, found, mask=start + at < size)
    tl.store(kept + start + at, (found > 0).to(tl.int8), mask=start + at < size)
    return positive


@triton.jit
def _products(key, other_key, value, other_value, beside, shift, square, largest, scale, ones):
    """exp⟨k, k'⟩ · (⟨v, v'⟩ + ones) of two strips."""
    logits = tl.dot(key, tl.trans(other_key), input_precision="ieee") - beside[:, None] - shift[None, :] + square
    return tl.exp(logits * scale - largest) * (tl.dot(value, tl.trans(other_value), input_precision="ieee") + ones)


@triton.jit
def _rows(where, places, step, size, widths, WIDTH: tl.constexpr):
    """Some rows, and zeros for those that are not there."""
    return tl.load(
        where + places.to(tl.int64)[:, None] * step + widths[None, :],
        mask=(places < size)[:, None] & (widths < WIDTH)[None, :],
        other=0.0,
    )
