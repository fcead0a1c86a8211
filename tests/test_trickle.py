"""Calls of a few tokens: what they are told by, and what each method makes of them."""

import math

import pytest
import torch

from drawn import normal
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens
from kvsketch.caches.forgetting.balancekv import BalanceKV
from kvsketch.caches.forgetting.clustergen import ClusterGen, Clusters, _joined
from kvsketch.caches.forgetting.subgen import SubGen
from kvsketch.caches.forgetting.uniform import Uniform
from kvsketch.caches.registry import parse_spec
from kvsketch.kernels.pairs import cheapest_pairs
from lanes import entries_of


def fed(config, keys, values, call):
    cache = LayerCache(config, 0)
    for start in range(0, keys.shape[2], call):
        part = slice(start, start + call)
        cache.hold(NewTokens(keys[:, :, part], values[:, :, part]))
    return cache


@pytest.mark.parametrize(("call", "few"), [(1, False), (2, True), (32, True), (255, True), (256, False)])
def test_a_write_knows_how_many_tokens_pushed_it_out(call, few, monkeypatch):
    keys = normal(1, 1, 1024, 4)
    cache = LayerCache(Uniform(keep=200), 0)
    cache.hold(NewTokens(keys[:, :, :300], keys[:, :, :300]))
    seen = noted(cache, monkeypatch)
    for start in range(300, 812, call):
        cache.hold(NewTokens(keys[:, :, start : start + call], keys[:, :, start : start + call]))
    assert seen
    assert seen[0] == [few]


def noted(cache, monkeypatch):
    """What every write is told of each row's call."""
    seen, write = [], cache.past.write
    monkeypatch.setattr(cache.past, "write", lambda tokens, counts, few: (seen.append(few), write(tokens, counts, few)))
    return seen


def test_a_padded_row_is_told_by_its_own_tokens(monkeypatch):
    keys = normal(2, 1, 700, 4)
    valid = torch.ones(2, 700, dtype=torch.bool)
    valid[1, :500] = False
    cache = LayerCache(Uniform(keep=200), 0)
    cache._start(NewTokens(keys, keys, valid))
    seen = noted(cache, monkeypatch)
    cache.hold(NewTokens(keys, keys, valid))
    assert seen == [[False, True]]


@pytest.mark.parametrize("name", ["balancekv", "clustergen", "subgen"])
def test_rows_whose_calls_differ_are_as_if_alone(name):
    """The same number of tokens leaves both rows' windows, in a call that is short for one of them alone."""
    config = parse_spec(f"{name}(keep=200)")
    keys = normal(2, 2, 1000, 8)
    cache, valid = LayerCache(config, 0), torch.ones(2, 400, dtype=torch.bool)
    valid[1, :200] = False
    cache.hold(NewTokens(keys[:, :, :600], keys[:, :, :600]))
    cache.hold(NewTokens(keys[:, :, 600:], keys[:, :, 600:], valid))
    query = normal(2, 4, 3, 8, seed=5)
    got = cache.attend(query, 0.3).out
    for row, skipped in enumerate((0, 200)):
        alone = LayerCache(config, 0)
        for part in (slice(0, 600), slice(600 + skipped, 1000)):
            alone.hold(NewTokens(keys[row : row + 1, :, part], keys[row : row + 1, :, part]))
        torch.testing.assert_close(got[row : row + 1], alone.attend(query[row : row + 1], 0.3).out)


def test_joined_clusters_are_the_means_of_their_tokens():
    keys, values = normal(2, 3, 1500, 8), normal(2, 3, 1500, 4, seed=1)
    cache = fed(ClusterGen(keep=300, window=64, sinks=0), keys, values, 32)
    centres, count = cache.past.bundles[0].holding.entries(), cache.left[0]
    sizes, reach = centres.per_entry["sizes"], centres.per_entry["reach"]
    assert (sizes.sum(1) == count).all()
    for held, all_of_them in ((centres.keys, keys), (centres.values, values)):
        total = (held * sizes[..., None]).sum(1)
        torch.testing.assert_close(total, all_of_them.flatten(0, 1)[:, :count].sum(1), rtol=1e-3, atol=1e-2)
    near = torch.cdist(keys.flatten(0, 1)[:, :count], centres.keys).amin(2)
    assert (near.amax(1) <= reach.amax(1)).all(), "no token is farther from all than any may be"


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_keys_that_are_no_numbers_are_joined_last(wrong):
    """They cannot be refused where tokens come one by one; and what is joined must come to an end."""
    keys = torch.randn(2, 30, 4)
    keys[0, 7], keys[0, 20] = wrong, wrong
    sizes = torch.ones(2, 30, dtype=torch.int32)
    found = _joined(Clusters(keys, keys, sizes, torch.zeros(2, 30)), 5)
    assert found.sizes.sum(1).tolist() == [30, 30]
    assert found.keys.isfinite().all(2).sum(1).tolist() == [3, 5]
    found = _joined(Clusters(keys, keys, sizes, torch.zeros(2, 30)), 1)
    assert found.sizes.flatten().tolist() == [30, 30]


def test_equal_keys_are_joined_two_by_two():
    other, first = cheapest_pairs(torch.ones(1, 100, 4), torch.ones(1, 100).long(), torch.tensor([60]))
    assert int(first.sum()) == 49
    one = first[0].nonzero()[:, 0]
    assert len({*one.tolist(), *other[0, one].tolist()}) == 98, "nobody is in two pairs"


@pytest.mark.parametrize("keep", [0.25, 0.125, 512])
def test_balanced_weights_are_about_as_even_as_a_samples(keep):
    keys = normal(1, 1, 4000, 8)
    evenness = []
    for config in (BalanceKV(keep=keep, sharpness=1, augmented=False), Uniform(keep=keep)):
        weights = entries_of(fed(config, keys, keys, 32).past).log_mass.exp()
        evenness.append(float(weights.square().sum() / weights.sum()))
    assert evenness[0] < 1.2 * evenness[1]


def test_the_room_for_clusters_that_comes_later_is_used():
    keys = normal(1, 2, 4000, 16)
    holding = fed(SubGen(keep=0.25), keys, keys, 32).past.bundles[0].holding
    assert holding.clusters.number.min() > holding.clusters.sizes.shape[1] / 2
    given = fed(SubGen(keep=0.25, delta=4), keys, keys, 32).past.bundles[0].holding
    assert given.clusters.delta.min() >= 4
