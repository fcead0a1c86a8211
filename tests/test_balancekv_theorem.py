"""BalanceKV's cache in the form of the theorem: buckets, two sets, failures; equal to the one-head algorithm."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import normal
from kvsketch.algorithms.balancekv import bucket_of, softmax_balance
from kvsketch.algorithms.draws import uniforms
from kvsketch.attention import exact_attention
from kvsketch.caches.core.config import BLOCK
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.query import Query
from kvsketch.caches.core.tokens import NewTokens
from kvsketch.caches.forgetting.balancekv import BalanceKV
from kvsketch.caches.forgetting.balancekv.batches import (
    DENOMINATOR,
    GONE,
    NUMERATOR,
    RETRIES,
    Theorem,
    halve,
    next_batches,
    random_half,
)
from kvsketch.caches.forgetting.balancekv.levels import fitting
from kvsketch.caches.forgetting.balancekv.theorem import TheoremHolding
from kvsketch.kernels.balanced_walk import keep_smaller, reference
from kvsketch.kernels.weighted_attention import weighted_attention
from lanes import arriving

FAITHFUL = Theorem(block=64, constant=30, failure=0.01, epsilon=0.1, seed=3, layer=5)


def draws(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def real_of(sizes, width):
    return torch.arange(width) < torch.tensor(sizes)[:, None]


def walk_of(keys, values, uniforms, scale, constant=30.0):
    """Algorithm 2 on one block, with c = constant · log(n/δ) and δ chosen so that its own factor is 30."""
    failure = len(keys) * (len(keys) / FAITHFUL.failure) ** (-constant / 30)
    radii = (float(x.float().norm(dim=1).max()) for x in (keys, values))
    return softmax_balance(keys.double(), values.double(), *radii, failure, uniforms, scale)


# -- the walk over many blocks


@pytest.mark.parametrize("constant", [30.0, 0.3, 0.004])
def test_blocks_of_any_size_have_the_signs_of_the_one_head_algorithm(constant):
    sizes, width, scale = [64, 1, 17, 40], 64, 0.5
    keys, values, numbers = normal(4, width, 4), normal(4, width, 3, seed=1), draws(4, width)
    real = real_of(sizes, width)
    bounds = constant * torch.log(torch.tensor(sizes) / FAITHFUL.failure)
    products = reference.bounded_products(keys, values, real, scale)
    assert products.abs().max() <= 1 + 1e-6
    signs, failed = reference.bounded_signs(products, bounds, numbers, real)
    kept, failed_too = keep_smaller(keys, values, real, numbers, scale, bounds)
    assert torch.equal(failed, failed_too)
    for block, size in enumerate(sizes):
        walk = walk_of(keys[block, :size], values[block, :size], numbers[block, :size], scale, constant)
        assert torch.equal(signs[block, :size].double(), walk.signs)
        assert bool(failed[block]) == (walk.failed_at is not None)
        assert torch.equal(kept[block, :size], walk.smaller)
        assert not signs[block, size:].any()
        assert not kept[block, size:].any()


def test_a_narrow_strip_is_left_by_some_walks():
    """The case above must have seen failures, or it compares nothing but successes."""
    keys, values, numbers = normal(50, 64, 4), normal(50, 64, 3, seed=1), draws(50, 64)
    real = torch.ones(50, 64, dtype=torch.bool)
    _, failed = keep_smaller(keys, values, real, numbers, 0.5, torch.full((50,), 0.05))
    assert 0 < failed.sum() < 50


@pytest.mark.parametrize("size", [1e-6, 1e3, 1e15])
def test_products_are_finite_whatever_the_norms(size):
    keys, values = normal(2, 8, 4) * size, normal(2, 8, 4) * size
    found = reference.bounded_products(keys, values, torch.ones(2, 8, dtype=torch.bool), 1.0)
    assert found.isfinite().all()
    assert found.abs().max() <= 1 + 1e-6


# -- failures


def numbers_of(batches, width, seed=0):
    """A `draw` as `halve` wants it, and all it gave."""
    given_out = {}

    def draw(which, attempt):
        found = draws(batches, width, seed=seed + 1000 * attempt)[which]
        given_out[attempt] = found
        return found

    return draw, given_out


def theorem(**changed):
    return Theorem(**(vars(FAITHFUL) | changed))


def test_a_walk_that_succeeds_is_taken_as_it_is():
    keys, values, real = normal(3, 64, 4), normal(3, 64, 4, seed=1), real_of([64, 33, 50], 64)
    draw, given_out = numbers_of(3, 64)
    halved = halve(keys, values, real, draw, 0.5, FAITHFUL)
    bounds = 30 * torch.log(real.sum(1) / FAITHFUL.failure)
    assert torch.equal(halved.kept, keep_smaller(keys, values, real, given_out[0], 0.5, bounds)[0])
    assert halved.failed.tolist() == halved.tossed.tolist() == [0, 0, 0]


def test_a_walk_that_fails_begins_again_with_fresh_numbers():
    """A strip so narrow that about half of the walks fail: later attempts succeed with their own numbers."""
    batches, constant = 200, 0.003
    keys, values, real = normal(batches, 32, 4), normal(batches, 32, 4, seed=1), torch.ones(batches, 32).bool()
    draw, _ = numbers_of(batches, 32)
    halved = halve(keys, values, real, draw, 0.5, theorem(constant=constant))
    bounds = constant * torch.log(real.sum(1) / FAITHFUL.failure)
    expected_failures = torch.zeros(batches, dtype=torch.int64)
    open_ = torch.ones(batches, dtype=torch.bool)
    for attempt in range(1 + RETRIES):
        kept, failed = keep_smaller(keys, values, real, draw(torch.arange(batches), attempt), 0.5, bounds)
        done = open_ & ~failed
        assert torch.equal(halved.kept[done], kept[done])
        expected_failures += open_ & failed
        open_ &= failed
    assert torch.equal(halved.failed, expected_failures)
    assert torch.equal(halved.tossed.bool(), open_)
    assert 0 < open_.sum() < batches, "some fail every time, some do not"


def test_where_all_walks_fail_every_token_is_kept_as_often_as_not():
    """2,000 batches of 33 tokens: frequencies within 4.5 standard errors of 1/2, and 16 or 17 kept in each."""
    batches, size = 2000, 33
    keys, values = torch.ones(batches, size, 2), torch.ones(batches, size, 2)
    draw, _ = numbers_of(batches, size)
    halved = halve(keys, values, torch.ones(batches, size).bool(), draw, 0.5, theorem(constant=1e-9))
    assert halved.failed.eq(1 + RETRIES).all()
    assert halved.tossed.eq(1).all()
    assert set(halved.kept.sum(1).tolist()) == {16, 17}
    assert ((halved.kept.double().mean(0) - 0.5).abs() < 4.5 * 0.5 / math.sqrt(batches)).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 33), min_size=1, max_size=6))
def test_a_random_half_is_half_of_what_is_real(seed, sizes):
    real = real_of(sizes, 33)
    kept = random_half(draws(len(sizes), 33, seed=seed), real)
    assert not (kept & ~real).any()
    for size, count in zip(sizes, kept.sum(1).tolist(), strict=True):
        assert size // 2 <= count <= -(-size // 2)


@pytest.mark.parametrize("size", [1, 2, 7, 31])
def test_few_tokens_are_halved_by_coins(size):
    """The smaller half of so few would have far too little mass; 4,000 batches, 4.5 standard errors."""
    draw, _ = numbers_of(4000, size)
    keys, values = normal(4000, size, 2), normal(4000, size, 2, seed=1)
    halved = halve(keys, values, torch.ones(4000, size).bool(), draw, 0.5, FAITHFUL)
    assert ((halved.kept.double().mean(0) - 0.5).abs() < 4.5 * 0.5 / math.sqrt(4000)).all()
    assert halved.tossed.eq(1).all()
    assert halved.failed.eq(0).all()


# -- what is halved next


def test_full_batches_of_the_lowest_level_come_first_and_the_oldest_of_them():
    levels = torch.tensor([[1, 1, 0, 0, 0, 0, GONE, 0], [1, 1, 0, 0, 0, 0, 0, 0]], dtype=torch.int8)
    buckets = torch.zeros(2, 8)
    found = next_batches(levels, buckets, 2, excess=2)
    assert [(which, places.tolist()) for which, places in found] == [(DENOMINATOR, [2, 3]), (NUMERATOR, [2, 3])]


def test_buckets_are_never_mixed():
    levels = torch.zeros(2, 8, dtype=torch.int8)
    buckets = torch.stack([torch.zeros(8), torch.tensor([0.0, 3, 0, 3, 0, 3, 0, 3])])
    found = next_batches(levels, buckets, 4, excess=6)
    assert [(which, places.tolist()) for which, places in found] == [
        (DENOMINATOR, [0, 1, 2, 3]), (NUMERATOR, [0, 2, 4, 6]), (DENOMINATOR, [4, 5, 6, 7])
    ]  # fmt: skip


def test_where_no_batch_is_full_the_largest_is_halved():
    levels = torch.tensor([[0, 0, 1, 1, 1], [GONE, 0, 1, GONE, 1]], dtype=torch.int8)
    found = next_batches(levels, torch.zeros(2, 5), 32, excess=1)
    assert [(which, places.tolist()) for which, places in found] == [(DENOMINATOR, [2, 3, 4])]


def test_small_rooms_have_small_batches():
    assert [fitting(256, room) for room in (33, 300, 600, 5000)] == [32, 32, 64, 256]


# -- what lanes hold


def holding_of(keys, values, room, theorem=FAITHFUL):
    """What lanes hold of tokens [b, h, n, ·] with room for so many."""
    holding = TheoremHolding(theorem, lambda seen: room)
    holding.write(arriving(keys, values))
    return holding


def uneven(count, rows=1, heads=2, seed=0):
    """Values of several sizes, some of them zero."""
    keys, values = normal(rows, heads, count, 8, seed=seed), normal(rows, heads, count, 4, seed=seed + 1)
    sizes = 2.0 ** torch.randint(-3, 3, (rows, heads, count, 1), generator=torch.Generator().manual_seed(seed))
    values = values * sizes
    values[:, :, 5::10] = 0.0
    return keys, values


def step_by_step(keys, values, room, head):
    """One head, by `softmax_balance` and `bucket_of`: which levels each token has in the two sets."""
    count = len(keys)
    buckets = [bucket_of(value) for value in values]
    levels = torch.zeros(2, count, dtype=torch.int8)
    levels[NUMERATOR, [i for i in range(count) if buckets[i] is None]] = GONE
    marks = torch.tensor([[0.0] * count, [-math.inf if bucket is None else bucket for bucket in buckets]])
    used = 0
    while (excess := int((levels > GONE).any(0).sum()) - room) > 0:
        for which, places in next_batches(levels, marks, fitting(FAITHFUL.block, room), excess):
            taken = values[places] if which == NUMERATOR else torch.ones(len(places), 1)
            numbers = uniforms(FAITHFUL.seed, FAITHFUL.layer, head, used + torch.arange(len(places)), 0)
            used += len(places)
            if len(places) < BLOCK:
                coins = uniforms(FAITHFUL.seed, FAITHFUL.layer, head, used - len(places) + torch.arange(len(places)), 4)
                kept = random_half(coins[None], torch.ones(1, len(places), dtype=torch.bool))[0]
            else:
                walk = walk_of(keys[places], taken, numbers, keys.shape[1] ** -0.5)
                assert walk.failed_at is None
                kept = walk.smaller
            levels[which, places] = torch.where(kept, levels[which, places] + 1, GONE).to(torch.int8)
    return levels


def test_all_rows_and_heads_together_hold_what_the_one_head_algorithm_holds():
    room, count = 200, 700
    keys, values = uneven(count, rows=2)
    sets = holding_of(keys, values, room).sets
    for row in range(2):
        for head in range(2):
            levels = step_by_step(keys[row, head], values[row, head], room, head)
            there = (levels > GONE).any(0)
            held = int(there.sum())
            assert 0.7 * room < held <= room
            lane = 2 * row + head
            assert torch.equal(sets.levels[lane, :, :held], levels[:, there])
            assert torch.equal(sets.keys[lane, :held], keys[row, head, there])
            assert (sets.levels[lane, :, held:] == GONE).all()
    assert levels.max() >= 2, "some were halved twice"


def test_weights_are_two_to_the_level_and_what_is_in_no_set_is_gone():
    keys, values = uneven(600)
    holding = holding_of(keys, values, 250)
    held, sets = holding.tokens(), holding.sets
    for weights, level in (
        (held.log_mass[0], sets.levels[:, DENOMINATOR]),
        (held.log_value[0], sets.levels[:, NUMERATOR]),
    ):
        expected = torch.where(level == GONE, 0.0, 2.0 ** level.float())
        torch.testing.assert_close(weights.exp(), expected)
    zero = (held.values == 0).all(3) & sets.held
    assert zero.any(), "some of the tokens without a value are still below"
    assert (held.log_value[zero] == -math.inf).all()


def test_the_mass_of_the_denominator_is_that_of_all_tokens_less_what_the_smaller_half_loses():
    """A batch of n loses about √(2/(πn)) of its mass, because the smaller class is kept: 64 tokens a tenth, each time.

    Two or three times here, and small batches at the end lose more.
    """
    keys, values = uneven(4000, heads=8)
    mass = holding_of(keys, values, 1200).tokens().log_mass.exp().sum(2)
    assert (mass < 4000).all()
    assert (mass > 0.6 * 4000).all()


def test_buckets_of_tiny_values_are_erased_once_a_large_one_has_come():
    keys = 0.1 * normal(1, 1, 40, 8)
    values = normal(1, 1, 40, 4)
    values[:, :, :20] *= 1e-6
    holding = holding_of(keys[:, :, :20], values[:, :, :20], 100, theorem(epsilon=0.5))
    assert (holding.sets.levels[:, NUMERATOR] == 0).all(), "all are alike so far"
    holding.write(arriving(keys[:, :, 20:], values[:, :, 20:], before=20))
    assert (holding.sets.levels[0, NUMERATOR, :20] == GONE).all()
    assert (holding.sets.levels[0, NUMERATOR, 20:] == 0).all()
    assert (holding.sets.levels[0, DENOMINATOR] == 0).all(), "their keys still count below"


def test_an_erased_bucket_is_that_of_line_8():
    """2^i ≤ ε/(2n) · exp(-r²·scale) · v_max, to the bucket."""
    keys, count = 0.5 * normal(1, 1, 30, 8), 30
    values = torch.zeros(1, 1, count, 1)
    values[0, 0, :, 0] = 2.0 ** torch.arange(0, -count, -1)
    sets = holding_of(keys, values, 100).sets
    r = float(keys.norm(dim=3).max())
    least = FAITHFUL.epsilon / (2 * count) * math.exp(-(r**2) * 8**-0.5)
    kept = [2.0**i > least for i in range(0, -count, -1)]
    assert 5 < sum(kept) < 25
    assert (sets.levels[0, NUMERATOR] > GONE).tolist() == [*sorted(kept, reverse=True)]


def relative_error(keep, seed, **options):
    keys, values = normal(1, 2, 3000, 8, seed=seed) / 2, 1 + normal(1, 2, 3000, 4, seed=seed + 1)
    query = normal(1, 2, 32, 8, seed=seed + 2)
    cache = LayerCache(BalanceKV(keep=keep, mode="faithful", seed=seed, **options), 0)
    cache.hold(NewTokens(keys, values))
    exact = exact_attention(query, keys, values, 8**-0.5).out
    return float((cache.attend(query, 8**-0.5).out - exact).norm() / exact.norm())


@pytest.mark.slow
def test_the_error_falls_with_the_budget():
    """Eight times the budget: at least half the error, on the mean of 8 streams; and it is small at last."""
    errors = {keep: sum(relative_error(keep, seed) for seed in range(8)) / 8 for keep in (0.1, 0.8)}
    assert errors[0.8] < errors[0.1] / 2
    assert errors[0.8] < 0.05


def test_failures_are_counted_among_the_details():
    keys, values = normal(1, 2, 600, 8), normal(1, 2, 600, 4, seed=1)
    details = {}
    for constant in (1e-6, 30):
        cache = LayerCache(BalanceKV(keep=0.25, mode="faithful", constant=constant), 0)
        cache.hold(NewTokens(keys, values))
        details[constant] = cache.past.details()
    assert 0 < details[1e-6]["failed walks"] <= (1 + RETRIES) * details[1e-6]["halved by coins"]
    assert details[30]["failed walks"] == 0
    assert details[30]["halved by coins"] < details[1e-6]["halved by coins"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("softcap", [None, 50.0])
def test_answers_are_numbers_and_no_longer_than_the_longest_value(dtype, softcap):
    """Keys so long that one of them has all the mass, and may be in one set only; 20 streams of two lengths."""
    exploding = 0
    for seed in range(20):
        size = (4, 40)[seed % 2]
        keys, values = size * normal(1, 2, 600, 8, seed=seed), normal(1, 2, 600, 4, seed=seed + 1)
        holding = holding_of(keys.to(dtype), values.to(dtype), 150)
        query = size * normal(1, 4, 64, 8, seed=seed + 2).to(dtype)
        longest = values.norm(dim=3).amax(2).repeat_interleave(2, 1)[..., None]
        got = holding.answer(Query(query, 8**-0.5, softcap), None).attended.out
        assert (got.float().norm(dim=3) <= longest * 1.02).all()
        tokens = holding.tokens()
        if dtype == torch.float16:  # it has no numbers for some of them
            query, tokens = query.float(), replace(tokens, keys=tokens.keys.float(), values=tokens.values.float())
        bare = weighted_attention(query, tokens, 8**-0.5, softcap=softcap).out
        assert bare.isfinite().all()
        exploding += int((bare.abs().amax(3) > 10 * longest).sum())
    assert exploding > 0, "the bound must have been needed"


def test_keys_too_long_for_the_theorem_are_warned_of():
    """2r²·scale = log(block) is where the theorem stops to say anything: 64 tokens at √8 · log(64) / 2 = r²."""
    radius = math.sqrt(8**0.5 * math.log(64) / 2)
    for factor, warns in ((0.99, False), (1.01, True)):
        keys = normal(1, 1, 50, 8)
        keys *= factor * radius / keys.norm(dim=3, keepdim=True)
        holding = TheoremHolding(FAITHFUL, lambda seen: 100)
        assert holding.warning() is None
        holding.write(arriving(keys, normal(1, 1, 50, 4)))
        assert (holding.warning() is not None) == warns
    assert 'use mode="practical"' in holding.warning()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "exact"}, "mode must be one of practical, faithful, got 'exact'"),
        ({"mode": "faithful", "walk": "fair"}, "walk is an option of mode='practical', and mode is 'faithful'"),
        ({"mode": "faithful", "augmented": False}, "augmented is an option of mode='practical'"),
        ({"constant": 3}, "constant is an option of mode='faithful', and mode is 'practical'"),
        ({"mode": "faithful", "constant": 0}, "constant must be a positive number, got 0"),
        ({"mode": "faithful", "failure": 1.0}, "failure must be a positive number below 1, got 1.0"),
        ({"mode": "faithful", "failure": -0.1}, "failure must be a positive number below 1, got -0.1"),
        ({"mode": "faithful", "epsilon": math.nan}, "epsilon must be a positive number, got nan"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        BalanceKV(**options)
