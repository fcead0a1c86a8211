"""The sign walk of BalanceKV's experiments: a program for every block, half of the products, few in memory.

A block's tokens come in strips. What the earlier signs sum up to at a strip's tokens is found from products that are
made again, a tile of earlier tokens at a time; then the products among its own tokens are written down, and its tokens
get their signs one by one. Keys are shifted by their mean without being changed in memory: ⟨k - m, k' - m⟩ = ⟨k, k'⟩ -
⟨k, m⟩ - ⟨k', m⟩ + ⟨m, m⟩, so that products of numbers of 16 bits stay exact.

A step of the walk waits for the one before, so it must be short. Tokens walk in parts, one token for each lane of a
warp, and every warp holds all of a part: warps walk alike and need not wait for each other, and a row of products is on
its way before it is needed.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["index_lane", "size_lane", "size_step", "blocks"])
def keep_half(
    keys, values, index, uniforms, sizes, kept, rooms,
    key_lane, key_step, value_lane, value_step, index_lane, index_step, size_lane, size_step,
    blocks, count, scale, gain, ones,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    STRIP: tl.constexpr, PART: tl.constexpr, READ: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Which half of a block's first tokens is kept: those whose sign is +. They are read where `index` says."""
    block = tl.program_id(0).to(tl.int64)
    lane, place = block // blocks, block % blocks
    keys += lane * key_lane
    values += lane * value_lane
    index += lane * index_lane + place * count * index_step
    uniforms += block * count
    kept += block * count
    padded = tl.cdiv(count, STRIP) * STRIP
    own = rooms + block * (STRIP * STRIP + STRIP + 2 * padded)  # products among a strip's tokens
    gaps = own + STRIP * STRIP  # between its tokens' y and their chances
    along = gaps + STRIP  # each token's product with the mean
    signs = along + padded
    size = tl.load(sizes + lane * size_lane + place * size_step).to(tl.int32)
    padded = tl.cdiv(size, STRIP) * STRIP
    at, widths, value_widths = tl.arange(0, STRIP), tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)

    mean = tl.zeros([KEY_BLOCK], tl.float32)
    some = tl.arange(0, READ)
    for start in tl.range(0, size, READ):
        numbers = _numbers(index, start + some, index_step, size)
        mean += tl.sum(_rows(keys, numbers, key_step, widths, WIDTH).to(tl.float32), 0)
    mean /= tl.maximum(size, 1)
    for start in range(0, count, READ):  # tokens that are not there are not kept
        tl.store(kept + start + some, tl.zeros([READ], tl.int8), mask=start + some < count)
    rate = scale * 1.4426950408889634  # exponentials are powers of two
    square = tl.sum(mean * mean, 0) * rate
    largest = 0.0  # of all logits: ⟨k, k'⟩ is largest where k = k'
    diagonal = 0.0  # what products of tokens with themselves sum up to
    for start in tl.range(0, padded, READ):
        here = start + some
        numbers = _numbers(index, here, index_step, size)
        key = _rows(keys, numbers, key_step, widths, WIDTH).to(tl.float32)
        value = _rows(values, numbers, value_step, value_widths, VALUE_WIDTH).to(tl.float32)
        beside = tl.sum(key * mean[None, :], 1) * rate
        tl.store(along + here, tl.where(here < size, beside, 1e30))  # no products of tokens that are not there
        tl.store(signs + here, tl.zeros([READ], tl.float32))
        logits = tl.where(here < size, tl.sum(key * key, 1) * rate - 2 * beside + square, 0.0)
        larger = tl.maximum(largest, tl.max(logits, 0))
        products = tl.exp2(logits - larger) * (tl.sum(value * value, 1) + ones)
        diagonal = diagonal * tl.exp2(largest - larger) + tl.sum(tl.where(here < size, products, 0.0), 0)
        largest = larger
    gains = gain / tl.maximum(diagonal / tl.maximum(size, 1), 1e-30)
    tl.debug_barrier()  # what was written is read by all threads

    positive = tl.zeros([PART], tl.int32)  # the same number, many times
    for start in range(0, size, STRIP):
        here = start + at
        numbers = _numbers(index, here, index_step, size)
        key = _rows(keys, numbers, key_step, widths, WIDTH)
        value = _rows(values, numbers, value_step, value_widths, VALUE_WIDTH)
        beside = tl.load(along + here) - square + largest
        y = tl.zeros([STRIP], tl.float32)
        for before in tl.range(0, start + STRIP, TILE):  # the last tiles are the strip's own
            others = before + tl.arange(0, TILE)
            theirs = _numbers(index, others, index_step, size)
            other_key = _rows(keys, theirs, key_step, widths, WIDTH)
            other_value = _rows(values, theirs, value_step, value_widths, VALUE_WIDTH)
            shift = tl.load(along + others)
            sign = tl.load(signs + others)
            logits = tl.dot(key, tl.trans(other_key), input_precision="ieee") * rate
            found = tl.dot(value, tl.trans(other_value), input_precision="ieee") + ones
            found *= tl.exp2(logits - beside[:, None] - shift[None, :])
            y += tl.sum(found * sign[None, :], 1)
            if before >= start:
                tl.store(own + at[:, None] * STRIP + (others - start)[None, :], found * gains)
        chance = 0.5 - tl.load(uniforms + here, mask=here < size, other=0.5).to(tl.float64)
        tl.store(gaps + at, y * gains - chance.to(tl.float32))
        tl.debug_barrier()
        for part in tl.static_range(STRIP // PART):
            positive = _walk(own, gaps, signs, kept, start, size, positive, part, STRIP, PART)
            tl.debug_barrier()


@triton.jit
def _walk(
    own, gaps, signs, kept, start, size, positive,
    part: tl.constexpr, STRIP: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The signs of a part of a strip, one token after the other, until half of all have a sign."""
    at = tl.arange(0, PART)
    gap = tl.load(gaps + part * PART + at)
    for before in tl.static_range(part):
        rows = before * PART + at
        sign = tl.load(signs + start + rows)
        gap += tl.sum(sign[:, None] * tl.load(own + rows[:, None] * STRIP + part * PART + at[None, :]), 0)
    if part > 0:  # by way of memory, so that they are laid out like rows of products
        tl.debug_barrier()
        tl.store(gaps + part * PART + at, gap)
        tl.debug_barrier()
        gap = tl.load(gaps + part * PART + at)
    start += part * PART
    own += part * PART * STRIP + part * PART
    found = tl.zeros([PART], tl.float32)
    least = start - size // 2  # of positive signs, before this part's
    steps = tl.minimum(PART, size - start)  # rounded up to four: what follows the last token has no weight
    first, second, third, fourth = _four(own, 0, at, STRIP, PART)
    fifth, sixth, seventh, eighth = _four(own, 4, at, STRIP, PART)
    for i in range(0, steps, 4):
        following = _four(own, i + 8, at, STRIP, PART)
        gap, positive, found = _step(gap, positive, found, first, at, i, least, size)
        gap, positive, found = _step(gap, positive, found, second, at, i + 1, least, size)
        gap, positive, found = _step(gap, positive, found, third, at, i + 2, least, size)
        gap, positive, found = _step(gap, positive, found, fourth, at, i + 3, least, size)
        first, second, third, fourth = fifth, sixth, seventh, eighth
        fifth, sixth, seventh, eighth = following
    tl.store(signs + start + at, tl.where(start + at < size, found, 0.0))
    tl.store(kept + start + at, (found > 0).to(tl.int8), mask=start + at < size)
    return positive


@triton.jit
def _four(own, i, at, STRIP: tl.constexpr, PART: tl.constexpr):
    """Rows of products from the i-th on; after the last the first again, which nobody reads."""
    rows = own + i % PART * STRIP + at
    return tl.load(rows), tl.load(rows + STRIP), tl.load(rows + 2 * STRIP), tl.load(rows + 3 * STRIP)


@triton.jit
def _step(gap, positive, found, products, at, i, least, size):
    """One token's sign: + where its y is below its chance."""
    own = tl.gather(gap, tl.zeros_like(at) + i, 0)  # a single shuffle
    plus = ((own < 0.0) & (positive < size // 2)) | (positive <= least + i)
    sign = tl.where(plus, 1.0, -1.0)
    positive += plus.to(tl.int32)
    return gap + sign * products, positive, tl.where(at == i, sign, found)


@triton.jit
def _numbers(index, at, step, size):
    """Which tokens some of a block's are, -1 for those that are not there."""
    return tl.load(index + at.to(tl.int64) * step, mask=at < size, other=-1)


@triton.jit
def _rows(where, numbers, step, widths, WIDTH: tl.constexpr):
    """Rows by their numbers, and zeros for those that are not there."""
    places = numbers[:, None] * step + widths[None, :]
    return tl.load(where + places, mask=(numbers >= 0)[:, None] & (widths < WIDTH)[None, :], other=0.0)
