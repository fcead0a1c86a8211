"""Random numbers by address, and uniform sampling: one head, and all heads at once."""

import math

import pytest
import torch

from kvsketch.algorithms.draws import uniforms
from kvsketch.algorithms.sampling import Plan, choose_slots, empty_sample, log_weights, offer_token

PLANS = [
    Plan(slots=8),
    Plan(slots=8, first=20, period=12),
    Plan(slots=4, first=4, period=4),
    Plan(slots=8, first=100, period=16),
]


def sample_of(plan, count, seed, head=0):
    sample = empty_sample(plan, torch.zeros(1), torch.zeros(1))
    for rank in range(count):
        token = torch.tensor([float(rank)])
        sample = offer_token(sample, token, token, uniforms(seed, 0, head, rank))
    return sample


def test_draws_are_uniform():
    count = 200_000
    drawn = uniforms(3, 1, torch.arange(20)[:, None], torch.arange(count // 20))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = torch.histc(drawn, bins=50, min=0, max=1)
    expected = count / 50
    standard_error = math.sqrt(expected * (1 - 1 / 50))
    assert (counts - expected).abs().max() < 4.5 * standard_error  # the largest of 50 bins
    assert abs(drawn.mean() - 0.5) < 4 / math.sqrt(12 * count)


@pytest.mark.parametrize("axis", [0, 1], ids=["between heads", "between tokens"])
def test_neighbouring_addresses_are_uncorrelated(axis):
    drawn = uniforms(0, 0, torch.arange(300)[:, None], torch.arange(300)) - 0.5
    here, there = drawn.narrow(axis, 0, 299), drawn.narrow(axis, 1, 299)
    correlation = (here * there).mean() * 12
    assert abs(correlation) < 4 / math.sqrt(here.numel())


def test_draws_differ_in_every_part_of_the_address():
    base = uniforms(1, 2, 3, torch.arange(100))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3)):
        assert (uniforms(*other, torch.arange(100)) != base).all()


def test_draws_are_a_function_of_the_address_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    together = uniforms(7, 0, torch.arange(4)[:, None], torch.arange(64))
    apart = torch.stack(
        [torch.cat([uniforms(7, 0, head, torch.arange(s, s + 16)) for s in range(0, 64, 16)]) for head in range(4)]
    )
    assert torch.equal(together, apart)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("count", [1, 7, 8, 9, 20, 33, 120])
def test_all_heads_at_once_hold_what_one_head_holds(plan, count):
    heads = torch.arange(3)
    drawn = uniforms(11, 0, heads[:, None], torch.arange(count))
    slots = choose_slots(plan, torch.arange(count).expand(3, -1), drawn)
    for head in range(3):
        held = torch.full((plan.slots_for(count),), -1.0)
        for rank in range(count):
            if slots[head, rank] >= 0:
                held[slots[head, rank]] = rank
        sample = sample_of(plan, count, seed=11, head=head)
        assert torch.equal(held, sample.keys[:, 0])
        assert torch.equal(log_weights(plan, torch.tensor(count), len(held)), sample.log_weights)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_weights_sum_to_the_number_of_tokens(plan):
    for count in (1, 5, 8, 21, 40, 77, 200):
        weights = log_weights(plan, torch.tensor(count), plan.slots_for(count)).exp()
        torch.testing.assert_close(weights.sum(), torch.tensor(float(count)))
        assert len(weights) == plan.slots_for(count)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_token_is_worth_one_on_average(plan):
    """Both sums of attention are linear in the tokens, so this makes both estimates unbiased."""
    count, trials = 60, 20_000
    drawn = uniforms(torch.arange(trials)[:, None], 0, 0, torch.arange(count))
    slots = choose_slots(plan, torch.arange(count).expand(trials, -1), drawn)
    held = torch.full((trials, plan.slots_for(count) + 1), -1)
    for rank in range(count):  # in order: a later token overwrites an earlier one
        held.scatter_(1, slots[:, rank : rank + 1].where(slots[:, rank : rank + 1] >= 0, plan.slots_for(count)), rank)
    held = held[:, :-1]
    weights = log_weights(plan, torch.tensor(count), held.shape[1]).exp()
    worth = torch.zeros(count).index_add_(0, held.flatten(), weights.expand_as(held).flatten()) / trials
    rate = torch.zeros(count).index_add_(0, held.flatten(), torch.ones(held.numel())) / trials
    # A token is held with probability p = 1/w and is then worth w: variance w - 1.
    weight_of = worth / rate.clamp_min(1e-9)
    standard_error = ((weight_of - 1).clamp_min(0) / trials).sqrt()
    assert ((worth - 1).abs() <= 4 * standard_error + 1e-6).all()


def test_a_fixed_reservoir_is_a_simple_random_sample():
    """Every pair of tokens is held together equally often, as in sampling without replacement."""
    count, m, trials = 10, 4, 30_000
    plan = Plan(slots=m)
    drawn = uniforms(torch.arange(trials)[:, None], 5, 0, torch.arange(count))
    slots = choose_slots(plan, torch.arange(count).expand(trials, -1), drawn)
    held = torch.full((trials, m + 1), -1)
    for rank in range(count):
        held.scatter_(1, slots[:, rank : rank + 1].where(slots[:, rank : rank + 1] >= 0, m), rank)
    there = torch.zeros(trials, count).scatter_(1, held[:, :m], 1.0)
    together = (there.T @ there) / trials
    expected = m * (m - 1) / (count * (count - 1))
    standard_error = math.sqrt(expected * (1 - expected) / trials)
    pairs = together[~torch.eye(count, dtype=torch.bool)]
    assert (pairs - expected).abs().max() < 4 * standard_error


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.3, 0.5, 1.0])
def test_a_plan_for_a_fraction_stays_within_it(fraction):
    from kvsketch.caches.core.budget import Budget
    from kvsketch.caches.core.config import BLOCK
    from kvsketch.caches.forgetting.uniform import Uniform

    config = Uniform(keep=fraction)
    plan = config.plan(Budget(fraction, None, config.least_entries()))
    exact = config.sinks + config.window
    for count in range(1, 5000, 37):
        held = plan.slots_for(count) + exact
        assert held <= max(fraction * (count + exact), config.least_entries()) + BLOCK
        assert held >= min(count + exact, fraction * (count + exact)) - BLOCK
