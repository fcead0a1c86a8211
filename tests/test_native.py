"""Kernels in C: equal to the definition, whatever is asked; built and loaded safely, or not at all."""

import copy
import ctypes
import hashlib
import math
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import kvsketch
from kvsketch import attention
from kvsketch.attention import WeightedTokens
from kvsketch.caches.core import asking
from kvsketch.caches.core.query import Query
from kvsketch.kernels import buckets as buckets_of_heads
from kvsketch.kernels import finite, merging, native
from kvsketch.kernels import places as all_places
from kvsketch.kernels.directions import native as directions
from kvsketch.kernels.directions import reference as directions_in_torch
from kvsketch.kernels.native import assign as assigning
from kvsketch.kernels.native import attention as kernel
from kvsketch.kernels.native import build, prompt
from kvsketch.kernels.native import weights as weighing
from kvsketch.kernels.places import native as places
from kvsketch.kernels.places import reference as places_in_torch
from kvsketch.kernels.reading import read
from kvsketch.kernels.routing import native as routing
from kvsketch.kernels.routing import reference as routing_in_torch
from kvsketch.kernels.routing import rounded
from kvsketch.kernels.sources import Choice, Classifier, Entries, Limits, Segments, Staged
from kvsketch.kernels.weighted_attention import causal_attention, weighted_attention
from repeated import AGAIN, ONCE_MORE

HERE = Path(__file__)
ROOT = HERE.parent.parent
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [  # rows, heads, group, queries, entries, width of keys, of values
    (1, 2, 1, 1, 5, 8, 8),
    (2, 2, 4, 1, 700, 64, 64),
    (1, 3, 3, 1, 1100, 128, 96),
    (2, 1, 2, 3, 130, 80, 72),
    (1, 2, 5, 2, 300, 20, 33),
    (1, 1, 8, 2, 65, 96, 128),
    (1, 1, 7, 1, 37, 64, 48),
    (1, 2, 4, 8, 75, 64, 64),
]

needs_c = pytest.mark.skipif(native.library() is None, reason="there is no C compiler")
only_root = pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="gives a file away")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache folder of our own, and a library that is looked for anew, now and after the test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVSKETCH_CACHE", str(folder))
    monkeypatch.setenv("CFLAGS", "-O0")  # quickly
    native.loaded.cache_clear()
    yield folder
    native.loaded.cache_clear()


@pytest.fixture(params=["near", "far"])
def asking_ahead(request):
    """What is read next is asked for into the first cache or the second, as one processor or another wants it."""
    assert native.library().kvs_ask_far(ctypes.c_int64(request.param == "far")) == (request.param == "far")
    yield
    native.library().kvs_ask_far(ctypes.c_int64(-1))


def in_double(tokens):
    return WeightedTokens(*(None if x is None else x.double() for x in vars(tokens).values()))


def as_exact_as_torch(query, tokens, found, softcap=None, visible=None, least=1e-6):
    """Within twice the error of plain torch at the same precision, answers and log denominators."""
    scale = query.shape[3] ** -0.5
    true = attention.weighted_attention(query.double(), in_double(tokens), scale, softcap=softcap, visible=visible)
    plain = attention.weighted_attention(query, tokens, scale, softcap=softcap, visible=visible)
    alive = true.lse > -math.inf
    torch.testing.assert_close(found.lse[~alive], true.lse[~alive].float())
    for got, near, exact in (
        (found.out, plain.out.to(query.dtype), true.out),
        (found.lse, plain.lse, true.lse),
    ):
        error, usual = ((x.double() - exact)[alive].abs().amax() for x in (got, near))
        assert error <= 2 * usual + least, f"{error} where torch has {usual}"


@needs_c
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("asking_ahead")
def test_attention_is_that_of_the_definition(shape, dtype):
    rows, heads, group, queries, count, width, value_width = shape
    query = torch.randn(rows, heads * group, queries, width).to(dtype)
    buffer = torch.full((rows, count + 9, heads, width + value_width), math.nan, dtype=dtype)  # strides, and no more
    buffer[:, :count] = torch.randn(rows, count, heads, width + value_width).to(dtype)
    keys, values = buffer[:, :count].transpose(1, 2).split([width, value_width], 3)
    mass = torch.randn(rows, heads, count)
    mass[:, :, : count // 3] = -math.inf
    mass[:, 0] = mass[:, 0] if count > 5 else -math.inf  # a head without entries
    for log_mass, log_value in ((None, None), (mass, None), (mass, mass + torch.randn_like(mass) / 3)):
        for softcap in (None, 5.0):
            tokens = WeightedTokens(keys, values, log_mass, log_value)
            found = kernel.attend(query, [Entries(tokens)], heads, width**-0.5, softcap)
            as_exact_as_torch(query, tokens, found, softcap)


PROMPTS = [  # rows, heads, group, queries, width of keys, of values
    (2, 2, 3, 80, 32, 32) if ONCE_MORE else (2, 2, 3, 150, 64, 64),
    (1, 1, 2, 290, 48, 32) if ONCE_MORE else (1, 1, 2, 290, 128, 96),  # more entries than meet queries at once
    (1, 1, 7, 70, 20, 33),
    (2, 1, 1, 33, 5, 130),
    (1, 1, 40, 9, 48, 32),
]


@needs_c
@pytest.mark.parametrize("shape", PROMPTS, ids=str)
def test_attention_of_many_queries_is_that_of_the_definition(shape, numbers, monkeypatch):
    """Over weighted entries, where empty slots are not read, and among tokens, of which some are padding."""
    monkeypatch.setattr(prompt, "pays", lambda dtype: True)
    rows, heads, group, queries, width, value_width = shape
    query = (torch.randn(rows, queries, heads * group, width) * 2).to(numbers).transpose(1, 2)
    buffer = torch.full(
        (rows, queries + 9, heads, width + value_width), math.nan, dtype=numbers
    )  # strides, and no more
    buffer[:, :queries] = torch.randn(rows, queries, heads, width + value_width).to(numbers)
    keys, values = buffer[:, :queries].transpose(1, 2).split([width, value_width], 3)
    valid = torch.rand(rows, queries) > 0.3
    before = torch.ones(queries, queries, dtype=torch.bool).tril()
    least = 4e-6  # logits go up to 10 and are summed up one product after the other
    for softcap in (None, 5.0) if ONCE_MORE else (None, 5.0, 1000.0):
        for there, visible in ((None, before), (valid, before & valid[:, None] | torch.eye(queries, dtype=torch.bool))):
            tokens = WeightedTokens(keys, values)
            found = prompt.attend(query, tokens, width**-0.5, softcap, causal=True, valid=there)
            as_exact_as_torch(query, tokens, found, softcap, visible.expand(rows, -1, -1)[:, None], least)
    mass = torch.randn(rows, heads, queries)
    mass[:, :, : queries // 3] = -math.inf
    empty = mass[0] == -math.inf
    mass[-1, -1] = mass[-1, -1] if rows * heads == 1 else -math.inf  # a head without entries
    for log_mass, log_value in (
        (None, None),
        (mass, None),
        (mass[:, :1], None),
        (mass, mass + torch.randn_like(mass) / 3),
    ):
        for softcap in (None, 50.0):
            tokens = WeightedTokens(keys, values, log_mass, log_value)
            found = prompt.attend(query, tokens, width**-0.5, softcap)
            as_exact_as_torch(query, tokens, found, softcap, least=least)
            if log_mass is not None and log_mass.shape[1] == heads:
                holes = empty[None, ..., None].expand_as(keys)
                strange = WeightedTokens(
                    keys.masked_fill(holes, math.nan), values.masked_fill(holes[..., :1], math.nan)
                )
                strange = WeightedTokens(strange.keys, strange.values, log_mass, log_value)
                same = prompt.attend(query, strange, width**-0.5, softcap)
                assert torch.equal(same.out, found.out)
                assert torch.equal(same.lse, found.lse)


@needs_c
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(2, 4, 1, 700, 64), (2, 4, 8, 300, 64), (3, 3, 1, 65, 48), (1, 7, 2, 1200, 128), (2, 5, 1, 1, 16)],
    ids=str,
)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.usefixtures("asking_ahead")
def test_what_entries_got_of_queries_is_what_torch_says(shape, dtype, softcap, monkeypatch):
    """With weights of every lane, of all lanes together and without; queries that nobody asked give nothing."""
    heads, group, queries, count, width = shape
    buffer = torch.full((heads, count + 3, 2 * width), math.nan, dtype=dtype)
    buffer[:, :count, :width] = torch.randn(heads, count, width).to(dtype)
    keys, query = buffer[None, :, :count, :width], torch.randn(1, heads * group, queries, width).to(dtype)
    mass = torch.randn(1, heads, count)
    mass[:, :, 1 : count // 3] = -math.inf
    taken, add = [], asking.in_c.add_weights
    monkeypatch.setattr(asking.in_c, "add_weights", lambda *given: taken.append(add(*given)) or taken[-1])
    for log_mass in (None, mass, mass[:, :1]):
        exact = WeightedTokens(keys.double(), keys.double(), None if log_mass is None else log_mass.double())
        lse = attention.weighted_attention(query.double(), exact, width**-0.5, softcap=softcap).lse.float()
        lse[:, 0] = math.inf
        asked, tokens = Query(query, width**-0.5, softcap), WeightedTokens(keys, keys, log_mass)
        got, torchs = (torch.full((heads, count), 0.5, dtype=torch.float64) for _ in range(2))
        asking.add_weights(got, asked, lse, tokens)
        with native.off():
            asking.add_weights(torchs, asked, lse, tokens)
        torch.testing.assert_close(got, torchs, rtol=1e-5, atol=1e-6)
        assert got.sum().item() - count * heads / 2 == pytest.approx(queries * (heads * group - 1), rel=1e-5)
    assert taken == [True, False] * 3


@needs_c
@pytest.mark.parametrize("noted", [asking.SUM, asking.MEAN, asking.MAX, asking.LAST])
def test_what_entries_got_of_many_queries_is_what_torch_says(noted, numbers, monkeypatch):
    """All see all, or what is not behind them; some are not asked, and some entries are nobody's."""
    taken, add = [], asking.in_c.add_many
    monkeypatch.setattr(asking.in_c, "add_many", lambda *given, **more: taken.append(add(*given, **more)) or taken[-1])
    monkeypatch.setattr(asking, "ASKED_AT_ONCE", 128)
    many = (1, 2, 1, 257, 300, 64) if ONCE_MORE else (2, 3, 1, 257, 700, 64)
    for rows, heads, group, queries, count, width in ((2, 2, 3, 47, 60, 40), many):
        buffer = torch.full((rows, count + 3, heads, width), math.nan, dtype=numbers)  # as models lay keys out
        buffer[:, :count] = torch.randn(rows, count, heads, width).to(numbers)
        keys, query = buffer[:, :count].transpose(1, 2), torch.randn(rows, heads * group, queries, width).to(numbers)
        held, own = (torch.arange(start, count).repeat(rows, 1) for start in (0, count - queries))
        held[0, : count // 3] = -1
        asked, lse = Query(query, width**-0.5, ranks=own), torch.randn(rows, heads * group, queries) + 6
        lse[:, 1] = math.inf
        about = asking.Asking(asking.CONTEXT, noted)
        for ranks in (None, held):
            for wanted in (None, torch.rand(rows, queries) < torch.tensor([[0.7], [0.0]])[:rows]):
                got = asking.attention_got(about, asked, lse, keys, ranks, wanted)
                with native.off():
                    torchs = asking.attention_got(about, asked, lse, keys, ranks, wanted)
                torch.testing.assert_close(got, torchs, rtol=2e-5, atol=1e-7)
                assert (got[..., 0] > 0).any()
    assert taken == ([True] * 4 + [True] * 3 * 4)


@needs_c
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("noted", [asking.SUM, asking.MEAN, asking.MAX, asking.LAST])
def test_what_a_step_notes_about_a_window_is_what_torch_says(noted, dtype):
    """Beside notes of somebody else, in a buffer with room to spare; again and again, so that notes are changed."""
    (rows, heads, group, width, count), scale = (2, 3, 5, 32, 77), 0.2
    own = asking.Asking(asking.CONTEXT, noted)
    keys = torch.randn(rows, heads, count + 9, width).to(dtype)[:, :, :count]
    notes = torch.rand(rows, heads, count + 9, 4, dtype=torch.float64)[:, :, :count]
    place = slice(1, 1 + own.width)
    expected, before = notes[..., place].clone(), notes.clone()
    for _ in range(3):
        asked = Query(torch.randn(rows, heads * group, 1, width).to(dtype), scale)
        exact = WeightedTokens(keys.double(), keys.double())
        lse = attention.weighted_attention(asked.queries.double(), exact, scale).lse.float()
        with native.off():
            assert not asking.note_one(own, asked, lse, keys, notes[..., place]), "nothing is changed then"
            more = asking.attention_got(own, asked, lse, keys)
        expected = asking.weights(own.with_more(asking.bits(expected), more))
        assert asking.note_one(own, asked, lse, keys, notes[..., place])
        torch.testing.assert_close(notes[..., place], expected, rtol=1e-5, atol=1e-7)
    notes[..., place] = before[..., place]
    assert torch.equal(notes, before), "nobody else's are touched"


@needs_c
@pytest.mark.parametrize(("queries", "lists"), [(1, 1), (3, 3), (3, 1)])
@pytest.mark.usefixtures("asking_ahead")
def test_everything_that_a_query_reads_is_read_in_one_call(queries, lists):
    """A window of all lanes, bundles of some lanes with other numbers of entries, and runs: as one by one in torch."""
    torch.manual_seed(1)
    rows, heads, width, scale = 2, 3, 16, 0.25
    query = torch.randn(rows, heads * 2, queries, width)

    def entries(lanes, count, weighted=True):
        keys, values = torch.randn(2, 1, lanes, count, width).unbind()
        return WeightedTokens(keys, values, torch.randn(1, lanes, count) if weighted else None)

    window = Entries(WeightedTokens(*torch.randn(2, rows, heads, 40, width).unbind()))
    bundles = (
        Entries(entries(2, 700), torch.tensor([4, -9, 1, -9])[::2]),
        Entries(entries(3, 30), torch.tensor([0, 5, 2])),  # and nothing of lane 3
    )
    pairs = torch.randn(1, rows * heads, 900, 2 * width)
    begin = torch.tensor([0, 50, 50, 300]).expand(1, rows * heads, lists, 4).clone()  # each query's, or that of all
    length = torch.randint(0, 50, begin.shape)
    length[..., 1], length[:, 2] = 0, 0  # empty runs, and a lane that reads none
    own = Segments(*(x.expand(-1, -1, queries, -1) for x in (begin, length)))  # which is what torch is told
    runs, alike = (
        Entries(WeightedTokens(pairs[..., :width], pairs[..., width:]), segments=segments, pairs=pairs)
        for segments in (Segments(begin, length), own)
    )
    together = read(query, [(window,), bundles, (runs,)], heads, scale)
    with native.off():
        apart = read(query, [(window,), bundles, (alike,)], heads, scale)
    torch.testing.assert_close(together.out, apart.out)
    torch.testing.assert_close(together.lse, apart.lse)


@needs_c
@pytest.mark.parametrize("queries", [1, 2, 5])
def test_a_few_queries_of_large_groups_are_many_where_there_are_tiles(queries, numbers, monkeypatch):
    """A window and entries with weights, few and many of them: as one set by the definition, whoever reads them."""
    heads, group, width, taken, attend = 2, 4, 32, [], prompt.attend
    monkeypatch.setattr(prompt, "attend", lambda *given, **more: taken.append(attend(*given, **more)) or taken[-1])
    query = torch.randn(1, heads * group, queries, width).to(numbers)
    for counts in ((70,), (30, 5000), (30, 90)):
        keys, values = (torch.randn(1, heads, sum(counts), width).to(numbers) for _ in range(2))
        whole = WeightedTokens(keys, values, torch.randn(1, heads, sum(counts)))
        each = zip(*(x.split(counts, 2) for x in (keys, values, whole.log_mass)), strict=True)
        parts = [WeightedTokens(*part) for part in each]
        taken.clear()
        found = read(query, [(Entries(part),) for part in parts], heads, width**-0.5)
        as_exact_as_torch(query, whole, found)
        tiled = prompt.in_tiles(numbers) and queries == 5 and counts != (30, 90)
        assert len([x for x in taken if x is not None]) == (len(counts) if tiled else 0)


@needs_c
def test_no_runs_at_all_are_nothing_to_read_and_not_everything():
    query, tokens = torch.randn(1, 4, 2, 16), WeightedTokens(*torch.randn(2, 1, 2, 30, 16).unbind())
    window = Entries(WeightedTokens(*torch.randn(2, 1, 2, 5, 16).unbind()))
    none = torch.zeros(1, 2, 2, 0, dtype=torch.int64)
    empty = Entries(tokens, segments=Segments(none, none))
    assert torch.isneginf(kernel.attend(query, [empty], 2, 0.25).lse).all()
    together, alone = (kernel.attend(query, parts, 2, 0.25) for parts in ([window, empty], [window]))
    torch.testing.assert_close(together.out, alone.out)
    torch.testing.assert_close(together.lse, alone.lse)


@needs_c
@pytest.mark.parametrize("width", [40, 64])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.usefixtures("asking_ahead")
def test_entries_may_be_of_another_kind_than_queries(dtype, width):
    query, close = torch.randn(2, 6, 1, width).to(dtype), {"rtol": 2e-2, "atol": 2e-2}
    half = Entries(WeightedTokens(*torch.randn(2, 2, 2, 700, width).bfloat16().unbind()))
    weights = torch.randn(2, 2, 90).masked_fill(torch.rand(2, 2, 90) < 0.3, -math.inf)
    full = Entries(WeightedTokens(*torch.randn(2, 2, 2, 90, width).unbind(), weights))
    together = kernel.attend(query, [half, full], 2, width**-0.5)
    with native.off():
        apart = read(query, [(half,), (full,)], 2, width**-0.5)
    assert together.out.dtype == dtype
    torch.testing.assert_close(together.out.float(), apart.out.float(), **close)
    torch.testing.assert_close(together.lse, apart.lse, **close)


@needs_c
@pytest.mark.usefixtures("asking_ahead")
def test_nothing_beyond_the_runs_is_touched():
    width, count = 32, 500
    pairs = torch.full((1, 2, count, 2 * width), math.nan)
    begin = torch.tensor([[[[10, 100, 499]], [[0, 250, 300]]]])
    length = torch.tensor([[[[70, 1, 1]], [[3, 0, 64]]]])
    for lane in range(2):
        for start, size in zip(begin[0, lane, 0].tolist(), length[0, lane, 0].tolist(), strict=True):
            pairs[0, lane, start : start + size] = torch.randn(size, 2 * width)
    query = torch.randn(1, 4, 1, width)
    tokens = WeightedTokens(pairs[..., :width], pairs[..., width:])
    found = kernel.attend(query, [Entries(tokens, segments=Segments(begin, length))], 2, width**-0.5)
    assert found.out.isfinite().all()
    assert found.lse.isfinite().all()


@needs_c
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("asking_ahead")
def test_numbers_that_are_none_are_not_hidden(dtype):
    """Nor is infinity made one of them; of an odd number of entries, the last of which has no neighbour."""
    query, (keys, values) = torch.randn(1, 3, 1, 32).to(dtype), torch.randn(2, 1, 1, 101, 32).to(dtype).unbind()
    values[0, 0, 100, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    found = kernel.attend(query, [Entries(WeightedTokens(keys, values))], 1, 0.25).out
    assert (found[..., 0] == math.inf).all()
    assert (found[..., 1] == -math.inf).all()
    assert found[..., 2].isnan().all()
    assert found[..., 3:].isfinite().all()
    keys[0, 0, 70] = math.nan
    assert kernel.attend(query, [Entries(WeightedTokens(keys, values))], 1, 0.25).out.isnan().all()


@needs_c
def test_numbers_of_a_prompt_that_are_none_are_not_hidden(numbers, monkeypatch):
    """Nor seen by those long before them."""
    monkeypatch.setattr(prompt, "pays", lambda dtype: True)
    query, (keys, values) = torch.randn(1, 3, 131, 32).to(numbers), torch.randn(2, 1, 1, 131, 32).to(numbers).unbind()
    values[0, 0, 130, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    tokens = WeightedTokens(keys, values)
    found = prompt.attend(query, tokens, 0.25, causal=True).out
    assert (found[:, :, 130, 0] == math.inf).all()
    assert (found[:, :, 130, 1] == -math.inf).all()
    assert found[:, :, 130, 2].isnan().all()
    assert found[..., 3:].isfinite().all()
    assert found[:, :, :128].isfinite().all()
    assert torch.equal(prompt.attend(query, tokens, 0.25).out.isfinite(), found[:, :, 130:].isfinite().expand_as(found))
    keys[0, 0, 70] = math.nan
    found = prompt.attend(query, tokens, 0.25, causal=True)
    assert found.out[:, :, 70:].isnan().all()
    assert found.lse[:, :, 70:].isnan().all()
    assert found.out[:, :, :64].isfinite().all()


@needs_c
@pytest.mark.usefixtures("asking_ahead")
def test_the_mean_of_equal_values_is_that_value(numbers, monkeypatch):
    """Also where shares are rounded, all of them the same way."""
    monkeypatch.setattr(prompt, "pays", lambda dtype: True)
    values = torch.randn(1, 1, 1, 64).to(numbers).expand(1, 1, 1024, 64)
    mass = torch.full((1, 1, 1024), -0.6893).index_fill(2, torch.tensor([500]), 0.0)
    for log_value in (None, mass - math.log(2)):
        tokens = WeightedTokens(torch.zeros_like(values), values, mass, log_value)
        query = torch.randn(1, 3, 1, 64).to(numbers)
        for answer in (kernel.attend(query, [Entries(tokens)], 1, 0.125), prompt.attend(query, tokens, 0.125)):
            expected = values[:, :, :1].expand_as(answer.out) * (1.0 if log_value is None else 0.5)
            torch.testing.assert_close(answer.out, expected, rtol=1e-4, atol=0)


@needs_c
@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_the_scale_of_a_prompt_may_turn_logits_around(numbers, scale, monkeypatch):
    monkeypatch.setattr(prompt, "pays", lambda dtype: True)
    query, tokens = torch.randn(1, 6, 40, 32), WeightedTokens(*torch.randn(2, 1, 2, 300, 32).unbind())
    query, tokens = query.to(numbers), WeightedTokens(tokens.keys.to(numbers), tokens.values.to(numbers))
    found = prompt.attend(query, tokens, scale)
    true = attention.weighted_attention(query.double(), in_double(tokens), scale)
    torch.testing.assert_close(found.out.double(), true.out, rtol=0, atol=2 * torch.finfo(numbers).eps + 1e-5)
    torch.testing.assert_close(found.lse.double(), true.lse, rtol=1e-5, atol=1e-5)


@needs_c
def test_tiles_are_left_as_they_were(monkeypatch):
    """Torch sets them up for its own products."""
    before, after = (ctypes.create_string_buffer(b"?" * 63) for _ in range(2))
    if native.library().kvs_tiles(before):
        pytest.skip("this processor has no tiles, or the system does not lend them")
    monkeypatch.setattr(native, "threads", lambda: 1)
    query, (keys, values) = torch.randn(1, 4, 40, 64).bfloat16(), torch.randn(2, 1, 2, 40, 64).bfloat16().unbind()
    assert prompt.attend(query, WeightedTokens(keys, values), 0.125, causal=True) is not None
    got = torch.zeros(1, 2, 40, dtype=torch.float64)
    assert weighing.add_many(got, query.view(1, 2, 80, 64), keys, torch.ones(1, 2, 80), 0.125)
    native.library().kvs_tiles(after)
    assert before.raw == after.raw


@needs_c
def test_threads_change_nothing(monkeypatch):
    query, keys, values = torch.randn(1, 8, 1, 64), *torch.randn(2, 1, 2, 9000, 64).unbind()
    answers = []
    for count in (1, 2, 3):
        monkeypatch.setattr(native, "threads", lambda count=count: count)
        answers.append(kernel.attend(query, [Entries(WeightedTokens(keys, values))], 2, 0.125))
    assert all(torch.equal(one.out, answers[0].out) and torch.equal(one.lse, answers[0].lse) for one in answers)


@needs_c
def test_what_a_query_of_a_prompt_gets_depends_on_nobody_beside_it(numbers, monkeypatch):
    """Not on threads, on how many ask, nor on what comes later: the same bits."""
    monkeypatch.setattr(prompt, "pays", lambda dtype: True)
    width = 16 if ONCE_MORE else 48
    query = torch.randn(1, 6, 300, width).to(numbers)
    keys, values = torch.randn(2, 1, 2, 300, width).to(numbers).unbind()
    tokens = WeightedTokens(keys, values)
    causal, among = prompt.attend(query, tokens, 0.2, causal=True), prompt.attend(query, tokens, 0.2)
    for threads in (1, 3, 8):
        monkeypatch.setattr(native, "threads", lambda threads=threads: threads)
        again, first = (prompt.attend(query, tokens, 0.2, causal=causal) for causal in (True, False))
        assert torch.equal(again.out, causal.out)
        assert torch.equal(again.lse, causal.lse)
        assert torch.equal(first.out, among.out)
    part = prompt.attend(query[:, :, 100:117], tokens, 0.2)
    assert torch.equal(part.out, among.out[:, :, 100:117])
    assert torch.equal(part.lse, among.lse[:, :, 100:117])
    shorter = WeightedTokens(keys[:, :, :150], values[:, :, :150])
    assert torch.equal(prompt.attend(query[:, :, :150], shorter, 0.2, causal=True).out, causal.out[:, :, :150])


@needs_c
def test_what_does_not_fit_together_is_not_read():
    """Keys of another width, values of fewer tokens, heads that are no groups: torch says what is wrong with them."""
    query, keys, values = torch.randn(1, 6, 20, 16), *torch.randn(2, 1, 2, 20, 16).unbind()
    narrow = WeightedTokens(keys[..., :8], values)
    short = WeightedTokens(keys, values[:, :, :9])
    many = WeightedTokens(*(x.expand(3, -1, -1, -1) for x in (keys, values)))
    for parts in ([Entries(narrow)], [Entries(short)], [Entries(many)], [Entries(many, torch.arange(4))]):
        assert kernel.attend(query[:, :, :1], parts, 2, 0.25) is None
    for asked, tokens in (
        (query, narrow),
        (query[..., :8], WeightedTokens(keys, values)),
        (query, short),
        (query, many),
        (query[:, :5], WeightedTokens(keys, values)),
    ):
        for causal in (True, False):
            assert prompt.attend(asked, tokens, 0.25, causal=causal) is None
    tokens, valid = WeightedTokens(keys, values), torch.ones(1, 20, dtype=torch.bool)
    assert prompt.attend(query[:, :, :19], tokens, 0.25, causal=True) is None
    weighted = WeightedTokens(keys, values, torch.zeros(1, 2, 20))
    for more in (
        {"valid": valid},
        {"valid": valid[:, :9], "causal": True},
        {"valid": valid.expand(3, -1), "causal": True},
        {"valid": valid.long(), "causal": True},
    ):
        assert prompt.attend(query, tokens, 0.25, **more) is None
    assert prompt.attend(query, weighted, 0.25, causal=True) is None
    assert prompt.attend(query, WeightedTokens(keys, values, torch.zeros(1, 2, 1)), 0.25) is None
    assert prompt.attend(query.double(), WeightedTokens(keys.double(), values.double()), 0.25) is None
    assert prompt.attend(query.requires_grad_(), tokens, 0.25) is None


@needs_c
def test_what_was_read_before_is_looked_at_again():
    """Torch moves a tensor to share it with a process: what was there is free. And a gradient may be wanted by now."""
    query, keys, values = torch.randn(1, 4, 1, 64), *torch.randn(2, 1, 2, 5000, 64).unbind()
    keys, values, mass = keys.clone(), values.clone(), torch.rand(1, 2, 5000)
    part = Entries(WeightedTokens(keys, values, mass))
    expected = kernel.attend(query, [part], 2, 0.25)
    for x in (keys, values, mass):
        x.share_memory_()
    _ = [torch.full((1 << power,), math.nan) for power in range(10, 20) for _ in range(4)]
    assert torch.equal(kernel.attend(query, [part], 2, 0.25).out, expected.out)
    keys.requires_grad_()
    assert kernel.attend(query, [part], 2, 0.25) is None
    with torch.no_grad():
        assert torch.equal(kernel.attend(query, [part], 2, 0.25).out, expected.out)


@needs_c
def test_many_queries_go_to_c_where_it_pays(monkeypatch):
    """Torch has no kernel that bends logits: then C always does."""
    query, tokens = torch.randn(1, 4, 40, 16), WeightedTokens(*torch.randn(2, 1, 2, 40, 16).unbind())
    for pays in (True, False):
        monkeypatch.setattr(prompt, "pays", lambda dtype, pays=pays: pays)
        for softcap in (None, 5.0):
            in_c = pays or softcap is not None
            for causal, attend in ((False, weighted_attention), (True, causal_attention)):
                there = (tokens,) if not causal else (tokens.keys, tokens.values)
                expected = prompt.attend(query, tokens, 0.25, softcap, causal=causal)
                assert (expected is not None) == in_c
                with nullcontext() if in_c else native.off():
                    again = attend(query, *there, 0.25, softcap=softcap)
                got = attend(query, *there, 0.25, softcap=softcap)
                assert torch.equal(got.out, again.out)
                assert expected is None or torch.equal(got.out, expected.out)


@needs_c
def test_places_beyond_two_to_the_31(tmp_path):
    """Two heads that lie 2^31 numbers apart, in a file of which little is there."""
    apart, count, width = 2**31 + 128, 40, 16
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 2 * (apart + count * width))
    base = torch.from_file(str(path), shared=True, size=apart + count * width, dtype=torch.bfloat16)
    keys = base.as_strided((1, 2, count, width), (0, apart, width, 1))
    keys.copy_(torch.randn(1, 2, count, width))
    query, values = (torch.randn(1, 2, size, width).bfloat16() for size in (1, count))
    tokens = WeightedTokens(keys, values)
    found = kernel.attend(query, [Entries(tokens)], 2, 0.25)
    as_exact_as_torch(query, tokens, found)
    near, far = torch.zeros(2, 2, count, dtype=torch.float64)
    for got, where in ((near, keys[0].clone()), (far, keys[0])):
        assert weighing.add_weights(weighing.Noting(got, where), query[0], found.lse[0], 0.25)
    assert torch.equal(near, far)
    assert near.sum(1) == pytest.approx(1, abs=1e-5)
    mean = torch.randn(2, width, dtype=torch.float64)
    assert torch.equal(directions.towards(keys[0], mean), directions.towards(keys[0].clone(), mean))


@needs_c
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_answers_put_together_in_place_are_those_of_the_definition(dtype):
    """Where a token's heads lie together, and where they do not; some saw nothing, in one of the parts or in all."""
    for rows, heads, queries, width in ((2, 3, 301, 40), (1, 5, 1, 129)):
        parts = []
        for turned in (False, True, False):
            out = torch.randn(rows, queries, heads, width + 2).to(dtype).transpose(1, 2)[..., :width]
            lse = torch.randn(rows, queries, heads).transpose(1, 2) * 5  # as torch's kernel may give it
            lse[:, 0, ::3] = lse[:, len(parts), ::4] = -math.inf
            out[lse == -math.inf] = 0
            parts.append(attention.Partial(out.contiguous() if turned else out, lse if parts else lse.contiguous()))
        parts[0].lse[-1, -1, -1], parts[1].lse[-1, -1, -1], parts[2].lse[-1, -1, -1] = 1.0, math.nan, -math.inf
        parts[0].lse[-1, 1, -1], parts[1].lse[0, 1, 0] = math.nan, 1e30
        exact = attention.merge(*(attention.Partial(part.out.double(), part.lse.double()) for part in parts))
        others = [attention.Partial(part.out.clone(), part.lse.clone()) for part in parts[1:]]
        found = merging.merge_into(*parts)
        assert found is parts[0], "it was written over"
        off = (found.out.double() - exact.out).abs() / exact.out.abs().clamp_min(1)
        assert off[~off.isnan()].max() <= torch.finfo(dtype).eps + 4e-6, "it is rounded once"
        assert torch.equal(off.isnan(), exact.out.isnan())
        torch.testing.assert_close(found.lse, exact.lse.float(), rtol=1e-6, atol=1e-5, equal_nan=True)
        for part, before in zip(parts[1:], others, strict=True):
            assert torch.equal(part.out, before.out)
            torch.testing.assert_close(part.lse, before.lse, rtol=0, atol=0, equal_nan=True)
    other = attention.Partial(found.out.double(), found.lse)
    before = found.out.clone()
    assert merging.merge_into(found, other).out.dtype == torch.float64, "numbers of several kinds are torch's"
    assert torch.equal(found.out.nan_to_num(), before.nan_to_num())


# -- the router


def some_classifier(shape, dtype):
    """Queries, what answers them, and how many KV heads there are."""
    rows, heads, group, queries, width, hidden, buckets = shape
    query = torch.randn(rows, heads * group, queries, width).to(dtype)
    first = (torch.randn(heads, width, hidden) / width**0.5).to(dtype), torch.randn(heads, 1, hidden).to(dtype)
    second = (torch.randn(heads, hidden or width, buckets) / 5).to(dtype), torch.randn(heads, 1, buckets).to(dtype)
    return query, Classifier(first if hidden else None, second), heads


def as_doubles(by, weights=torch.Tensor.double):
    """The same in float64, with these weights for its own."""
    return Classifier(*(layer and (weights(layer[0]), layer[1].double()) for layer in (by.inner, by.last)))


@needs_c
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 2, 4, 1, 64, 256, 300), (2, 3, 2, 2, 20, 37, 50), (1, 4, 1, 1, 32, 0, 64), (1, 1, 5, 1, 64, 64, 2080)],
    ids=str,
)
def test_the_classifier_is_that_of_torch(shape, dtype, monkeypatch):
    """Whether a thread has whole heads, or there are too few for all of them."""
    query, by, heads = some_classifier(shape, dtype)
    true = routing_in_torch.classify(query.double(), as_doubles(by), heads)
    found, plain = (form.classify(query, by, heads) for form in (routing, routing_in_torch))
    # Its exponential is two units in the last place off, and their sum another two.
    rounding = 4 * torch.finfo(torch.float32).eps * true.max()
    assert (found - true).abs().max() <= 2 * (plain - true).abs().max() + rounding
    for threads in (2, 8):
        monkeypatch.setattr(native, "threads", lambda threads=threads: threads)
        assert torch.equal(routing.classify(query, by, heads), found)


@pytest.fixture
def in_bytes(monkeypatch):
    """Weights are read in bytes, however few they are, and whether that is faster or not."""
    monkeypatch.setattr(rounded, "LARGE", -1)
    monkeypatch.setattr(native.library(), "kvs_bytes_pay", lambda: 1)


def as_bytes_say(weights):
    """The weights that their bytes stand for; themselves, if there are none."""
    if (found := rounded.in_bytes(weights)) is None:
        return weights.double()
    whole = found.weights.permute(0, 2, 4, 1, 3).flatten(1, 2).flatten(2, 3)
    assert torch.equal(found.sums, whole.sum(1).int())
    unit = found.steps[:, None].double() * found.levels[..., None]
    assert bool(((whole * unit - weights.double()).abs() <= unit * 0.5001).all())
    return whole * unit


@needs_c
@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 4, 1, 64, 256, 320), (2, 3, 2, 2, 20, 64, 32), (1, 4, 1, 1, 32, 0, 64), (1, 1, 5, 1, 128, 1024, 1056),
        (1, 2, 2, 1, 20, 38, 50),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("in_bytes")
def test_the_classifier_in_bytes_says_what_the_numbers_say_that_they_stand_for(shape):
    query, by, heads = some_classifier(shape, torch.bfloat16)
    by.last[0][:, :, 5], by.last[0][:, 7] = 0, 1e-24
    query[0, 0] = 0
    true = routing_in_torch.classify(query.double(), as_doubles(by, as_bytes_say), heads)
    for found in (routing.classify(query, by, heads), routing.classify(query, copy.deepcopy(by), heads)):
        torch.testing.assert_close(found.double(), true.double(), rtol=3e-3, atol=1e-7)


@needs_c
@pytest.mark.usefixtures("in_bytes")
def test_bytes_hide_no_numbers_that_are_none():
    query, by, heads = some_classifier((1, 2, 2, 1, 32, 64, 96), torch.bfloat16)
    query[0, 1, 0, 7] = math.nan
    found = routing.classify(query, by, heads)
    assert found[0, 0].isnan().all()
    assert found[0, 1].isfinite().all()
    for value in (math.inf, math.nan, 3e38):
        by.last[0][0, 3] = value
        assert rounded.in_bytes(by.last[0]) is None


def move(tensors):
    """Elsewhere, as torch does where they are shared with a process."""
    for tensor in tensors:
        old = tensor.data
        tensor.data = old.clone()
        old.fill_(math.nan)


@needs_c
@pytest.mark.usefixtures("in_bytes")
def test_a_classifier_whose_tensors_were_moved_is_read_where_it_is_now():
    query, by, heads = some_classifier((1, 2, 2, 1, 32, 64, 96), torch.bfloat16)
    before = routing.classify(query, by, heads)
    move(by.tensors)
    assert torch.equal(routing.classify(query, by, heads), before)


@needs_c
def test_bytes_are_read_where_weights_are_many_and_in_bfloat16(monkeypatch):
    monkeypatch.setattr(native.library(), "kvs_bytes_pay", lambda: 1)
    for buckets, dtype, wanted in ((512, "bfloat16", True), (512, "float16", False), (96, "bfloat16", False)):
        query, by, heads = some_classifier((1, 2, 2, 1, 32, 256, buckets), getattr(torch, dtype))
        routing.classify(query, by, heads)
        nbytes, rounded_ones = routing.read_of(by)
        weights, *others = (sum(x.nbytes for x in some) for some in (by.tensors[2:3], by.tensors[:2], by.tensors[3:]))
        beside = 4 * heads * (2 * buckets + 256)
        assert rounded_ones == wanted
        assert nbytes == sum(others) + (weights // 2 + beside if wanted else weights)
        with native.off():
            assert routing.read_of(by) == (sum(x.nbytes for x in by.tensors), False)


SOME_LIMITS = [
    Limits(8), Limits(0), Limits(50, visit=300), Limits(50, visit=0.1), Limits(20, mass=0.4),
    Limits(9, visit=0.3, per_token=True),
]  # fmt: skip


@needs_c
@pytest.mark.parametrize("limits", SOME_LIMITS, ids=str)
def test_the_buckets_visited_are_those_of_torch(limits):
    check_visits(routing.visit, limits, "cpu")


@needs_c
def test_runs_that_are_chosen_when_they_are_read_are_those_that_are_chosen_before(monkeypatch):
    """With what stands in for the others, which is known then; and by two threads as by one."""
    scores, sizes, edges, rows = some_buckets(Limits(8), 700)
    lanes, queries, buckets = scores.shape
    pairs, means = torch.randn(1, lanes, rows, 32), torch.randn(2, 1, lanes, buckets, 16)
    query, found = torch.randn(1, 2 * lanes, queries, 16), []
    for before in (False, True):
        monkeypatch.setattr(native, "threads", lambda before=before: 1 if before else 2)
        choice, read_by, left = routing.visit(
            scores, sizes, edges, Limits(8), Staged.on(scores.device, rows - 7, 7), left=True
        )
        runs = Entries(WeightedTokens(pairs[..., :16], pairs[..., 16:]), pairs=pairs, choice=choice)
        runs = runs.chosen() if before else runs
        others = Entries(WeightedTokens(*means.unbind(), left[None, :, 0]))
        found.append((kernel.attend(query, [runs, others], lanes, 0.25), read_by, left))
    (late, *counted), (early, *wanted) = found
    assert torch.equal(late.out, early.out)
    assert torch.equal(late.lse, early.lse)
    assert all(map(torch.equal, counted, wanted))


def some_buckets(limits, buckets=50, lanes=6):
    """Scores of buckets, their sizes, and where they begin in three runs; how many rows there are."""
    queries, runs, rows = 2, 3, 40 * buckets
    scores = 2 * torch.randn(lanes, queries, buckets)  # as products are; or probabilities
    scores = torch.softmax(scores, 2) if limits.mass or limits.per_token else scores
    lengths = torch.randint(0, 12, (lanes, runs, buckets))
    edges = torch.cat([torch.zeros(lanes, runs, 1, dtype=torch.int64), lengths.cumsum(2)], 2)
    edges += torch.cat([torch.zeros(lanes, 1, dtype=torch.int64), lengths.sum(2).cumsum(1)[:, :-1]], 1)[..., None]
    return scores, lengths.sum(1), edges, rows


def check_visits(visit, limits, device, lanes=6):
    """A kernel visits the buckets that torch does."""
    scores, sizes, edges, rows = some_buckets(limits, lanes=lanes)
    given = (x.to(device) for x in (scores, sizes, edges))
    segments, count, left = visit(*given, limits, Staged.on(torch.device(device), rows - 7, 7), left=True)
    segments = segments.made() if isinstance(segments, Choice) else segments
    segments, count, left = Segments(segments.begin.cpu(), segments.length.cpu()), count.cpu(), left.cpu()
    staged = Staged.on(sizes.device, rows - 7, 7)
    wanted, wanted_count, others = routing_in_torch.visit(scores, sizes, edges, limits, staged, left=True)
    assert torch.equal(segments.mask(rows), wanted.mask(rows))
    assert segments.mask(rows)[..., rows - 7 :].all()
    assert torch.equal(count, wanted_count)
    torch.testing.assert_close(left, others)


@needs_c
@pytest.mark.parametrize("shape", [(3, 300, 70, 40), (1, 9, 5, 7), (2, 1057, 32, 128)], ids=str)
def test_buckets_of_keys_are_those_of_torch(shape, numbers):
    """The first of equal ones; what is no number is the largest, as for torch; keys lie where models put them."""
    lanes, count, size, width = shape
    library = native.library()
    keys = (
        torch.randint(-3, 4, (count, lanes, width + 3)).to(numbers).transpose(0, 1)[..., :width]
    )  # products are exact
    centroids = torch.randint(-3, 4, (lanes, size, width)).float()
    centroids[:, size // 2] = centroids[:, 1]
    keys[0, 2], keys[-1, 5], keys[0, 7, 0] = 0, math.nan, math.inf
    found = assigning.assign(keys, centroids)
    if not library.kvs_is_wide():
        assert found is None
        return
    with native.off():
        expected = buckets_of_heads.assign(keys, centroids)
    assert torch.equal(found, expected)
    assert torch.equal(buckets_of_heads.assign(keys, centroids), expected)
    assert found[0, 2] == 0
    assert assigning.assign(keys[:, :3], centroids) is None
    assert assigning.assign(keys, centroids[..., :4]) is None


@needs_c
def test_buckets_go_by_all_bits_of_centroids(numbers):
    """Centroids that differ in their last bits alone, as float32 has them; and an infinite one."""
    keys = torch.ones(1, 40, 24, dtype=numbers)
    keys[0, ::3] = -1
    centroids = torch.full((1, 50, 24), 1 / 3)
    centroids[0, :, 5] += torch.arange(50) * 2**-24
    found = assigning.assign(keys, centroids)
    if found is None:
        assert not native.library().kvs_is_wide()
        return
    whole = centroids.double().sum(2)
    least, most = whole[0, found[0, 0]] - whole.min(), whole.max() - whole[0, found[0, 1]]
    assert max(least, most) <= 24 * 2**-24, "as near as sums in float32 are"
    assert torch.equal(found[0, ::3].unique(), found[0, :1])
    centroids[0, 7] = math.inf
    assert assigning.assign(keys, centroids)[0, 1] == 7


@needs_c
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_directions_are_those_of_torch(dtype, monkeypatch):
    for width in (64, 7):
        keys = torch.randn(3, 1030, width + 5).to(dtype)[:, :, 3 : 3 + width]
        keys[0, 5], keys[1, 7] = 0, math.nan
        mean = keys[2:].sum(1, dtype=torch.float64).expand(3, -1)
        for some in (keys, keys[:, ::3], keys[:, :0]):
            right = directions_in_torch.towards(some, mean)
            torch.testing.assert_close(directions.towards(some, mean), right, rtol=1e-12, atol=1e-12, equal_nan=True)
        for some in (keys, keys[:, ::3], keys[:, :1]):
            for name in ("sum_of_directions", "total"):
                right, summed = getattr(directions_in_torch, name)(some), getattr(directions, name)
                found = summed(some)
                torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12, equal_nan=True)
                with monkeypatch.context() as alone:
                    alone.setattr(native, "threads", lambda: 1)
                    torch.testing.assert_close(summed(some), found, rtol=0, atol=0, equal_nan=True)
    assert directions.towards(keys, mean.float()) is None, "sums of fewer bits are not what was asked for"


@needs_c
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_one_that_is_no_number_is_found(dtype):
    buffer = torch.randn(2, 3000, 3, 41).to(dtype)
    keys, values = buffer[..., 3:33].transpose(1, 2), buffer[..., 33:].transpose(1, 2)
    buffer[..., :3] = math.nan  # beside them
    buffer[0, 5, 1, 3], buffer[0, 6, 1, 3] = torch.finfo(dtype).max, torch.finfo(dtype).min
    assert finite.are_numbers((keys, values)).tolist() == [True, True]
    for x, at in ((keys, (0, 0, 0, 0)), (keys, (1, 2, 2999, 29)), (values, (1, 0, 1717, 7)), (values, (0, 2, 7, 0))):
        for wrong in (math.nan, math.inf, -math.inf):
            was, x[at] = x[at].clone(), wrong
            assert finite.are_numbers((keys, values)).tolist() == [x is not keys, x is not values]
            with native.off():
                assert finite.are_numbers((keys, values)).tolist() == [x is not keys, x is not values]
            x[at] = was
    for some in ((keys[:, :, :0], values[:, :, :0]), (keys[0], values[0])):
        assert finite.are_numbers(some).tolist() == [True, True]
        with native.off():
            assert finite.are_numbers(some).tolist() == [True, True]


@needs_c
def test_places_are_numbered_as_by_torch():
    x = torch.randn(5, 600, dtype=torch.float64)
    x[1], x[2], x[3] = x[1].round(), 0.0, x[3] * 1e-300
    x[2, ::3], x[4, 7::90], x[4, :5], x[3, 9] = -0.0, math.nan, -math.inf, math.inf
    for some in (x, x[:, 1::2], x[:3, :1], x[:0], x[:, :0]):
        for most in {0, some.shape[1] // 3, some.shape[1]}:
            right = places_in_torch.least_in_front(some, most)
            assert torch.equal(places.least_in_front(some, most), right), most
        count = some.shape[1]
        several = [(count // 4, count // 4), (count // 2, count // 3), (0, 3), (count // 9, 5)]
        for start, parts, bits in ((0, [(count, count // 3)], 24), (count // 8, several, 16), (0, several, 4)):
            with native.off():
                right = all_places.best(some, start, parts, bits)
            assert torch.equal(places.best(some, start, parts, bits), right), parts
    for there in (x > 0.5, (x > 0.5)[:, ::2], (x > 0.5).T, (x > 0.5).view(5, 3, 200), x != x, x[:, :0] > 0):
        assert torch.equal(places.in_front(there), places_in_torch.in_front(there))
    assert places.least_in_front(x.float(), 1) is None
    assert places.in_front(x) is None
    assert places.best(x, 1, [(x.shape[1], 2)], 24) is None, "a part that goes on behind the end"


@needs_c
def test_places_are_copied_as_by_torch():
    rows = torch.randn(4, 900, 2, 33)
    index = torch.randint(900, (4, 700))
    each = [rows[:, :, 0], rows[:, :, 1].half(), rows.bfloat16()[:, :, 1, 3:], rows[:1, :, 0, :8].expand(4, -1, -1)]
    each.append(torch.randint(99, (4, 900, 2)))
    for some in (index, index[:, ::50], index[:, :0], index[:, :1].expand(-1, 90)):
        found = places.chosen_of(each, some)
        assert all(map(torch.equal, found, places_in_torch.chosen_of(each, some)))
        assert [x.dtype for x in found] == [x.dtype for x in each]
    index[3, 5] = 900
    assert places.chosen_of(each, index) is None, "there is no such place: torch says so"


@needs_c
def test_a_few_numbers_of_many_tensors_are_those_at_the_places_asked_for():
    """Bit for bit, of kinds of every size, and none of a tensor that lies otherwise."""
    kinds = (
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.uint8,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.bool,
    )
    parts = torch.tensor([0.0, 0.5, 1.999, 2.3, 4.9999999999], dtype=torch.float64)
    each = [
        torch.randn(count, dtype=torch.float64).mul(50).to(kind) for kind in kinds for count in (0, 1, 5, 6, 10007)
    ] + [torch.tensor(3.0), torch.randn(70, 90)[10:40]]
    found = places.few_of_each(each, parts).split([min(x.numel(), 5) * x.element_size() for x in each])
    for x, some in zip(each, found, strict=True):
        at = (parts * (x.numel() / 5)).long() if x.numel() > 5 else torch.arange(x.numel())
        assert torch.equal(some, x.reshape(-1)[at].contiguous().view(torch.uint8) if x.numel() else some[:0])
    gone = torch.randn(100)
    gone.untyped_storage().resize_(0)
    for other in (torch.randn(9, 9).T, torch.randn(9, 9)[:, 2:], gone, torch.nn.Parameter(torch.randn(9))):
        assert places.few_of_each([each[3], other], parts) is None


@needs_c
@pytest.mark.parametrize(
    ("kept", "order"),
    [(kept, "as they lie") for kept in (700, 500, 3, 0)]
    + [(kept, order) for kept in (700, 500) for order in ("other parts first", "any", "some twice")],
)
def test_places_move_to_the_front_of_what_there_is(kept, order):
    """Those that are held and new ones: as if they were copied out of both, and nothing behind them has changed."""
    new = torch.randn(4, 3, 200, 40).transpose(1, 2)
    index = torch.rand(4, 700, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :kept]
    if order != "any":
        index = index.sort(1).values
    if order == "other parts first":
        index = index.roll(kept // 3, 1)
        index[1:3] = torch.cat([index[1:3, ::7], index[1:3]], 1)[:, :kept]
    if order == "some twice":
        index[:, ::5] = index[:, 1::5][:, : len(index[0, ::5])] if kept % 5 == 0 else index[:, :1]
    if kept == 3 and order == "as they lie":
        index = torch.tensor([[0, 1, 2], [4, 499, 500], [500, 501, 699], [1, 3, 500]])
    keys, values, scores = torch.randn(4, 900, 40), torch.randn(4, 900, 2, 48).bfloat16(), torch.randn(4, 900).double()
    each = [keys, values[:, :, 1, :40], scores]
    more = [new[:, :, 0], new[:, :, 1].bfloat16(), new[:, :, 0, 0].double()]
    both = [torch.cat([x[:, :500], y], 1) for x, y in zip(each, more, strict=True)]
    last = max(kept, 500)
    behind, beside = [x[:, last:].clone() for x in each], values[:, :, 0].clone()
    lanes = torch.arange(4)[:, None]
    assert places.keep_in_place(index, 500, each, more)
    for x, whole, rest in zip(each, both, behind, strict=True):
        assert torch.equal(x[:, :kept], whole[lanes, index])
        assert torch.equal(x[:, last:], rest)
    assert torch.equal(values[:, :, 0], beside)


@needs_c
@pytest.mark.parametrize(("start", "stop"), [(4, 12), (0, 70), (300, 300), (80, 400), (4, 400)])
def test_a_gap_is_closed_and_nothing_else_moves(start, stop):
    """In tensors whose places lie along other dimensions, of which others are in use; small, large and of nothing."""
    each = [torch.randn(2, 8, 500, 40).bfloat16(), torch.randn(2, 500), torch.randn(3, 2, 450, 2).double().long()]
    each.append(torch.zeros(2, 500, 0))
    dims, used, before = [2, 1, 2, 1], [500, 400, 430, 500], [x.clone() for x in each]
    assert places.close_gap(each, dims, used, start, stop)
    for x, dim, there, old in zip(each, dims, used, before, strict=True):
        left = there - (stop - start)
        expected = torch.cat([old.narrow(dim, 0, start), old.narrow(dim, stop, there - stop)], dim)
        assert torch.equal(x.narrow(dim, 0, left), expected)
        assert torch.equal(x.narrow(dim, there, x.shape[dim] - there), old.narrow(dim, there, x.shape[dim] - there))


@needs_c
def test_a_gap_that_is_none_of_what_is_in_use_stays():
    x = torch.randn(2, 30, 4)
    before = x.clone()
    for used, start, stop in ((20, 5, 21), (20, 6, 5), (31, 5, 6), (20, -1, 5)):
        assert not places.close_gap([x], [1], [used], start, stop)
    assert not places.close_gap([x.transpose(1, 2)], [2], [20], 5, 6), "not contiguous"
    assert torch.equal(x, before)


@needs_c
def test_where_a_place_is_none_all_stay():
    x, new = torch.randn(2, 30, 4), torch.randn(2, 5, 4)
    before = x.clone()
    for wrong in ([[0, 1, 2], [0, 1, 15]], [[-1, 1, 2], [0, 1, 2]]):
        assert not places.keep_in_place(torch.tensor(wrong), 10, [x], [new])
    assert not places.keep_in_place(torch.arange(12).expand(2, -1), 10, [x[:, :11]], [new]), "no room"
    assert torch.equal(x, before)


@needs_c
def test_the_report_names_what_computes_a_step():
    import zoo  # and transformers, for which the other tests need not wait when they run once more

    ids = zoo.tokens(1, 20)
    for dtype, off, wanted in (
        (torch.float32, False, "C ("),
        (torch.float32, True, "torch"),
        (torch.float64, False, "torch"),
    ):
        model = zoo.build("llama").to(dtype)
        cache = kvsketch.prefill(model, ids, kvsketch.make_cache(model, "uniform(keep=0.5)"))
        with native.off() if off else nullcontext():
            report = cache.report()
        assert report.kernels.startswith(wanted)
        assert f"steps are computed by {report.kernels}\n" in str(report)


# -- built, loaded, or left alone


@needs_c
def test_a_damaged_library_is_made_anew(fresh):
    path = build.built()
    assert path.is_relative_to(fresh)
    path.write_bytes(path.read_bytes()[:-100])
    assert build.built() == path
    assert native.name().startswith("C (")


@needs_c
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"0" * 64])
def test_a_damaged_digest_is_no_harm(fresh, content):
    path = build.built()
    (path.parent / build.DIGEST).write_bytes(content)
    assert build.built() == path
    assert native.name().startswith("C (")


@pytest.mark.parametrize("variable", ["CC", "CFLAGS"])
def test_what_no_shell_would_take_is_said_and_torch_does_it(fresh, monkeypatch, caplog, variable):
    monkeypatch.setenv(variable, "gcc 'with a quotation mark that is open")
    assert native.name() == "torch"
    assert f"{variable} is" in caplog.text


@needs_c
def test_what_is_no_library_though_its_digest_is_right_is_not_used(fresh, caplog):
    path = build.built()
    path.write_bytes(b"for another kind of machine")
    (path.parent / build.DIGEST).write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    assert native.name() == "torch"
    assert len(caplog.records) == 1


@needs_c
def test_files_of_all_in_a_group_are_no_hindrance(fresh):
    """Where new files are open to the user's group, what is made here is not."""
    before = os.umask(0o002)
    try:
        assert native.name().startswith("C (")
        assert not any(path.stat().st_mode & 0o022 for path in (fresh, *fresh.rglob("*")))
    finally:
        os.umask(before)


@needs_c
@pytest.mark.parametrize("name", ["kernels.so", ".", pytest.param("of another user", marks=only_root)])
def test_what_others_can_write_to_is_not_loaded(fresh, name, caplog):
    path = build.built()
    if name == "of another user":
        os.chown(path, 12345, -1)
    else:
        (path.parent / name).chmod(0o777)
    assert native.library() is None
    assert "others can write" in caplog.text
    assert native.name() == "torch"
    query, keys, values = torch.randn(1, 2, 1, 8), *torch.randn(2, 1, 2, 9, 8).unbind()
    found = read(query, [(Entries(WeightedTokens(keys, values)),)], 2, 0.3)
    torch.testing.assert_close(found.out, attention.exact_attention(query, keys, values, 0.3).out)


def without_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    return "no-such-compiler"


def failing_compiler(monkeypatch, tmp_path):
    script = tmp_path / "broken"
    script.write_text("#!/bin/sh\necho it hurts >&2; exit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    return "it hurts"


def no_folder(monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file, where there should be a folder")
    return "cannot be compiled into"


def read_only_folder(monkeypatch, tmp_path):
    if not Path("/sys/kernel").is_dir():
        pytest.skip("there is no folder in which nobody can write")
    monkeypatch.setenv("KVSKETCH_CACHE", "/sys/kernel/kvsketch")
    return "cannot be compiled into"


@needs_c
@pytest.mark.parametrize("trouble", [without_compiler, failing_compiler, no_folder, read_only_folder])
def test_without_a_build_torch_does_it_and_one_line_says_why(fresh, monkeypatch, tmp_path, caplog, trouble):
    said = trouble(monkeypatch, tmp_path)
    assert native.library() is None
    assert native.library() is None
    assert len(caplog.records) == 1
    assert said in caplog.text


@needs_c
def test_where_there_is_no_room_for_a_build_torch_does_it(fresh, caplog):
    """No file may be longer than a part of what the kernels take, as on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        assert native.name() == "torch"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(caplog.records) == 1
    assert not [path for path in fresh.rglob("*") if path.is_file()]


@needs_c
@pytest.mark.skipif(not build.places(), reason="no levels of instructions are known of such machines")
def test_a_wheel_with_builds_needs_no_compiler(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("KVSKETCH_WHEEL", "native")
    wheels = pytest.importorskip("hatchling.builders.wheel")
    (wheel,) = wheels.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    assert "-py3-none-" in Path(wheel).name
    assert not wheel.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "there", [name for name in file.namelist() if "/built/" in name])
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "there" / build.PREBUILT.relative_to(ROOT / "src"))
    assert {path.name for path in build.PREBUILT.iterdir()} == set(build.places())
    names = {"v4-bf16": "AVX-512", "v4": "AVX-512", "v3": "AVX2", "any": "portable"}
    monkeypatch.setenv("CC", "no-such-compiler")
    for place in build.fitting_places():
        assert build.built() == build.PREBUILT / place / build.LIBRARY
        native.loaded.cache_clear()
        assert native.name() == f"C ({names[place.split('-', 2)[2]]})"
        (build.PREBUILT / place / build.SOURCES).write_text("others")  # not made from these: the next best is taken
    monkeypatch.delenv("CC")
    assert build.built().is_relative_to(fresh)


def test_a_wheel_of_an_unknown_kind_is_refused(monkeypatch, tmp_path):
    wheels = pytest.importorskip("hatchling.builders.wheel")
    monkeypatch.setenv("KVSKETCH_WHEEL", "all")
    with pytest.raises(ValueError, match="KVSKETCH_WHEEL is 'all', and must be native, or not be set"):
        list(wheels.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))


def test_the_switch_is_auto_or_off(fresh, monkeypatch, caplog):
    monkeypatch.setenv(native.SWITCH, "off")
    assert native.library() is None
    assert not caplog.records
    native.loaded.cache_clear()
    monkeypatch.setenv(native.SWITCH, "fast")
    with pytest.raises(ValueError, match="'fast', and must be auto or off"):
        native.library()


ASKING = """
import hashlib, os, torch
from kvsketch.attention import WeightedTokens
from kvsketch.kernels.native import attention as kernel
from kvsketch.kernels.sources import Entries
torch.set_num_threads(2)
torch.manual_seed(0)
query, keys, values = torch.randn(1, 8, 1, 64), *torch.randn(2, 1, 2, 9000, 64).unbind()
ask = lambda: kernel.attend(query, [Entries(WeightedTokens(keys, values))], 2, 0.125).out
"""
TOGETHER = """
torch.randn(512, 512) @ torch.randn(512, 512)
torchs = set(os.listdir("/proc/self/task"))
here = ask()
assert set(os.listdir("/proc/self/task")) == torchs, "a step has more threads than torch, or others"
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rpartition("/")[2]}
assert len(runtimes) == 1, runtimes
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(ask(), here) else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(ask(), here)
torch.set_num_threads(4)
little = [Entries(WeightedTokens(*torch.randn(2, 1, 2, 500, 64).unbind()))]  # for two of them
known = None
for turn in range(20):
    ask(), kernel.attend(query, little, 2, 0.125)
    threads = set(os.listdir("/proc/self/task"))
    known = threads if turn == 3 else known
    assert known is None or threads == known, "threads end, and others begin"
"""


@needs_c
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_there_is_one_runtime_of_threads_and_a_forked_process_goes_on():
    subprocess.run([sys.executable, "-c", ASKING + TOGETHER], check=True, timeout=100)


AT_ONCE = "print(*{hashlib.sha256(ask().numpy()).hexdigest() for _ in range(300)})"


@needs_c
def test_threads_that_are_preempted_and_processes_at_once_all_get_the_same_answer():
    """More threads than cores: none waits for ever, and all say the same."""
    at_once = [subprocess.Popen([sys.executable, "-c", ASKING + AT_ONCE], stdout=subprocess.PIPE) for _ in range(3)]
    try:
        said = [process.communicate(timeout=100)[0].decode().split() for process in at_once]
    finally:
        for process in at_once:
            process.kill()
    assert all(process.returncode == 0 for process in at_once)
    assert len({word for words in said for word in words}) == 1, said


ON_ONE = """
import time
ask()  # a team is made
one = {min(os.sched_getaffinity(0))}
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), one)
def taken(threads):
    torch.set_num_threads(threads)
    began = time.perf_counter()
    for _ in range(100):
        ask()
    return time.perf_counter() - began
print(min(taken(2) / taken(1) for _ in range(3)))
"""


@needs_c
@pytest.mark.skipif(sys.platform != "linux", reason="binds threads to a core")
def test_two_threads_on_one_core_give_up_waiting_for_each_other():
    """Else they take seventeen times as long as one: each turns until the system takes it aside."""
    done = subprocess.run([sys.executable, "-c", ASKING + ON_ONE], check=True, timeout=100, capture_output=True)
    assert float(done.stdout) < 2


EVERY_KERNEL = (
    "definition or classifier or bytes or buckets_visited or chosen_when or signs_are_those or centres_are "
    "or same_bits or directions_are_those or places_are or places_move or place_is_none or numbered_tokens "
    "or no_number or entries_got or equal_values or not_hidden or nobody_beside or buckets_of_keys or all_bits "
    "or put_together or turn_logits or few_numbers or next_to_nothing or looked_at_again"
)


def once_more(chosen, cache, **environment):
    """These very tests, and those of walks and of single tokens, in a process of its own; none is left out."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
    command += ["-k", chosen, str(HERE)]
    command += [str(HERE.with_name(f"test_{name}.py")) for name in ("native_walk", "again", "no_memory")]
    given = os.environ | environment | {"KVSKETCH_CACHE": str(cache), AGAIN: "1"}
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "skipped" not in done.stdout, "what cannot be built is not tested"


@needs_c
@pytest.mark.slow
@pytest.mark.skipif(ONCE_MORE, reason="once is enough")
def test_sanitizers_find_nothing(tmp_path):
    """With every access to memory and all arithmetic watched."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc brings the sanitizer")
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    once_more(
        f"{EVERY_KERNEL} or one_call or beyond_the_runs or no_runs or buckets or layouts or next_to_nothing "
        "or gets_no_memory or few_queries or (holds_the_same and (estimate or snapkv))",
        tmp_path,
        CC=compiler,
        CFLAGS="-O0 -g1 -fno-var-tracking -fsanitize=address,undefined -fno-sanitize-recover=all",
        LD_PRELOAD=runtime.stdout.strip(),
        ASAN_OPTIONS="detect_leaks=0",
    )


@needs_c
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64" or ONCE_MORE, reason="levels of x86-64; and once is enough")
@pytest.mark.parametrize("level", ["v3", "any"])
def test_processors_without_newer_instructions_compute_the_same(tmp_path, level):
    (place,) = (place for place in build.places() if place.endswith(f"-{level}"))
    if place not in build.fitting_places():
        pytest.skip(f"this processor has not the instructions of {level}")
    quickly = "-O1"  # compiled in a third of the time
    once_more(EVERY_KERNEL, tmp_path, CFLAGS=" ".join([*build.LEVELS["x86_64"][level].flags, quickly]))
