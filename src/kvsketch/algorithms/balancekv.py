"""BalanceKV, for one head: halves of tokens that answer every query alike, and a stream held as such halves.

Paper: Han, Kapralov, Kochetkova, Sheth, Zandieh, BalanceKV (NeurIPS 2025), Algorithms 1 to 4; the walk is that
of Alweiss, Liu and Sawhney (2021). Randomness comes in as numbers in [0, 1), one for each sign. Logits are
⟨q, k⟩ times `scale`, in the paper 1/√d: there exp(r²/(2√d)) is exp(r²·scale/2) here.

A walk may fail: its sum leaves the strip in which signs can still be drawn. That is an outcome the caller sees
(`Walk.failed_at`), as in the paper, which bounds how often it happens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Walk:
    """Signs of n vectors, as far as they were drawn: 0 from the place at which the walk failed."""

    signs: Float[Tensor, " n"]
    failed_at: int | None

    @property
    def smaller(self) -> Bool[Tensor, " n"]:
        """The vectors of the sign that fewer have, + if both have as many. Algorithm 2, lines 12-16."""
        positive, negative = self.signs > 0, self.signs < 0
        return positive if positive.sum() <= negative.sum() else negative


def sign_of(y: float, bound: float, uniform: float) -> float:
    """+1 with probability 1/2 - y/(2·bound), else -1; 0 if |y| is beyond the bound: there is no such probability."""
    if abs(y) > bound:
        return 0.0
    return 1.0 if uniform < 0.5 - y / (2 * bound) else -1.0


def balance(products: Float[Tensor, "n n"], bound: float, uniforms: Float[Tensor, " n"]) -> Walk:
    """The walk on vectors of which only the products are known. Algorithm 3, lines 4-11.

    A sign depends on y, the vector's product with the signed sum of the vectors before it; where no sign can be drawn,
    the walk fails.
    """
    signs = products.new_zeros(len(products))
    for j in range(len(products)):
        signs[j] = sign_of(float(products[j, :j] @ signs[:j]), bound, float(uniforms[j]))
        if signs[j] == 0:
            return Walk(signs, j)
    return Walk(signs, None)


def halve_exactly(products: Float[Tensor, "n n"], gain: float, uniforms: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Signs of which exactly half are +, as in the experiments (Appendix B); n is even.

    The probability of + is 1/2 - gain · y; beyond [0, 1] it means never or always, and is no failure. As soon as n/2
    have one sign, the rest gets the other. A gain of 1/(2cR²) is the theorem's, as long as the probability stays within
    [0, 1]; with a large gain it is a greedy walk, for which no bound is proven. Changing all uniforms to 1 - u changes
    all signs: every token is kept as often as not.
    """
    half, signs = len(products) // 2, products.new_zeros(len(products))
    for j in range(len(products)):
        positive = int((signs > 0).sum())
        if positive == half or j - positive == half:
            signs[j] = -1.0 if positive == half else 1.0
            continue
        y = float(products[j, :j] @ signs[:j])
        signs[j] = 1.0 if float(uniforms[j]) < 0.5 - gain * y else -1.0
    return signs


def constant(count: int, failure: float) -> float:
    """c = 30 log(n/δ); for no tokens the same as for one, since small batches may be halved down to none."""
    return 30 * math.log(max(1, count) / failure)


def self_balancing_walk(
    vectors: Float[Tensor, "n d"], radius: float, failure: float, uniforms: Float[Tensor, " n"]
) -> Walk:
    """Signs whose signed sum is short in every direction. Algorithm 3, in O(nd) time: that sum is carried along."""
    bound = constant(len(vectors), failure) * radius**2
    signs, total = vectors.new_zeros(len(vectors)), vectors.new_zeros(vectors.shape[1])
    for j, vector in enumerate(vectors):
        signs[j] = sign_of(float(total @ vector), bound, float(uniforms[j]))
        if signs[j] == 0:
            return Walk(signs, j)
        total += signs[j] * vector
    return Walk(signs, None)


def softmax_products(keys: Float[Tensor, "n d"], values: Float[Tensor, "n e"], scale: float) -> Float[Tensor, "n n"]:
    """exp⟨k_i, k_j⟩ · ⟨v_i, v_j⟩: products of the vectors that stand for exp⟨k_i, ·⟩ v_i. Algorithm 2, line 6."""
    return torch.exp(keys @ keys.T * scale) * (values @ values.T)


def softmax_balance(
    keys: Float[Tensor, "n d"],
    values: Float[Tensor, "n e"],
    r_key: float,
    r_value: float,
    failure: float,
    uniforms: Float[Tensor, " n"],
    scale: float,
) -> Walk:
    """Signs for which both halves answer any query alike. Algorithm 2; its output is `smaller` of the walk."""
    radius = math.exp(r_key**2 * scale / 2) * r_value  # R
    return balance(softmax_products(keys, values, scale), constant(len(keys), failure) * radius**2, uniforms)


@dataclass(frozen=True)
class Tokens:
    """Keys with their values."""

    keys: Float[Tensor, "n d"]
    values: Float[Tensor, "n e"]

    def join(self, other: "Tokens") -> "Tokens":
        """These tokens and then the others."""
        return Tokens(torch.cat([self.keys, other.keys]), torch.cat([self.values, other.values]))

    def choose(self, which: Bool[Tensor, " n"]) -> "Tokens":
        """Only these tokens."""
        return Tokens(self.keys[which], self.values[which])


Halve = Callable[[Tokens], Tokens]  # gives at most half of the tokens; they count double from then on


@dataclass(frozen=True)
class Levels:
    """C⁰…Cᵀ: a token of level l stands for 2ˡ. A level is None while it is empty."""

    batch: int  # t
    levels: tuple[Tokens | None, ...]
    seen: int = 0  # j


def no_levels(batch: int, rate: int) -> Levels:
    """C⁰ … Cᵀ = ∅, for a compression rate of 2⁻ᵀ."""
    return Levels(batch, (None,) * (rate + 1))


def merge_and_reduce(state: Levels, key: Float[Tensor, " d"], value: Float[Tensor, " e"], halve: Halve) -> Levels:
    """Take a token; every t tokens the levels are halved like a binary counter. Algorithm 4.

    The loop "while p is an integer" carries: after every batch level 0 is halved into level 1, after every
    second one level 1 into level 2, and so on; the last level is never halved.
    """
    levels, seen = list(state.levels), state.seen + 1
    new = Tokens(key[None], value[None])
    levels[0] = new if levels[0] is None else levels[0].join(new)
    batches, level = seen / state.batch, 0
    while batches == int(batches) and level < len(levels) - 1:
        below, above = levels[level], levels[level + 1]
        if below is not None:
            half = halve(below)
            levels[level + 1] = half if above is None else above.join(half)
        levels[level] = None
        batches, level = batches / 2, level + 1
    return Levels(state.batch, tuple(levels), seen)


def estimate(state: Levels, query: Float[Tensor, " d"], scale: float) -> Float[Tensor, " e"] | None:
    """Σ_l 2ˡ Σ exp⟨k, q⟩ v over the tokens of level l; None before the first token. Theorem 3.4."""
    parts = [
        2.0**level * (torch.exp(tokens.keys @ query * scale) @ tokens.values)
        for level, tokens in enumerate(state.levels)
        if tokens is not None
    ]
    return sum(parts[1:], parts[0]) if parts else None


@dataclass(frozen=True)
class BalanceKV:
    """Instances of MergeAndReduce: one for every bucket of value norms, and one for the denominator."""

    batch: int
    rate: int
    numerators: dict[int, Levels] = field(default_factory=dict)  # bucket i has norms in (2^(i-1), 2^i]
    denominator: Levels | None = None
    longest_value: float = 0.0  # v_max


def bucket_of(value: Float[Tensor, " e"]) -> int | None:
    """i with 2^i ≥ ‖v‖ > 2^(i-1): line 5, where a norm of exactly 2^(i-1) would be in two. None for a zero value.

    The first version of the paper prints the inequalities the wrong way round.
    """
    norm = float(value.norm())
    return None if norm == 0 else math.ceil(math.log2(norm))


def balancekv(
    state: BalanceKV,
    key: Float[Tensor, " d"],
    value: Float[Tensor, " e"],
    *,
    epsilon: float,
    count: int,
    r: float,
    scale: float,
    halve: Halve,
) -> BalanceKV:
    """Take a token. Algorithm 1, lines 5-12; `count` is n, the expected length of the stream.

    Buckets with 2^i ≤ ε/(2n) · exp(-r²·scale) · v_max are erased: line 8 as it is printed. (The proof of Theorem 3.1
    has ε/√n · v_max there.)
    """
    numerators = dict(state.numerators)
    bucket = bucket_of(value)
    if bucket is not None:
        levels = numerators.get(bucket, no_levels(state.batch, state.rate))
        numerators[bucket] = merge_and_reduce(levels, key, value, halve)
    longest = max(state.longest_value, float(value.norm()))
    least = epsilon / (2 * count) * math.exp(-(r**2) * scale) * longest
    numerators = {i: levels for i, levels in numerators.items() if 2.0**i > least}
    denominator = state.denominator or no_levels(state.batch, state.rate)
    denominator = merge_and_reduce(denominator, key, value.new_ones(1), halve)
    return BalanceKV(state.batch, state.rate, numerators, denominator, longest)


def answer(state: BalanceKV, query: Float[Tensor, " d"], scale: float) -> Float[Tensor, " e"]:
    """z_j: the sum of all buckets over the denominator. Line 13."""
    assert state.denominator is not None, "no token came yet"
    below = estimate(state.denominator, query, scale)
    parts = [estimate(levels, query, scale) for levels in state.numerators.values()]
    known = [part for part in parts if part is not None]
    assert below is not None
    return sum(known[1:], known[0]) / below
