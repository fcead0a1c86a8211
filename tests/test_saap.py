"""Saap, one head: buckets, what the classifier learns and from what, and the visit."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import normal_doubles as normal
from kvsketch.algorithms.saap import (
    QueryClassifier,
    assign,
    attend,
    bucket_shares,
    divergence,
    fold_normalization,
    long_range,
    selectivity,
    spherical_k_means,
    to_learn_from,
    visited,
)
from kvsketch.attention import exact_attention

DOUBLE = torch.float64


def drawn(count, of, seed=0):
    return torch.randperm(of, generator=torch.Generator().manual_seed(seed))[:count]


def fit_of(keys, centroids):
    """What spherical k-means makes large: ⟨k, c⟩ of every key with its own centroid."""
    return float((keys @ centroids.T).amax(1).sum())


# -- buckets


def test_directions_that_differ_become_buckets_whatever_the_lengths():
    """Five directions, keys of lengths from 1 to 100 around them; every bucket holds one direction."""
    directions = F.normalize(normal(5, 16), dim=1)
    which = torch.arange(200) % 5
    lengths = 10 ** (2 * torch.rand(200, 1, generator=torch.Generator().manual_seed(1), dtype=DOUBLE))
    keys = lengths * F.normalize(directions[which] + 0.1 * normal(200, 16, seed=2), dim=1)
    buckets = assign(keys, spherical_k_means(keys, torch.arange(5)))
    for direction in range(5):
        assert len(buckets[which == direction].unique()) == 1
    assert len(buckets.unique()) == 5


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_an_iteration_never_makes_the_fit_worse(seed, count):
    """Lloyd's argument on the sphere, as long as no bucket is empty."""
    keys, start = normal(100, 6, seed=seed), drawn(count, 100, seed)
    fits = [fit_of(keys, spherical_k_means(keys, start, iterations)) for iterations in range(5)]
    for iterations in range(4):
        buckets = assign(keys, spherical_k_means(keys, start, iterations))
        if len(buckets.unique()) == count:
            assert fits[iterations + 1] >= fits[iterations] - 1e-9


def test_centroids_have_length_one_and_none_is_left_without_a_key():
    keys = normal(60, 4).repeat(5, 1)  # every key five times: many starts fall on the same direction
    start = torch.arange(0, 300, 60).repeat(4)[:20]  # all on one key
    centroids = spherical_k_means(keys, start, iterations=10)
    torch.testing.assert_close(centroids.norm(dim=1), torch.ones(20, dtype=DOUBLE))
    assert len(assign(keys, centroids).unique()) > 15


def test_fewer_keys_than_buckets_are_refused():
    with pytest.raises(ValueError, match="8 buckets need at least as many keys, got 5"):
        spherical_k_means(normal(5, 4), torch.zeros(8, dtype=torch.int64))


# -- what is learnt


def test_shares_are_the_attention_of_every_bucket():
    queries, keys = normal(7, 8), normal(50, 8, seed=1)
    buckets = torch.arange(50) % 6
    visible = torch.rand(7, 50, generator=torch.Generator().manual_seed(2)) < 0.5
    shares = bucket_shares(queries, keys, buckets, 6, 0.3, visible)
    for q in range(7):
        weights = [math.exp(float(queries[q] @ keys[i]) * 0.3) if visible[q, i] else 0.0 for i in range(50)]
        expected = [sum(weights[i] for i in range(50) if i % 6 == c) / sum(weights) for c in range(6)]
        torch.testing.assert_close(shares[q], torch.tensor(expected, dtype=DOUBLE))


def test_a_query_that_sees_nothing_has_no_shares():
    shares = bucket_shares(normal(2, 4), normal(5, 4), torch.zeros(5, dtype=torch.int64), 3, 1.0, torch.eye(2, 5) > 0)
    torch.testing.assert_close(shares.sum(1), torch.ones(2, dtype=DOUBLE))
    nothing = bucket_shares(
        normal(2, 4), normal(5, 4), torch.zeros(5, dtype=torch.int64), 3, 1.0, torch.zeros(2, 5, dtype=torch.bool)
    )
    assert (nothing == 0).all()


def test_pairs_are_far_apart_and_no_sink_among_them():
    visible = to_learn_from(torch.tensor([10, 2048, 2049, 5000]), torch.tensor([0, 1, 2, 2952, 4999]))
    assert visible.tolist() == [
        [False] * 5,
        [False] * 5,  # the sink is far enough away, and left out
        [False, True, False, False, False],
        [False, True, True, True, False],
    ]


def test_long_range_queries_have_their_best_key_far_away():
    keys = torch.eye(4, dtype=DOUBLE)
    positions = torch.tensor([0, 1, 2000, 3000])
    queries = torch.stack([3 * keys[0] + keys[1], keys[2], keys[3] + keys[1], keys[1]])
    at = torch.tensor([3100, 3100, 3100, 1025])
    # The sink is left out: the first query's best key is at 1. The second's is 1,100 away, the third's two are tied
    # until a little more settles it, the fourth's is exactly 1,024 away.
    queries[2] = queries[2] + 0.1 * keys[3]
    assert long_range(queries, keys, at, positions).tolist() == [True, True, False, False]


def test_a_query_before_all_keys_is_not_long_range():
    assert not long_range(normal(1, 4), normal(3, 4), torch.tensor([5]), torch.tensor([10, 11, 12])).any()


# -- the classifier


def test_the_classifier_is_the_network_of_the_paper():
    """Section 6.1's two layers by torch, in evaluation mode, with averages and an affine part of their own."""
    network = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 6)
    ).double()
    layer, normalization, _, last = network
    with torch.no_grad():
        for seed, name in enumerate(("running_mean", "weight", "bias")):
            getattr(normalization, name).copy_(normal(16, seed=seed))
        normalization.running_var.copy_(normal(16, seed=3).square() + 0.1)
        folded = fold_normalization(
            layer.weight, layer.bias, normalization.running_mean, normalization.running_var, normalization.weight,
            normalization.bias, normalization.eps,
        )  # fmt: skip
        queries = normal(9, 8, seed=9)
        found = QueryClassifier(*folded, last.weight, last.bias).log_probabilities(queries)
        expected = torch.log_softmax(network.eval()(queries), 1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.exp().sum(1), torch.ones(9, dtype=DOUBLE))


def test_the_loss_is_least_where_the_probabilities_are_the_shares():
    shares = torch.softmax(normal(5, 6), 1)
    assert float(divergence(shares.log(), shares)) == pytest.approx(0.0, abs=1e-12)
    for seed in range(5):
        assert float(divergence(torch.log_softmax(normal(5, 6, seed=seed + 1), 1), shares)) > 0


# -- the visit


def test_a_group_visits_the_buckets_of_the_largest_sums():
    probabilities = torch.tensor([[0.5, 0.1, 0.3, 0.1], [0.0, 0.1, 0.4, 0.5]])
    assert visited(probabilities, 1).tolist() == [2]
    assert sorted(visited(probabilities, 3).tolist()) == [0, 2, 3]


def test_visiting_all_buckets_is_exact_attention():
    queries, keys, values = normal(4, 8), normal(60, 8, seed=1), normal(60, 5, seed=2)
    buckets = assign(keys, spherical_k_means(keys, drawn(7, 60)))
    found = attend(queries, keys, values, buckets, torch.arange(7), 0.4)
    expected = exact_attention(queries[None, :, None], keys[None, None], values[None, None], 0.4)
    torch.testing.assert_close(found.out, expected.out)
    torch.testing.assert_close(found.lse, expected.lse)
    assert selectivity(buckets, torch.arange(7)) == 1.0


def test_a_visit_reads_all_keys_of_its_buckets_and_no_others():
    queries, keys, values = normal(2, 8), normal(60, 8, seed=1), normal(60, 5, seed=2)
    buckets = torch.arange(60) % 10
    visit = torch.tensor([3, 7])
    found = attend(queries, keys, values, buckets, visit, 0.4)
    there = (buckets == 3) | (buckets == 7)
    expected = exact_attention(queries[None, :, None], keys[None, None, there], values[None, None, there], 0.4)
    torch.testing.assert_close(found.out, expected.out)
    assert selectivity(buckets, visit) == pytest.approx(0.2)


def test_the_best_buckets_hold_more_of_the_attention_than_any_others():
    """By the shares themselves, the classifier's aim: half of the mass in two of eight, never less than in others."""
    queries, keys = 2 * normal(20, 8), normal(400, 8, seed=1)
    buckets = assign(keys, spherical_k_means(keys, drawn(8, 400)))
    shares = bucket_shares(queries, keys, buckets, 8, 1.0, torch.ones(20, 400, dtype=torch.bool))
    best = torch.stack([share[visited(share[None], 2)].sum() for share in shares])
    assert (best >= shares.sort(dim=1).values[:, -2:].sum(1) - 1e-12).all()
    assert best.mean() > 0.5
