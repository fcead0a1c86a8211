"""Random numbers by address: SplitMix64 over the parts of an address, all of it in one launch."""

import triton
import triton.language as tl

from kvsketch.kernels.gpu.numbers import plain

# The increment and the two multipliers of `algorithms/draws.py`, as signed integers.
STEP = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
SECOND = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit(do_not_specialize=["begin", "count", "second", "third", "fourth"])
def draw(
    parts, strides, out,  # where they begin
    begin, count, second, third, fourth,  # the state so far; how many numbers, and sizes but for the first
    PARTS: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some of the numbers; strides are 0 where a part is the same; a part that is not LISTED is a number."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = number < count
    rest = number // fourth
    before = rest // third
    places = (before // second, before % second, rest % third, number % fourth)
    state = tl.zeros([BLOCK], tl.int64) + begin
    for part in tl.static_range(PARTS):
        if LISTED >> part & 1:
            at = tl.zeros([BLOCK], tl.int64)
            for size in tl.static_range(4):
                at += places[size] * plain(strides[part][size])
            state = _scrambled(state + tl.load(parts[part] + at, mask=ok, other=0))
        else:
            state = _scrambled(state + plain(parts[part]))
    tl.store(out + number, _shifted(state, 11).to(tl.float64) * 1.1102230246251565e-16, mask=ok)  # 2⁻⁵³


@triton.jit
def _scrambled(x):
    x += STEP
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


@triton.jit
def _shifted(x, BITS: tl.constexpr):
    """A logical shift to the right."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)
