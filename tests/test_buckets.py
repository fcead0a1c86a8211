"""Buckets of all heads at once: the same as head by head."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import normal_doubles as normal
from kvsketch.algorithms import saap
from kvsketch.kernels import buckets


def starts(lanes, count, of, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(of, generator=generator)[:count] for _ in range(lanes)])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 20))
def test_all_heads_together_have_the_buckets_of_each_alone(seed, lanes, count):
    keys, start = normal(lanes, 60, 5, seed=seed), starts(lanes, count, 60, seed)
    centroids = buckets.spherical_k_means(keys, start, iterations=4)
    found = buckets.assign(keys, centroids)
    for lane in range(lanes):
        alone = saap.spherical_k_means(keys[lane], start[lane], iterations=4)
        torch.testing.assert_close(centroids[lane], alone)
        assert torch.equal(found[lane], saap.assign(keys[lane], alone))


def test_empty_buckets_begin_again_at_other_keys_in_every_head():
    """All start at one key, so that all buckets but one are empty; as head by head, and none is empty in the end."""
    keys, start = normal(3, 40, 4), torch.tensor([[7] * 6, list(range(6)), [0, 0, 1, 1, 2, 2]])
    centroids = buckets.spherical_k_means(keys, start, iterations=10)
    for lane in range(3):
        torch.testing.assert_close(centroids[lane], saap.spherical_k_means(keys[lane], start[lane], iterations=10))
    assert all(len(found.unique()) == 6 for found in buckets.assign(keys, centroids))


def test_many_keys_are_assigned_a_part_at_a_time(monkeypatch):
    keys, centroids = normal(2, 500, 8), normal(2, 7, 8, seed=1)
    expected = buckets.assign(keys, centroids)
    monkeypatch.setattr(buckets, "PRODUCTS_AT_ONCE", 100)
    assert torch.equal(buckets.assign(keys, centroids), expected)
    assert buckets.assign(keys[:, :0], centroids).shape == (2, 0)


def test_shares_are_those_of_capped_logits_where_a_model_caps_them():
    """A cap that hardly bends the logits against one that does: the shares of the logits after it."""
    queries, keys, at = 3 * normal(1, 4, 8), 3 * normal(1, 50, 8, seed=1), torch.arange(50)
    which, asked_at = torch.arange(50)[None] % 5, torch.tensor([20, 30, 40, 49])
    given = (which, 5, 1.0, asked_at, at, 5)
    capped = buckets.bucket_shares(queries, keys, *given, softcap=4.0)
    logits = (queries[0] @ keys[0].T / 4).tanh() * 4
    visible = saap.to_learn_from(asked_at, at, 5)
    attention = logits.masked_fill(~visible, -torch.inf).softmax(1)
    expected = torch.stack([attention[:, which[0] == bucket].sum(1) for bucket in range(5)], 1)
    torch.testing.assert_close(capped[0], expected)
    uncapped = buckets.bucket_shares(queries, keys, *given)
    assert not torch.allclose(capped, uncapped, atol=0.05)
    torch.testing.assert_close(buckets.bucket_shares(queries, keys, *given, softcap=1e6), uncapped)


@pytest.mark.parametrize("at_once", [1 << 24, 50])
def test_shares_of_all_heads_are_those_of_each_alone(at_once, monkeypatch):
    monkeypatch.setattr(buckets, "PRODUCTS_AT_ONCE", at_once)
    lanes, count = 3, 6
    queries, keys = 2 * normal(lanes, 9, 8), normal(lanes, 200, 8, seed=1)
    which = torch.randint(count, (lanes, 200), generator=torch.Generator().manual_seed(2))
    asked_at, at = torch.tensor([3, 20, 60, 61, 100, 150, 180, 199, 500]), torch.arange(200)
    shares = buckets.bucket_shares(queries, keys, which, count, 0.4, asked_at, at, farther_than=50)
    visible = saap.to_learn_from(asked_at, at, apart=50)
    for lane in range(lanes):
        alone = saap.bucket_shares(queries[lane], keys[lane], which[lane], count, 0.4, visible)
        torch.testing.assert_close(shares[lane], alone)
    assert (shares[:, :2] == 0).all(), "nothing is far enough from these"
    torch.testing.assert_close(shares[:, 2:].sum(2), torch.ones(lanes, 7, dtype=torch.float64))


@pytest.mark.parametrize("at_once", [1 << 24, 50])
def test_long_range_queries_of_all_heads_are_those_of_each_alone(at_once, monkeypatch):
    monkeypatch.setattr(buckets, "PRODUCTS_AT_ONCE", at_once)
    queries, keys = normal(3, 40, 8), normal(3, 200, 8, seed=1)
    asked_at, at = torch.arange(0, 200, 5), torch.arange(200)
    found = buckets.long_range(queries, keys, asked_at, at, farther_than=60)
    assert 0 < found.sum() < found.numel()
    for lane in range(3):
        assert torch.equal(found[lane], saap.long_range(queries[lane], keys[lane], asked_at, at, away=60))


def test_fewer_keys_than_buckets_are_refused():
    with pytest.raises(ValueError, match="8 buckets need at least as many keys, got 5"):
        buckets.spherical_k_means(normal(2, 5, 4), torch.zeros(2, 8, dtype=torch.int64))
