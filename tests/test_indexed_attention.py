"""Attention over runs of rows: what is copied first and what is masked give the same, whatever the runs."""

import pytest
import torch

from kvsketch.attention import exact_attention
from kvsketch.kernels.indexed_attention import Segments, gathered, reference
from kvsketch.kernels.indexed_attention.gathered import rows_of

ROWS, HEADS, GROUP, WIDTH, COUNT = 2, 3, 2, 8, 200
SCALE = WIDTH**-0.5


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_with(keys, values):
    """Rows as the kernels take them: a value behind its key."""
    return torch.cat([keys, values], 3)


def runs(queries, most, seed=0, empty=False):
    """Random runs that do not overlap, some of them empty: pieces of a random cutting of the rows."""
    generator = torch.Generator().manual_seed(seed)
    lanes = (ROWS, HEADS, queries)
    cuts = torch.rand(*lanes, COUNT - 1, generator=generator).argsort(3)[..., : 2 * most - 1].sort(3).values + 1
    edges = torch.cat([torch.zeros(*lanes, 1, dtype=torch.int64), cuts], 3)
    begin, end = edges[..., 0::2], edges[..., 1::2]
    length = (end - begin) * (torch.rand(*lanes, most, generator=generator) < 0.7)
    return Segments(begin, torch.zeros_like(length) if empty else length)


def by_hand(query, keys, values, segments):
    """Query by query, over the rows that are named."""
    out, lse = torch.empty_like(query), torch.empty(query.shape[:3], dtype=query.dtype)
    for row in range(ROWS):
        for head in range(HEADS):
            for at in range(query.shape[2]):
                begin, length = segments.begin[row, head, at].tolist(), segments.length[row, head, at].tolist()
                index = [
                    place for first, many in zip(begin, length, strict=True) for place in range(first, first + many)
                ]
                asking = query[row, head * GROUP : (head + 1) * GROUP, at][None, :, None]
                part = exact_attention(
                    asking,
                    keys[row : row + 1, head : head + 1, index],
                    values[row : row + 1, head : head + 1, index],
                    SCALE,
                )
                out[row, head * GROUP : (head + 1) * GROUP, at] = part.out[0, :, 0]
                lse[row, head * GROUP : (head + 1) * GROUP, at] = part.lse[0, :, 0]
    return out, lse


@pytest.mark.parametrize("form", [reference, gathered], ids=["masked", "copied"])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("most", [1, 7])
def test_each_query_attends_to_the_rows_of_its_runs_and_no_others(form, queries, most):
    query = normal(ROWS, HEADS * GROUP, queries, WIDTH, dtype=torch.float64)
    keys, values = (normal(ROWS, HEADS, COUNT, WIDTH, seed=seed, dtype=torch.float64) for seed in (1, 2))
    segments = runs(queries, most)
    part = form.attend(query, rows_with(keys, values), segments, SCALE)
    out, lse = by_hand(query, keys, values, segments)
    torch.testing.assert_close(part.out, out)
    torch.testing.assert_close(part.lse, lse)


@pytest.mark.parametrize("form", [reference, gathered], ids=["masked", "copied"])
def test_a_query_that_reads_nothing_has_no_mass(form):
    query, keys, values = (normal(ROWS, heads, 3, WIDTH, seed=heads) for heads in (HEADS * GROUP, HEADS, HEADS))
    part = form.attend(
        query, rows_with(keys, values), Segments(*torch.zeros(2, ROWS, HEADS, 3, 4, dtype=torch.int64)), SCALE
    )
    assert (part.lse == float("-inf")).all()
    assert (part.out == 0).all()


def unequal(queries, least=0):
    """Runs of lanes of very unequal lengths, one of which reads `least` rows and one everything."""
    lanes = (ROWS, HEADS, queries)
    length = (torch.rand(*lanes, generator=torch.Generator().manual_seed(5)) ** 3 * COUNT).long().clamp_min(least)
    length[0, 1, 0], length[1, 2, -1] = least, COUNT
    begin = (torch.rand(*lanes, generator=torch.Generator().manual_seed(6)) * (COUNT - length)).long()
    return Segments(begin[..., None], length[..., None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fused", "plain"])
@pytest.mark.parametrize("part", [7, 64, 1000])
@pytest.mark.parametrize("numbers", [1, 999, 10**6])  # some parts of a lane, some lanes, all of them
def test_how_lanes_are_cut_and_bundled_changes_nothing(numbers, part, dtype, monkeypatch):
    query = normal(ROWS, HEADS * GROUP, 4, WIDTH, dtype=dtype)
    keys, values = (normal(ROWS, HEADS, COUNT, WIDTH, seed=seed, dtype=dtype) for seed in (1, 2))
    monkeypatch.setattr(gathered, "COPIED_AT_ONCE", numbers)
    monkeypatch.setattr(gathered, "PART", part)
    for segments in (runs(4, 5), unequal(4)):
        got = gathered.attend(query, rows_with(keys, values), segments, SCALE)
        expected = reference.attend(query, rows_with(keys, values), segments, SCALE)
        torch.testing.assert_close(got.out.to(dtype), expected.out)
        torch.testing.assert_close(got.lse.to(dtype), expected.lse)


def test_lanes_are_bundled_by_what_they_copy(monkeypatch):
    """100 rows fit, in lanes of four parts each: some parts of a long lane, or some short lanes."""
    monkeypatch.setattr(gathered, "COPIED_AT_ONCE", 800)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    bundles = [*gathered._bundles([160, 100, 48, 40, 3, 0], 4, 16)]
    bounds = [(one.lanes.start, one.lanes.stop, one.parts.start, one.parts.stop, one.size) for one in bundles]
    assert bounds == [(0, 1, 0, 2, 40), (0, 1, 2, 4, 40), (1, 2, 0, 4, 25), (2, 4, 0, 4, 12), (4, 6, 0, 4, 1)]
    assert [one.rows for one in bundles] == [80, 80, 100, 96, 8]


@pytest.mark.parametrize("part", [16, 1000], ids=["merged", "whole"])
@pytest.mark.parametrize("of_pairs", [False, True])
def test_gradients_flow_through_copies_and_parts(of_pairs, part, monkeypatch):
    """Copies share a place only where nobody needs them later, and answers are merged with their gradients."""
    monkeypatch.setattr(gathered, "COPIED_AT_ONCE", 999)
    monkeypatch.setattr(gathered, "PART", part)
    keys, values = (normal(ROWS, HEADS, COUNT, WIDTH, seed=seed) for seed in (1, 2))
    found = []
    for form in (reference, gathered):
        wanted = rows_with(keys, values) if of_pairs else normal(ROWS, HEADS * GROUP, 3, WIDTH)
        wanted.requires_grad_()
        query = normal(ROWS, HEADS * GROUP, 3, WIDTH, seed=7) if of_pairs else wanted
        pairs = wanted if of_pairs else rows_with(keys, values)
        form.attend(query, pairs, unequal(3, least=1), SCALE).out.square().sum().backward()
        found.append(wanted.grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_copied_is_as_near_to_the_definition_as_plain_torch(dtype):
    query = normal(ROWS, HEADS * GROUP, 1, WIDTH, dtype=dtype)
    keys, values = (normal(ROWS, HEADS, COUNT, WIDTH, seed=seed, dtype=dtype) for seed in (1, 2))
    segments = runs(1, 6)
    exact = reference.attend(query.double(), rows_with(keys, values).double(), segments, SCALE)
    got = gathered.attend(query, rows_with(keys, values), segments, SCALE).out.double()
    # Plain torch at this precision: its products, its softmax, its sum, over the same rows.
    logits = (query.unflatten(1, (HEADS, GROUP)).squeeze(3) @ keys.mT * SCALE).masked_fill(
        ~segments.mask(COUNT), float("-inf")
    )
    plain = (torch.softmax(logits, -1) @ values).flatten(1, 2)[:, :, None].double()
    assert (got - exact.out).norm() <= 2 * (plain - exact.out).norm()


def test_keys_in_a_buffer_with_room_to_spare_are_read_where_they_lie():
    """What a cache holds is a view of a larger buffer: its rows are not neighbours over all heads."""
    query = normal(ROWS, HEADS * GROUP, 1, WIDTH)
    wide = normal(ROWS, HEADS, COUNT + 37, 2 * WIDTH, seed=1)
    held = wide[:, :, :COUNT]
    segments = runs(1, 6)
    expected = gathered.attend(query, held.contiguous(), segments, SCALE)
    got = gathered.attend(query, held, segments, SCALE)
    assert torch.equal(got.out, expected.out)
    transposed = gathered.attend(query, held.mT.contiguous().mT, segments, SCALE)
    torch.testing.assert_close(transposed.out, expected.out)


@pytest.mark.parametrize("form", [reference, gathered], ids=["masked", "copied"])
@pytest.mark.parametrize("value_width", [3, 24])
def test_values_may_be_narrower_or_wider_than_keys(form, value_width):
    query, keys = normal(ROWS, HEADS * GROUP, 2, WIDTH), normal(ROWS, HEADS, COUNT, WIDTH, seed=1)
    values = normal(ROWS, HEADS, COUNT, value_width, seed=2)
    everything = Segments(torch.zeros(ROWS, HEADS, 2, 1, dtype=torch.int64), torch.full((ROWS, HEADS, 2, 1), COUNT))
    part = form.attend(query, rows_with(keys, values), everything, SCALE)
    torch.testing.assert_close(part.out, exact_attention(query, keys, values, SCALE).out)


def test_rows_are_numbered_run_by_run():
    index, there = rows_of(torch.tensor([[5, 0, 9], [2, 7, 4]]), torch.tensor([[2, 0, 3], [1, 1, 0]]), 5)
    assert index[0].tolist() == [5, 6, 9, 10, 11]
    assert there[0].all()
    assert index[1].tolist() == [2, 7, 0, 1, 2]
    assert there[1].tolist() == [True, True, False, False, False]


def test_the_softcap_bends_logits_here_too():
    query = normal(ROWS, HEADS * GROUP, 2, WIDTH) * 5
    keys, values = (normal(ROWS, HEADS, COUNT, WIDTH, seed=seed) for seed in (1, 2))
    everything = Segments(torch.zeros(ROWS, HEADS, 2, 1, dtype=torch.int64), torch.full((ROWS, HEADS, 2, 1), COUNT))
    expected = exact_attention(query, keys, values, SCALE, softcap=2.0)
    for form in (reference, gathered):
        part = form.attend(query, rows_with(keys, values), everything, SCALE, softcap=2.0)
        torch.testing.assert_close(part.out, expected.out)
        torch.testing.assert_close(part.lse, expected.lse)
