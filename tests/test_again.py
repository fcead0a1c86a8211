"""A token that comes as the one before it takes the short road, in C, and nobody can tell."""

import copy
import gc
import io
import math
import random
import weakref
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing

from drawn import normal
from kvsketch.caches.core.again import Again
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.spans import Spans
from kvsketch.caches.core.tokens import NewTokens, Unrotated
from kvsketch.caches.registry import parse_spec
from kvsketch.kernels import native
from kvsketch.kernels.native.attention import MOST_QUERIES
from made_index import make_index
from uneven import uneven

HEADS, GROUP, WIDTH, SCALE = 2, 2, 16, 0.25
MASS = "h2o(keep=0.4, window=40, weights='mass')"
WITH_ESTIMATE = "saap(index={index!r}, probes=2, window=40, staging=32, full_layers=0, estimate=True)"
SPECS = [
    "exact",
    "uniform(keep=0.4, window=40)",
    "streaming_llm(keep=90)",
    "balancekv(keep=0.4, window=40)",
    "keydiff(keep=0.4, window=40)",
    "saap(index={index!r}, probes=2, window=40, staging=32, full_layers=0)",
    WITH_ESTIMATE,
    "h2o(keep=0.4, window=40)",
    "tova(keep=0.4, window=40)",
    "snapkv(keep=0.4, window=40)",
    "kvzip(keep=0.4, window=40)",
]
WEIGHTED = "keydiff(keep=0.4, window=40, weights='mass')"
GO_ON = [spec for spec in SPECS if spec.startswith(("keydiff", "kvzip", "uniform", "balancekv"))]
needs_c = pytest.mark.skipif(native.library() is None, reason="there is no C compiler")


@pytest.fixture
def served(monkeypatch):
    """How many tokens took the short road."""
    taken, take = [], Again.take

    def counted(self, *given, **more):
        found = take(self, *given, **more)
        taken.extend([1] * (found is not None))
        return found

    monkeypatch.setattr(Again, "take", counted)
    return taken


def some_protected(rows):
    """The same tokens of every row."""
    return [Spans(((20, 65),))] * rows


def come(layer, count, rows, seed, *, apart=False, softcap=None, group=GROUP, dtype=torch.float32, sinks=None):
    """So many tokens at once; `apart`: their heads do not lie as usual."""
    keys, values, unrotated = (normal(rows, HEADS, count, WIDTH, seed=seed + n).to(dtype) for n in range(3))
    query, asked = (normal(rows, HEADS * group, count, WIDTH, seed=seed + n).to(dtype) for n in (3, 4))
    if apart:
        keys, query = (
            x.transpose(1, 2).contiguous().transpose(1, 2).repeat(1, 1, 2, 1)[:, :, ::2] for x in (keys, query)
        )
    return layer.read(query, NewTokens(keys, values, None, Unrotated(asked, unrotated)), SCALE, softcap, sinks=sinks)


def happen(layer, kind, rows, seed):
    """One of the things that happen to a layer between single tokens; the layer, its rows, and what was answered."""
    if kind == "copy":
        return copy.deepcopy(layer), rows, None
    if kind == "load":
        loaded = LayerCache(layer.config, 1, spans_of=layer.spans_of)
        tensors, numbers = layer.state()
        loaded.restore({name: x.clone() for name, x in tensors.items()}, numbers)
        return loaded, rows, None
    if kind == "rows":
        layer.map_rows([0] * (3 - rows))
        return layer, 3 - rows, None
    if kind == "crop":
        there = min(length - left for length, left in zip(layer.lengths, layer.left, strict=True))
        layer.crop(min(2, there - 1))
        return layer, rows, None
    if kind == "torch":
        with native.off():
            return layer, rows, come(layer, 1, rows, seed)
    if kind == "inference":
        with torch.inference_mode():
            return layer, rows, come(layer, 1, rows, seed)
    if kind == "moved":
        # As to another process: all that it holds goes to other memory, and what was there is free, and written to.
        ForkingPickler(io.BytesIO()).dump(layer)
        _ = [torch.full((1 << power,), math.nan) for power in range(4, 16) for _ in range(20)]
        return layer, rows, come(layer, 1, rows, seed)
    if kind == "sinks":
        return layer, rows, come(layer, 1, rows, seed, sinks=torch.ones(HEADS * GROUP))
    if kind == "softcap":
        return layer, rows, come(layer, 1, rows, seed, softcap=2.0)
    if kind == "gradient":
        query = normal(rows, HEADS * GROUP, 1, WIDTH, seed=seed).requires_grad_()
        keys = normal(rows, HEADS, 1, WIDTH, seed=seed)
        with torch.enable_grad():
            found = layer.read(query, NewTokens(keys, keys, None, Unrotated(query.detach(), keys)), SCALE)
        assert found.out.requires_grad
        return layer, rows, found
    return layer, rows, come(layer, 9 if kind == "some" else 1, rows, seed, apart=kind == "apart")


@needs_c
@pytest.mark.parametrize(("spec", "protected"), [*((spec, False) for spec in SPECS), (WITH_ESTIMATE, True)])
def test_whatever_happens_it_answers_and_holds_the_same(spec, protected, served, tmp_path):
    index = str(make_index(tmp_path / "index", heads=HEADS, width=WIDTH, buckets=6))
    config, draw = parse_spec(spec.format(index=index)), random.Random(0)
    kinds = ["copy", "load", "rows", "crop", "torch", "gradient", "some", "apart", "inference", "moved", "softcap"]
    kinds.append("sinks")
    kinds = draw.sample(kinds, len(kinds)) * 2
    spans = some_protected if protected else None
    short, long, rows = LayerCache(config, 1, spans_of=spans), LayerCache(config, 1, spans_of=spans), 1
    with torch.no_grad():
        for layer in (short, long):
            come(layer, 150, rows, 0)
        for number in range(16 * len(kinds)):
            kind = kinds[number // 16] if number % 16 == 15 else "one"
            short, after, found = happen(short, kind, rows, 10 * number)
            long.not_yet = 2
            long, rows, expected = happen(long, kind, rows, 10 * number)
            assert long.again is None
            assert after == rows
            assert (found is None) == (expected is None)
            if found is not None:
                assert torch.equal(found.out, expected.out), (number, kind)
                assert torch.equal(found.lse, expected.lse), (number, kind)
    mine, others = short.state(), long.state()
    assert mine[1] == others[1]
    assert mine[0].keys() == others[0].keys()
    for name, x in mine[0].items():
        assert torch.equal(x, others[0][name]), name
    assert len(served) > 3 * len(kinds)


@needs_c
@torch.no_grad()
@pytest.mark.parametrize("protected", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", [*(spec for spec in SPECS if "index" not in spec), MASS])
def test_all_but_the_first_of_many_single_tokens_take_it(spec, dtype, protected, served):
    """Also those with which something leaves the window, and those behind them; they answer and hold the same."""
    spans = some_protected if protected and spec != "exact" else None
    short, long = (LayerCache(parse_spec(spec), 1, spans_of=spans) for _ in range(2))
    for number in range(-1, 96):
        long.not_yet = 2
        count = 150 if number < 0 else 1
        found, expected = (come(layer, count, 1, 10 * number + 10, dtype=dtype) for layer in (short, long))
        assert torch.equal(found.out, expected.out), number
    assert len(served) >= 93, "but where there must be more room"
    mine, others = short.state(), long.state()
    assert mine[1] == others[1]
    for name, x in mine[0].items():
        assert torch.equal(x, others[0][name]), name


@needs_c
@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "rows", "protected"),
    [(spec, rows, False) for spec in (*GO_ON, WEIGHTED) for rows in (1, 2)] + [(spec, 1, True) for spec in GO_ON[::2]],
)
def test_it_goes_on_behind_a_block_that_left(kind, rows, protected, served):
    """Of heads with other budgets too: what is read then lies elsewhere, or is more, and answers are the same."""
    spans = some_protected if protected else None
    short, long = uneven(kind, spans_of=spans), uneven(kind, spans_of=spans)
    roads, lefts = [], []
    for number in range(-1, 60):
        long.not_yet = 2
        count = 300 if number < 0 else 1
        found, expected = (come(layer, count, rows, 10 * number + 10) for layer in (short, long))
        assert torch.equal(found.out, expected.out), number
        roads.append(short.again)
        lefts.append(short.left)
    behind = [a is b for a, b, x, y in zip(roads[2:], roads[3:], lefts[2:], lefts[3:], strict=False) if x != y]
    assert len(behind) >= 60 // short.config.leaving - 1
    assert all(behind)
    mine, others = short.state(), long.state()
    assert mine[1] == others[1]
    assert all(torch.equal(x, others[0][name]) for name, x in mine[0].items())


@needs_c
@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_goes_on_where_the_window_grows(dtype, rows, served):
    """Its buffers are others then: those before are nobody's."""
    short, long = (LayerCache(parse_spec("exact"), 1) for _ in range(2))
    rooms, roads = set[int](), list[Again | None]()
    for number in range(-1, 150):
        long.not_yet = 2
        count = 100 if number < 0 else 1
        found, expected = (come(layer, count, rows, 10 * number + 10, dtype=dtype) for layer in (short, long))
        assert torch.equal(found.out, expected.out), number
        assert torch.equal(found.lse, expected.lse), number
        rooms.add(short.window.keys.buffer.shape[2])
        roads.append(short.again)
        if number == 0:
            before = weakref.ref(short.window.keys.buffer)
    assert len(rooms) > 4
    assert len(served) == 149, "all but the first"
    assert all(road is roads[-1] for road in roads[1:])
    gc.collect()
    assert before() is None
    mine, others = short.state(), long.state()
    assert mine[1] == others[1]
    assert all(torch.equal(x, others[0][name]) for name, x in mine[0].items())


@needs_c
@torch.no_grad()
def test_what_lay_elsewhere_before_a_block_left_is_gone():
    """A road that goes on keeps nothing of where entries were: neither itself, nor the layer for it."""
    layer = LayerCache(parse_spec("keydiff(keep=0.4, window=40)"), 1)
    come(layer, 300, 1, 0)
    come(layer, 1, 1, 1)
    (bundle,) = layer.streams.only.past.bundles
    before, road = weakref.ref(bundle.holding.weighted), layer.again
    for number in range(30):
        come(layer, 1, 1, 10 * number)
    gc.collect()
    assert layer.again is road
    assert before() is None


@needs_c
@torch.no_grad()
def test_what_comes_right_behind_a_block_that_left_does_not_close_the_road(served):
    """What was made ready there has served nobody yet, but the one before it had."""
    layer = LayerCache(parse_spec("keydiff(keep=0.4, window=40)"), 1)
    come(layer, 150, 1, 0)
    left, number = layer.left, 0
    while layer.left == left or len(served) < 2:
        number += 1
        come(layer, 1, 1, 10 * number)
    with native.off():
        come(layer, 1, 1, 0)
    before = len(served)
    come(layer, 1, 1, 1)
    come(layer, 1, 1, 2)
    assert len(served) == before + 1


@needs_c
@torch.no_grad()
def test_more_queries_than_c_answers_at_once_take_the_long_road(served):
    layer = LayerCache(parse_spec("exact"), 1)
    for number in range(4):
        come(layer, 1, 1, 10 * number, group=MOST_QUERIES + 1)
    assert not served
    for number in range(4):
        come(layer, 1, 1, 10 * number, group=MOST_QUERIES)
    assert len(served) == 3


@needs_c
def test_answers_are_their_owners_and_no_room_costs_no_more_than_a_step(served):
    """Whoever keeps one finds it as it was, and may move it; more tokens than there was room for come in a row."""
    short, long, answers = LayerCache(parse_spec("exact"), 1), LayerCache(parse_spec("exact"), 1), []
    with torch.no_grad():
        for layer in (short, long):
            come(layer, 150, 1, 0)
        ranks = short.streams.only.window.ranks
        for number in range(90):
            long.not_yet = 2
            last = ranks.length + 1 == ranks.buffer.shape[1]
            found, expected = (come(layer, 1, 1, 10 * number, softcap=9.0 if last else None) for layer in (short, long))
            found.lse.share_memory_()
            answers.append((found, expected))
    for found, expected in answers:
        assert torch.equal(found.out, expected.out)
        assert torch.equal(found.lse, expected.lse)
    assert len(served) > 80
    assert torch.equal(*(layer.streams.only.window.ranks.view for layer in (short, long)))


@needs_c
def test_where_gradients_may_come_answers_are_nobody_elses(served):
    """Who writes to one, or to another after it was used, may do so as on the long road, whatever mode was before."""
    layer, weight = LayerCache(parse_spec("exact"), 1), torch.nn.Parameter(torch.ones(WIDTH))
    with torch.no_grad():
        come(layer, 50, 1, 0)
        for number in range(3):
            come(layer, 1, 1, 10 * number)
    taken = len(served)
    used, written, another = (come(layer, 1, 1, 10 * number).out for number in range(3))
    loss = (used * weight).sum()
    written.mul_(2)
    another.mul_(weight)
    loss.backward()
    torch.testing.assert_close(weight.grad, used.sum((0, 1, 2)))
    assert taken == 2
    assert len(served) > taken


@needs_c
@torch.no_grad()
@pytest.mark.parametrize("turned", ["query", "keys", "values"])
def test_a_view_that_turns_signs_is_read_as_torch_reads_it(turned):
    def token(seed, *, view):
        given = {"query": normal(1, HEADS * GROUP, 1, WIDTH, seed=seed)}
        given |= {name: normal(1, HEADS, 1, WIDTH, seed=seed + n) for n, name in enumerate(("keys", "values"), 1)}
        if view:
            given[turned] = torch._neg_view(-given[turned])
        return given["query"], NewTokens(given["keys"], given["values"])

    found, expected = (LayerCache(parse_spec("exact"), 1) for _ in range(2))
    for seed in range(0, 60, 10):
        answers = [
            layer.read(*token(seed, view=view), SCALE).out for layer, view in ((found, seed == 40), (expected, False))
        ]
        torch.testing.assert_close(*answers)


@needs_c
def test_more_rows_than_c_asks_a_classifier_for_take_the_long_road(served, tmp_path):
    index = str(make_index(tmp_path / "index", heads=HEADS, width=WIDTH, buckets=6))
    layer = LayerCache(parse_spec(WITH_ESTIMATE.format(index=index)), 1)
    come(layer, 150, 17, 0)
    for seed in range(3):
        come(layer, 1, 17, seed)
    assert not served
    assert layer.seen == 153
    for rows in (16, 1):
        layer.map_rows([*range(rows)])
        layer.not_yet = 0
        for seed in range(3):
            come(layer, 1, rows, 10 + seed)
    assert len(served) >= 2, "of fewer rows it is asked"
