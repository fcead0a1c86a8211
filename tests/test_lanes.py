"""Rows and heads of one batch that hold different things: in bundles of their own, each as if it were alone."""

import copy
from contextlib import nullcontext

import pytest
import torch

from kvsketch.attention import exact_attention
from kvsketch.caches.core import chooser
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.lanes import Lanes
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.query import Query
from kvsketch.caches.core.tokens import Columns, NewTokens
from kvsketch.caches.forgetting.balancekv import BalanceKV
from kvsketch.caches.forgetting.clustergen import ClusterGen
from kvsketch.caches.forgetting.subgen import SubGen
from kvsketch.caches.forgetting.uniform import Uniform
from kvsketch.caches.lookup.lsh import LSH
from kvsketch.caches.lookup.random_buckets import RandomBuckets
from kvsketch.kernels import native
from lanes import Fed

CONFIG = SubGen(keep=180, window=16, t=2, seed=3)
SOME = {"window": 16, "full_layers": 0, "staging": 48}  # of the past
METHODS = [
    CONFIG,
    SubGen(keep=0.5, window=16),
    Uniform(keep=180, window=16),
    Uniform(keep=0.3, window=16),
    ClusterGen(keep=180, window=16),
    BalanceKV(keep=180, window=16),
    RandomBuckets(buckets=8, probes=3, estimate=True, **SOME),
    LSH(bins=4, **SOME),
]
LENGTHS = [60, 170, 600, 170]  # SubGen overflows in the first call, in the next one, or never


def stream(count, rows=4, heads=2, seed=0):
    return torch.randn(2, rows, heads, count, 8, generator=torch.Generator().manual_seed(seed))


def fed(config=CONFIG):
    """Four left-padded rows, then 100 tokens more for each."""
    keys, values = stream(700)
    valid = torch.ones(4, 700, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        valid[row, : 600 - length] = False
    cache = LayerCache(config, 1)
    for start, stop in ((0, 600), (600, 650), (650, 700)):
        part = slice(start, stop)
        cache.hold(NewTokens(keys[:, :, part], values[:, :, part], valid[:, part]))
    return cache, keys, values, valid


def alone(row, keys, values, config=CONFIG):
    cache = LayerCache(config, 1)
    skip = 600 - LENGTHS[row]
    for start, stop in ((skip, 600), (600, 650), (650, 700)):
        cache.hold(NewTokens(keys[row : row + 1, :, start:stop], values[row : row + 1, :, start:stop]))
    return cache


def query(rows=4, heads=4):
    return torch.randn(rows, heads, 5, 8, generator=torch.Generator().manual_seed(9))


def held_exactly(cache):
    """Of each row, whether SubGen still holds all of its tokens."""
    found = {row: bundle.holding.clusters is None for bundle in cache.past.bundles for row in bundle.rows}
    return [found[row] for row in range(len(found))]


@pytest.mark.parametrize("config", METHODS, ids=str)
def test_rows_leave_in_bundles_and_each_equals_the_row_alone(config):
    cache, keys, values, _ = fed(config)
    assert sorted(bundle.rows for bundle in cache.past.bundles) == [[0], [1, 3], [2]]
    got = cache.attend(query(), 0.5).out
    for row in range(4):
        single = alone(row, keys, values, config)
        torch.testing.assert_close(got[row : row + 1], single.attend(query()[row : row + 1], 0.5).out)
        assert torch.equal(cache.past.count_entries()[row], single.past.count_entries()[0])
        assert cache.past.counts[row] == single.past.counts[0] == cache.left[row]


def test_rows_overflow_at_different_times_and_are_exact_until_then():
    cache, keys, values, valid = fed()
    assert held_exactly(cache) == [True, False, False, False]
    got = cache.attend(query(), 0.5).out
    held = exact_attention(query()[:1], keys[:1], values[:1], 0.5, visible=valid[:1, None, None]).out
    torch.testing.assert_close(got[:1], held)
    assert not torch.allclose(
        got[1:], exact_attention(query(), keys, values, 0.5, visible=valid[:, None, None]).out[1:]
    )


@pytest.mark.parametrize("rows", [[2, 0, 0, 3, 1], [1, 1], [0], [2], [3, 2, 1, 0]], ids=str)
@pytest.mark.parametrize("config", METHODS, ids=str)
def test_bundles_move_with_their_rows(config, rows):
    cache, _, _, _ = fed(config)
    index = torch.tensor(rows)
    expected, before, old = cache.attend(query(), 0.5).out[index], list(cache.past.counts), cache.past.bundles
    cache.map_rows(rows)
    torch.testing.assert_close(cache.attend(query()[index], 0.5).out, expected)
    bundles = cache.past.bundles
    assert sorted(row for bundle in bundles for row in bundle.rows) == list(range(len(rows)))
    assert all(bundle.rows for bundle in bundles), "no bundle is left without rows"
    came_from = [
        {i for i, other in enumerate(old) if rows[row] in other.rows} for bundle in bundles for row in bundle.rows
    ]
    assert all(len(one) == 1 for one in came_from)
    assert len(set(map(tuple, came_from))) == len(bundles), "those that were together still are"
    if config is CONFIG:
        assert held_exactly(cache) == [row == 0 for row in rows]
    cache.hold(NewTokens(*stream(64, rows=len(rows), seed=4)))
    assert cache.past.counts == [before[row] + 64 for row in rows]


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("config", METHODS, ids=str)
def test_rows_that_moved_go_on_as_those_they_were(config, heads):
    """Also where one head of one row is all there is, and becomes several; and where rows part only then."""
    (keys, values), more = stream(400, 1, heads), stream(90, 3, heads, seed=4)
    cache = LayerCache(config, 1)
    cache.hold(NewTokens(keys, values))
    cache.map_rows([0, 0, 0])
    valid = torch.arange(90) >= torch.tensor([0, 89, 40])[:, None]
    cache.hold(NewTokens(*more, valid))
    got = cache.attend(query(3, 2 * heads), 0.5).out
    for row, skip in enumerate((0, 89, 40)):
        single = LayerCache(config, 1)
        single.hold(NewTokens(keys, values))
        single.hold(NewTokens(*more[:, row : row + 1, :, skip:]))
        expected = single.attend(query(3, 2 * heads)[row : row + 1], 0.5).out
        torch.testing.assert_close(got[row : row + 1], expected)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2, 0, 0, 1]], ids=str)
@pytest.mark.parametrize("config", METHODS, ids=str)
def test_state_of_all_bundles_can_be_put_back(config, rows):
    cache, _, _, _ = fed(config)
    cache.map_rows(rows)
    tensors, numbers = cache.state()
    twin = LayerCache(config, 1)
    twin.restore({name: tensor.clone() for name, tensor in tensors.items()}, copy.deepcopy(numbers))
    more = stream(200, rows=len(rows), seed=4)  # enough for rows that were held exactly to overflow
    for one in (cache, twin):
        one.hold(NewTokens(*more))
    if config is CONFIG:
        assert not any(held_exactly(cache))
    assert [bundle.rows for bundle in twin.past.bundles] == [bundle.rows for bundle in cache.past.bundles]
    assert twin.past.counts == cache.past.counts
    answers = [one.attend(query(len(rows)), 0.5).out for one in (cache, twin)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("config", METHODS, ids=str)
def test_what_is_held_is_not_a_window_onto_the_callers_tensors(config):
    cache, keys, values, _ = fed(config)
    before = cache.attend(query(), 0.5).out
    keys.zero_()
    values.zero_()
    assert torch.equal(cache.attend(query(), 0.5).out, before)


@pytest.mark.skipif(native.library() is None, reason="there is no C compiler")
@pytest.mark.parametrize("large", [0, 1 << 22])
@pytest.mark.parametrize("config", [Uniform(keep=0.3, window=16), BalanceKV(keep=180, window=16)], ids=str)
def test_entries_that_are_rearranged_where_they_lie_are_those_that_are_copied(config, large, monkeypatch):
    """Also where rows have unequal lengths, a token at a time, and with new tokens among them."""
    found, moved = [], []
    monkeypatch.setattr(chooser, "LARGE", large)
    before = chooser.rearrange
    monkeypatch.setattr(chooser, "rearrange", lambda each, *given: moved.append(each[0]) or before(each, *given))
    for in_c in (True, False):
        with nullcontext() if in_c else native.off():
            cache, *_ = fed(config)
            keys, values = stream(130, seed=5)
            moved.clear()
            where = set[int]()
            for n in range(130):
                cache.read(query()[:, :, :1], NewTokens(keys[:, :, n : n + 1], values[:, :, n : n + 1]), 0.5)
                where |= {own.buffer.data_ptr() for own in moved}
        assert bool(moved) == in_c
        if in_c and (large == 0 or config.keep == 180):
            assert len(where) < len(moved), "some stayed where they lay"
        found.append(cache.past.tensors())
    rearranged, copied = found
    assert copied.keys() == rearranged.keys()
    assert all(torch.equal(x, rearranged[name]) for name, x in copied.items())


def test_heads_with_other_budgets_lie_apart_and_answer_as_if_all_had_theirs():
    config, large, small = Uniform(keep=180, window=16), Budget(None, 180, 84), Budget(None, 100, 84)
    counts = [[60, 250], [120, 260]]  # of two rows after each write
    tokens = stream(260, rows=2, heads=3)

    def lanes_of(budgets):
        lanes, before = Lanes(config.new_method(1), [budgets] * 2), [0, 0]
        for after in counts:
            stop = max(after)
            ranks = torch.arange(stop).expand(2, -1)
            ranks = ranks.masked_fill(
                (ranks < torch.tensor(before)[:, None]) | (ranks >= torch.tensor(after)[:, None]), -1
            )
            few = [False] * len(after)
            lanes.write(Columns(tokens[0, :, :, :stop], tokens[1, :, :, :stop], ranks), after, few)
            before = after
        return lanes

    lanes = lanes_of([large, small, large])
    assert sorted((bundle.rows, bundle.heads) for bundle in lanes.bundles) == [
        ([0], [0, 2]),
        ([0], [1]),
        ([1], [0, 2]),
        ([1], [1]),
    ]
    for rows in ([0, 1], [1, 0, 0]):
        asked = Query(query(2, 6)[rows], 0.5)
        mixed, largest, smallest = lanes, lanes_of([large] * 3), lanes_of([small] * 3)
        for one in (mixed, largest, smallest) if rows != [0, 1] else ():
            one.map_rows(rows)
        heads = torch.tensor([0, 1, 0]).repeat_interleave(2)[None, :, None, None]
        expected = torch.where(heads == 1, smallest.answer(asked).attended.out, largest.answer(asked).attended.out)
        torch.testing.assert_close(mixed.answer(asked).attended.out, expected)
        entries = torch.where(torch.arange(3) == 1, smallest.count_entries(), largest.count_entries())
        assert torch.equal(mixed.count_entries(), entries)


def test_a_row_without_entries_does_not_coarsen_the_answers_of_others():
    """Of 16-bit queries too, whose logits are bent: those are answered in 32 bits."""
    keys, values = stream(80, rows=2).bfloat16()
    ranks = torch.stack([torch.full((80,), -1), torch.arange(80)])
    asked = stream(3, rows=2, seed=3)[0].bfloat16()
    together, alone = (Fed(Uniform(keep=1.0), Budget(1.0, None, 0), rows=rows, heads=2) for rows in (2, 1))
    got = together.write(keys, values, ranks=ranks).attend(asked, 0.5, softcap=20.0)
    expected = alone.write(keys[1:], values[1:]).attend(asked[1:], 0.5, softcap=20.0)
    assert torch.equal(got.out[1:], expected.out)
    assert (got.lse[0] == float("-inf")).all()
