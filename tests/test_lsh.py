"""Hashing by random directions: numbers, Gray codes, bins, and how often vectors meet."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import normal_doubles as normal
from kvsketch.algorithms.lsh import equal_bins, gray_rank, kdeformer, magicpig, number_of, reformer, signs

DOUBLE = torch.float64


def bits_of(numbers, count):
    return (torch.as_tensor(numbers)[:, None] >> torch.arange(count)) & 1 == 1


@given(st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=20))
def test_a_number_is_its_bits(numbers):
    assert number_of(bits_of(numbers, 20)).tolist() == numbers


def test_gray_codes_in_order_differ_by_one_bit():
    """All 1,024 of ten bits: every rank once, and neighbours one bit apart."""
    bits = bits_of(range(1024), 10)
    ranks = gray_rank(bits)
    assert sorted(ranks.tolist()) == list(range(1024))
    in_order = bits[ranks.argsort()]
    assert ((in_order[1:] != in_order[:-1]).sum(1) == 1).all()


def test_sixty_two_bits_have_ranks_that_do_not_overflow():
    bits = torch.ones(1, 62, dtype=torch.bool)
    assert 0 <= int(gray_rank(bits)) < 2**62
    with pytest.raises(ValueError, match="at most 62 bits, got 63 directions"):
        kdeformer(normal(1, 4), normal(5, 4), normal(63, 4), 2)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 8))
def test_bins_are_equal_and_every_query_visits_one(seed, count, bins):
    generator = torch.Generator().manual_seed(seed)
    keys_at = torch.randint(0, 20, (count,), generator=generator)
    queries_at = torch.randint(-2, 25, (9,), generator=generator)
    seen = equal_bins(keys_at, queries_at, bins)
    for row in seen:
        assert count // bins <= row.sum() <= -(-count // bins) or (count < bins and row.sum() == 1)


def test_keys_of_a_bin_are_neighbours_in_order():
    keys_at = torch.tensor([5, 1, 9, 3, 7, 2])
    seen = equal_bins(keys_at, torch.tensor([0, 3, 4, 100]), bins=3)
    assert [keys_at[row].sort().values.tolist() for row in seen] == [[1, 2], [3, 5], [3, 5], [7, 9]]


@pytest.mark.parametrize("method", [kdeformer, reformer])
def test_a_query_like_a_key_falls_into_its_bin(method):
    """But where several keys have its number, and a border goes through them."""
    keys, directions = normal(200, 16), normal(40, 16, seed=1)
    seen = method(keys, keys, directions, 10)
    assert seen.diagonal().double().mean() > 0.7
    assert (seen.sum(1) == 20).all()
    assert method(keys, keys, directions, 1).all(), "one bin is full attention"


def test_vectors_share_a_sign_in_proportion_to_their_angle():
    """SimHash: probability 1 - θ/π; 20,000 directions, four standard errors."""
    for angle in (0.3, 1.2, 2.5):
        x = torch.tensor([[1.0, 0.0]], dtype=DOUBLE)
        y = torch.tensor([[math.cos(angle), math.sin(angle)]], dtype=DOUBLE)
        directions = normal(20_000, 2)
        same = (signs(x, directions) == signs(y, directions)).double().mean()
        expected = 1 - angle / math.pi
        assert abs(float(same) - expected) < 4 * math.sqrt(expected * (1 - expected) / 20_000)


def test_two_collisions_are_as_frequent_as_tables_and_bits_say():
    """1 - (1-p)^t - t·p·(1-p)^(t-1), p = (1 - θ/π)^r; 4,000 pairs at one angle, four standard errors."""
    angle, tables, bits, pairs = 0.6, 6, 4, 4000
    x = torch.tensor([[1.0, 0.0]], dtype=DOUBLE)
    y = torch.tensor([[math.cos(angle), math.sin(angle)]], dtype=DOUBLE)
    met = [bool(magicpig(x, y, normal(tables, bits, 2, seed=seed))) for seed in range(pairs)]
    p = (1 - angle / math.pi) ** bits
    expected = 1 - (1 - p) ** tables - tables * p * (1 - p) ** (tables - 1)
    assert abs(sum(met) / pairs - expected) < 4 * math.sqrt(expected * (1 - expected) / pairs)


def test_more_tables_show_more_keys():
    queries, keys = normal(10, 16), normal(300, 16, seed=1)
    directions = normal(40, 6, 16, seed=2)
    shares = [float(magicpig(queries, keys, directions[:tables]).double().mean()) for tables in (2, 10, 40)]
    assert shares == sorted(shares)
    assert shares[0] < 0.05 < shares[2]
