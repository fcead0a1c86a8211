"""Means of what is dropped (`residual=`): written plainly from the definition, and what they are good for."""

import pytest
import torch

import kvsketch
import zoo
from drawn import normal
from kvsketch.attention import exact_attention
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens
from kvsketch.caches.registry import parse_spec
from lanes import entries_of
from test_keydiff import plainly

HEADS, GROUP, WIDTH, SCALE = 2, 3, 8, 0.7
CALLS = [300, *[1] * 20, 90, *[1] * 9]


def text(count, rows=1):
    """Queries, keys and values."""
    heads = (HEADS * GROUP, HEADS, HEADS)
    return [normal(rows, n, count, WIDTH, seed=seed) for seed, n in enumerate(heads)]


def feed(cache, query, keys, values, calls):
    """Read the text in calls of these sizes; the cache after each."""
    start = 0
    for size in calls:
        part = slice(start, start + size)
        cache.read(query[:, :, part], NewTokens(keys[:, :, part], values[:, :, part]), SCALE)
        start += size
        yield cache


def stands(cache):
    """For how many tokens each entry of the past stands, head by head."""
    entries = entries_of(cache.past)
    return torch.ones(entries.keys.shape[:3]) if entries.log_mass is None else entries.log_mass.exp()


@pytest.mark.parametrize(("keep", "residual"), [(0.25, 0.1), (80, 0.5)])
def test_entries_are_those_of_the_definition(keep, residual):
    config = parse_spec(f"keydiff(keep={keep}, residual={residual})")
    query, keys, values = text(sum(CALLS))
    *_, cache = feed(LayerCache(config, 0), query, keys, values, CALLS)
    entries, weights = entries_of(cache.past), stands(cache)
    for head in range(HEADS):
        held, runs = plainly(keys[0, head], CALLS, config, cache.budgets[0])
        assert len(runs) > 2
        assert torch.equal(entries.keys[0, head, : len(held)], keys[0, head, held])
        for x, found in ((keys, entries.keys), (values, entries.values)):
            means = torch.stack([x[0, head, run].double().mean(0) for run in runs])
            torch.testing.assert_close(found[0, head, len(held) :], means.float(), rtol=1e-5, atol=1e-6)
        expected = torch.tensor([1.0] * len(held) + [len(run) for run in runs])
        torch.testing.assert_close(weights[0, head], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["keydiff", "snapkv", "h2o", "kvzip"])
def test_every_token_is_held_or_in_a_mean_at_any_time(name):
    for keep in (0.125, 60):
        config = parse_spec(f"{name}(keep={keep}, heads='equal', window=16, residual=0.1)")
        for cache in feed(LayerCache(config, 0), *text(sum(CALLS)), CALLS):
            room, left = config.room(cache.budgets[0], cache.left[0]), cache.left[0]
            counts = cache.past.count_entries()
            assert bool((counts <= room).all())
            if left:
                torch.testing.assert_close(stands(cache).sum(2), torch.full((1, HEADS), float(left)), rtol=1e-5, atol=0)
            if left > room + 10:
                assert bool((counts == room).all()), "and there is no idle room"


@pytest.mark.parametrize("name", ["keydiff", "kvzip"])
def test_a_room_that_grows_past_the_tokens_does_not_bring_back_what_is_in_a_mean(name):
    """Nine tenths of a budget of .6 for one head are more than all tokens, once what all heads hold is little of it."""
    config = parse_spec(f"{name}(keep=0.6, heads='pyramid', window=16, residual=0.1)")
    calls = [150, *[1] * 100]
    for cache in feed(LayerCache(config, 0, shares=lambda *_: [1.9, 0.1]), *text(sum(calls)), calls):
        large = cache.past.bundles[0]
        kept, means = large.holding.entries(), large.holding.per_lane["tokens"]
        assert kept.count - means.shape[1] + float(means.sum()) == cache.left[0]
    assert config.room(large.budget, cache.left[0]) > cache.left[0] > kept.count


def test_what_nobody_looks_at_in_particular_is_not_lost():
    """Keys that are all much alike share the attention: without them an answer is that of a few."""
    query, values = text(2000)[0], 1 + text(2000)[2]
    keys = 0.2 * normal(1, HEADS, 2000, WIDTH, seed=1)
    exact = exact_attention(query[:, :, -50:], keys, values, SCALE).out
    errors = {}
    for residual in (0, 0.1):
        cache = LayerCache(parse_spec(f"keydiff(keep=0.125, residual={residual})"), 0)
        cache.hold(NewTokens(keys, values))
        errors[residual] = float((cache.attend(query[:, :, -50:], SCALE).out - exact).norm() / exact.norm())
    assert errors[0.1] < 0.25 * errors[0]


def test_a_prompt_that_shares_the_room_itself_shares_that_of_the_means():
    model, ids = zoo.build("llama", layers=3), zoo.tokens(1, 300)
    cache = kvsketch.prefill(model, ids, kvsketch.make_cache(model, "kvzip(keep=0.25, residual=0.1)"))
    lanes, config = [], cache.config
    for layer in cache.sketch_layers:
        for bundle in layer.held.past.bundles:
            room = config.room(bundle.budget, 280)
            means = bundle.holding.per_lane["tokens"]
            assert means.shape[1] == max(1, int(0.1 * room))
            kept = bundle.holding.count_entries() - means.shape[1]
            torch.testing.assert_close(means.sum(1) + kept, torch.full((bundle.lanes,), 280.0), rtol=0, atol=0)
            lanes += [(room, bundle.holding.count_entries())] * bundle.lanes
    assert len({room for room, _ in lanes}) > 2, "heads hold different numbers"
    assert all(count == room for room, count in lanes)
    mean = config.room(layer.held.budgets[0], 280)
    assert len(lanes) * mean * 0.97 < sum(count for _, count in lanes) <= len(lanes) * mean
