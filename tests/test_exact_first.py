"""Rows that are held exactly and rows that are not, in one batch."""

import copy

import pytest
import torch

from kvsketch.attention import exact_attention
from kvsketch.caches.exact_first import HELD
from kvsketch.caches.layer import LayerCache, NewTokens
from kvsketch.caches.subgen import SubGen

CONFIG = SubGen(keep=180, window=16, t=2, seed=3)
LENGTHS = [60, 170, 600]  # the last overflows in the first call, the second in the next one, the first never


def stream(count, rows=3, seed=0):
    return torch.randn(2, rows, 2, count, 8, generator=torch.Generator().manual_seed(seed))


def fed():
    """Three left-padded rows, then 100 tokens more for each."""
    keys, values = stream(700)
    valid = torch.ones(3, 700, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        valid[row, : 600 - length] = False
    cache = LayerCache(CONFIG, 1)
    for start, stop in ((0, 600), (600, 650), (650, 700)):
        part = slice(start, stop)
        cache.hold(NewTokens(keys[:, :, part], values[:, :, part], valid[:, part]))
    return cache, keys, values, valid


def alone(row, keys, values):
    cache = LayerCache(CONFIG, 1)
    skip = 600 - LENGTHS[row]
    for start, stop in ((skip, 600), (600, 650), (650, 700)):
        cache.hold(NewTokens(keys[row : row + 1, :, start:stop], values[row : row + 1, :, start:stop]))
    return cache


def query(rows=3):
    return torch.randn(rows, 4, 5, 8, generator=torch.Generator().manual_seed(9))


def test_rows_overflow_in_groups_and_each_equals_the_row_alone():
    cache, keys, values, valid = fed()
    assert cache.past.groups == [HELD, 1, 0]
    got = cache.attend(query(), 0.5).out
    for row in range(3):
        single = alone(row, keys, values)
        torch.testing.assert_close(got[row : row + 1], single.attend(query()[row : row + 1], 0.5).out)
        assert torch.equal(cache.past.count_entries()[row], single.past.count_entries()[0])
    held = exact_attention(query()[:1], keys[:1], values[:1], 0.5, visible=valid[:1, None, None]).out
    torch.testing.assert_close(got[:1], held)


@pytest.mark.parametrize("rows", [[2, 0, 0, 1], [1, 1], [0], [2]], ids=str)
def test_groups_move_with_their_rows(rows):
    cache, _, _, _ = fed()
    index = torch.tensor(rows)
    expected = cache.attend(query(), 0.5).out[index]
    cache.map_rows(lambda tensor: tensor.index_select(0, index), rows)
    torch.testing.assert_close(cache.attend(query()[index], 0.5).out, expected)
    groups = cache.past.groups
    assert sorted(set(groups) - {HELD}) == list(range(len(cache.past.pasts))), "no group is left without rows"
    assert [group == HELD for group in groups] == [row == 0 for row in rows]
    before = list(cache.past.counts)
    cache.hold(NewTokens(*stream(64, rows=len(rows), seed=4)))
    assert cache.past.counts == [count + 64 for count in before]


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0, 0, 1]], ids=str)
def test_state_of_all_groups_can_be_put_back(rows):
    cache, _, _, _ = fed()
    cache.map_rows(lambda tensor: tensor.index_select(0, torch.tensor(rows)), rows)
    tensors, numbers = cache.state()
    twin = LayerCache(CONFIG, 1)
    twin.restore({name: tensor.clone() for name, tensor in tensors.items()}, copy.deepcopy(numbers))
    more = stream(200, rows=len(rows), seed=4)  # enough for rows that were held to overflow
    for one in (cache, twin):
        one.hold(NewTokens(*more))
    assert HELD not in cache.past.groups
    assert twin.past.groups == cache.past.groups
    answers = [one.attend(query(len(rows)), 0.5).out for one in (cache, twin)]
    assert torch.equal(*answers)


def test_what_is_held_is_not_a_window_onto_the_callers_tensors():
    cache, keys, values, _ = fed()
    before = cache.attend(query(), 0.5).out
    keys.zero_()
    values.zero_()
    assert torch.equal(cache.attend(query(), 0.5).out, before)
