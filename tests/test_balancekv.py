"""BalanceKV, one head: the walk, halves, the stream of halves, and the ratio of two of them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import normal_doubles as normal
from kvsketch.algorithms.balancekv import (
    BalanceKV,
    answer,
    balance,
    balancekv,
    bucket_of,
    constant,
    estimate,
    merge_and_reduce,
    no_levels,
    self_balancing_walk,
    softmax_balance,
    softmax_products,
)
from kvsketch.attention import exact_attention


def draws(count, seed=0):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(vectors):
    return vectors / vectors.norm(dim=-1, keepdim=True)


# -- the walk


def test_every_sign_is_drawn_with_the_probability_of_the_paper():
    """Algorithm 3, lines 5-10, written out with the two sets."""
    vectors, radius, failure = unit(normal(60, 5)), 1.0, 0.1
    uniforms = draws(60)
    c = 30 * math.log(60 / failure)
    plus, minus = [], []
    for u, x in zip(uniforms, vectors, strict=True):
        away = sum(float(u_ @ x) for u_ in plus) - sum(float(u_ @ x) for u_ in minus)
        assert abs(away) <= c * radius**2
        (plus if u < 0.5 - away / (2 * c * radius**2) else minus).append(x)
    walk = self_balancing_walk(vectors, radius, failure, uniforms)
    assert walk.failed_at is None
    assert torch.equal(vectors[walk.signs > 0], torch.stack(plus))
    assert torch.equal(vectors[walk.signs < 0], torch.stack(minus))


@pytest.mark.parametrize(("radius", "fails"), [(1.0, False), (0.25, False), (0.09, True)])
@pytest.mark.parametrize("seed", range(4))
def test_the_signed_sum_gives_the_signs_of_the_products(seed, radius, fails):
    """A radius that is too small makes the strip narrow: many signs are swayed then, and below some radius it fails."""
    vectors, uniforms = unit(normal(200, 3, seed=seed)), draws(200, seed)
    walk = self_balancing_walk(vectors, radius, 0.1, uniforms)
    expected = balance(vectors @ vectors.T, constant(200, 0.1) * radius**2, uniforms)
    assert torch.equal(walk.signs, expected.signs)
    assert walk.failed_at == expected.failed_at
    assert (walk.failed_at is not None) == fails


def test_a_sum_that_leaves_the_strip_is_a_failure_that_the_caller_sees():
    vectors = torch.ones(9, 1)
    walk = balance(vectors @ vectors.T, 2.5, torch.zeros(9))  # u = 0 takes + whatever the sum, up to a sum of 2.5
    assert walk.failed_at == 4 - 1
    assert walk.signs.tolist() == [1.0] * 3 + [0.0] * 6


def test_the_smaller_half_is_kept_and_the_positive_one_if_they_are_equal():
    vectors = torch.eye(5)
    walk = balance(vectors @ vectors.T, 1.0, torch.tensor([0.1, 0.9, 0.9, 0.9, 0.1]))
    assert walk.smaller.tolist() == [True, False, False, False, True]
    even = balance(torch.eye(4), 1.0, torch.tensor([0.9, 0.1, 0.9, 0.1]))
    assert even.smaller.tolist() == [False, True, False, True]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_at_most_half_is_kept(seed, count):
    keys, values = normal(count, 4, seed=seed), normal(count, 3, seed=seed + 1)
    walk = softmax_balance(
        keys, values, float(keys.norm(dim=1).max()), float(values.norm(dim=1).max()), 0.1, draws(count, seed), 0.5
    )
    assert walk.failed_at is None
    assert walk.smaller.sum() <= count // 2


def test_products_are_those_of_the_infinite_vectors():
    """The first terms of φ(k) ⊗ v with keys this short give the products to 1e-8 (proof of Theorem 3.3)."""
    keys, values = 0.5 * unit(normal(6, 3)), normal(6, 2, seed=1)
    scale = 3**-0.5
    embedded = []
    for key, value in zip(keys * math.sqrt(scale), values, strict=True):
        power, terms = torch.ones(1, dtype=torch.float64), []
        for i in range(12):
            terms.append(power / math.sqrt(math.factorial(i)))
            power = torch.outer(power, key).flatten()
        embedded.append(torch.outer(torch.cat(terms), value).flatten())
    vectors = torch.stack(embedded)
    torch.testing.assert_close(softmax_products(keys, values, scale), vectors @ vectors.T, rtol=1e-8, atol=1e-8)


def signed_error(keys, values, signs, query, scale):
    """‖Σ η exp⟨k, q⟩ v‖: what both halves differ by."""
    return float((signs * torch.exp(keys @ query * scale) @ values).norm())


def bound(keys, values, query, scale, failure):
    """The norm of Theorem 3.3, without its constant."""
    r_key, r_value = float(keys.norm(dim=1).max()), float(values.norm(dim=1).max())
    log = math.log(len(keys) * values.shape[1] / failure)
    exponent = (float(query.norm()) ** 2 + r_key**2) * scale / 2
    return math.sqrt(values.shape[1]) * log * math.exp(exponent) * r_value


def test_both_halves_answer_alike_within_the_bound_of_the_theorem():
    """Theorem 3.3 with constant 30 (the c of the walk): of 300 walks none may miss at δ = 0.01 beyond four errors."""
    scale, failure, walks = 0.5, 0.01, 300
    missed = 0
    for seed in range(walks):
        keys, values = unit(normal(64, 4, seed=seed)), unit(normal(64, 3, seed=seed + 10_000))
        query = unit(normal(4, seed=seed + 20_000))
        walk = softmax_balance(keys, values, 1.0, 1.0, failure, draws(64, seed), scale)
        error = signed_error(keys, values, walk.signs, query, scale)
        missed += walk.failed_at is not None or error > 30 * bound(keys, values, query, scale, failure)
    assert missed / walks <= failure + 4 * math.sqrt(failure * (1 - failure) / walks)


def root_mean_square(count, seeds, *, balanced, strip=1.0):
    """Of the signed sum of `count` unit vectors in three dimensions, along one direction."""
    sums = []
    for seed in range(seeds):
        vectors = unit(normal(count, 3, seed=seed))
        if balanced:
            signs = balance(vectors @ vectors.T, strip, draws(count, seed + 1)).signs
        else:
            signs = torch.where(draws(count, seed + 1) < 0.5, 1.0, -1.0).double()
        sums.append(float(signs @ vectors[:, 0]) ** 2)
    return math.sqrt(sum(sums) / seeds)


@pytest.mark.slow
def test_a_balanced_sum_stops_growing_and_independent_signs_do_not():
    """32 to 1,024 vectors, 32 times as many: √32 = 5.7 for fair coins; the walk's sum stays within a factor of 2."""
    seeds, strip = 60, 4.0  # wide enough that none of these walks fails
    balanced = [root_mean_square(count, seeds, balanced=True, strip=strip) for count in (32, 1024)]
    independent = [root_mean_square(count, seeds, balanced=False) for count in (32, 1024)]
    error = 4 * math.sqrt(2 * 2 / (2 * seeds))  # of a ratio of two root mean squares, relative: four standard errors
    assert independent[1] / independent[0] > math.sqrt(32) * (1 - error)
    assert balanced[1] / balanced[0] < 2
    assert balanced[1] < independent[1] / 4


# -- the stream of halves


def every_other(tokens):
    """A halving that is easy to follow."""
    return tokens.choose(torch.arange(len(tokens.keys)) % 2 == 1)


def numbered(count):
    return torch.arange(count, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("rate", [1, 2, 3])
def test_levels_are_a_binary_counter(rate):
    """After j tokens, level 0 holds j mod t; a level 0 < l < T holds t/2 where bit l-1 of j div t is set, or none."""
    batch, state = 4, no_levels(4, rate)
    for j, key in enumerate(numbered(67), 1):
        state = merge_and_reduce(state, key, key, every_other)
        sizes = [0 if level is None else len(level.keys) for level in state.levels]
        assert sizes[0] == j % batch
        batches = j // batch
        for level in range(1, rate):
            assert sizes[level] == (batch // 2 if batches >> (level - 1) & 1 else 0)
        weight = sum(2**level * size for level, size in enumerate(sizes))
        assert weight == j, "even batches halve exactly: nothing is lost"


def test_with_one_batch_the_stream_is_held_exactly():
    state = no_levels(100, 3)
    keys, values = normal(60, 4), normal(60, 2, seed=1)
    for key, value in zip(keys, values, strict=True):
        state = merge_and_reduce(state, key, value, every_other)
    query = normal(4, seed=2)
    torch.testing.assert_close(estimate(state, query, 0.5), torch.exp(keys @ query * 0.5) @ values)


def walked(seed, bound_of_walk):
    """Halving by the walk, with draws of its own for every call."""
    generator = torch.Generator().manual_seed(seed)

    def halve(tokens):
        uniforms = torch.rand(len(tokens.keys), generator=generator, dtype=torch.float64)
        walk = balance(softmax_products(tokens.keys, tokens.values, 0.5), bound_of_walk, uniforms)
        assert walk.failed_at is None
        return tokens.choose(walk.smaller)

    return halve


def test_identical_tokens_halve_to_the_same_sum():
    """The walk alternates where every token equals the one before, if the strip is as narrow as one token."""
    keys, values = torch.ones(16, 2).double(), torch.ones(16, 1).double()
    product = float(softmax_products(keys[:1], values[:1], 0.5)) * (1 + 1e-9)
    walk = balance(softmax_products(keys, values, 0.5), product, draws(16))
    assert walk.signs.sum() == 0
    assert walk.smaller.sum() == 8


# -- BalanceKV


@pytest.mark.parametrize(("norm", "bucket"), [(1.0, 0), (2.0, 1), (1.5, 1), (0.5, -1), (0.26, -1), (3.9, 2)])
def test_buckets_hold_norms_up_to_a_power_of_two(norm, bucket):
    assert bucket_of(torch.tensor([norm])) == bucket
    assert 2.0**bucket >= norm > 2.0 ** (bucket - 1)


def test_a_zero_value_is_in_no_bucket_and_counts_in_the_denominator():
    assert bucket_of(torch.zeros(3)) is None
    state = run(normal(5, 4), torch.cat([torch.zeros(2, 3), normal(3, 3)]).double())
    assert sum(len(levels.levels[0].keys) for levels in state.numerators.values()) == 3
    assert len(state.denominator.levels[0].keys) == 5


def run(keys, values, *, batch=64, rate=2, epsilon=0.1, r=1.0, halve=every_other):
    state = BalanceKV(batch, rate)
    for key, value in zip(keys, values, strict=True):
        state = balancekv(state, key, value, epsilon=epsilon, count=len(keys), r=r, scale=0.5, halve=halve)
    return state


def test_a_short_stream_is_answered_exactly():
    keys, values = normal(40, 4), normal(40, 3, seed=1)
    state = run(keys, values)
    assert len(state.numerators) > 2, "values of several sizes"
    query = normal(4, seed=2)
    expected = exact_attention(query[None, None, None], keys[None, None], values[None, None], 0.5).out[0, 0, 0]
    torch.testing.assert_close(answer(state, query, 0.5), expected)


def test_buckets_of_tiny_values_are_erased_as_soon_as_a_large_one_comes():
    keys = normal(3, 4)
    values = torch.tensor([[1e-9], [1.0], [2.0**-3]]).double()
    epsilon, r = 0.1, 1.0
    least = epsilon / (2 * 3) * math.exp(-(r**2) * 0.5)  # line 8, for v_max = 1
    assert 1e-9 < least < 2.0**-3
    assert set(run(keys[:1], values[:1]).numerators) == {bucket_of(values[0])}
    assert set(run(keys, values, epsilon=epsilon, r=r).numerators) == {0, -3}


@pytest.mark.slow
def test_the_error_of_a_stream_falls_faster_with_memory_than_that_of_a_sample():
    """Batches of 32 and 128: four times the memory. A sample's error halves; the walk's falls by more. 30 streams."""
    count, streams = 2048, 30
    keys, values = unit(normal(count, 3)), unit(normal(count, 2, seed=1))
    query = unit(normal(3, seed=2))
    exact = torch.exp(keys @ query * 0.5) @ values
    errors = {}
    for batch in (32, 128):
        rate = int(math.log2(count / batch))
        found = []
        for seed in range(streams):
            state, halve = no_levels(batch, rate), walked(seed, 8 * math.exp(0.5))
            for key, value in zip(keys, values, strict=True):
                state = merge_and_reduce(state, key, value, halve)
            found.append(float((estimate(state, query, 0.5) - exact).square().sum()))
        errors[batch] = math.sqrt(sum(found) / streams)
    assert errors[32] / errors[128] > 2.5
    held = [len(level.keys) for level in state.levels if level is not None]
    drawn = []
    for seed in range(streams):
        chosen = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: sum(held)]
        sampled = count / sum(held) * (torch.exp(keys[chosen] @ query * 0.5) @ values[chosen])
        drawn.append(float((sampled - exact).square().sum()))
    assert errors[128] < math.sqrt(sum(drawn) / streams)


def test_the_constant_is_that_of_the_paper():
    assert constant(100, 0.01) == pytest.approx(30 * math.log(10_000))


def test_a_level_that_was_halved_down_to_nothing_can_be_halved():
    """One token's smaller class is none, and that is what comes to the next level."""

    def halve(tokens):
        walk = softmax_balance(tokens.keys, tokens.values, 1.0, 1.0, 0.1, draws(len(tokens.keys)), 0.5)
        return tokens.choose(walk.smaller)

    state = no_levels(1, 3)
    for key in unit(normal(8, 2)):
        state = merge_and_reduce(state, key, key, halve)
    assert sum(len(level.keys) for level in state.levels if level is not None) == 0
