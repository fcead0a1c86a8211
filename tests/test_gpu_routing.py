"""Which buckets queries visit, in Triton: on a GPU where there is one, else under Triton's interpreter."""

import math

import pytest
import torch

from kvsketch.kernels.routing import expect, reference, rounded
from kvsketch.kernels.routing import in_triton as routing
from kvsketch.kernels.sources import Classifier, Limits, Staged
from test_gpu_kernels import DEVICE, SLOW, interpreted  # noqa: F401 (a fixture that all tests here use)
from test_native import SOME_LIMITS, as_doubles, check_visits, move

LANES = 2 if SLOW else 6


@pytest.mark.parametrize("limits", [one for one in SOME_LIMITS if one.probes], ids=str)
def test_the_buckets_visited_are_those_of_torch(limits):
    check_visits(routing.visit, limits, DEVICE, lanes=LANES)


def test_of_buckets_worth_the_same_the_earlier_come_first():
    scores = torch.tensor([0.1, 0.3, 0.1, 0.3, 0.2], device=DEVICE)[None, None]
    sizes = torch.tensor([[4, 1, 4, 2, 0]], device=DEVICE)
    edges = torch.nn.functional.pad(sizes.cumsum(1), (1, 0))[:, None].contiguous()
    runs, read, _ = routing.visit(scores, sizes, edges, Limits(4), Staged.on(DEVICE, 11, 2))
    assert runs.begin[0, 0, 0].tolist() == [4, 9, 11, 0, 11]
    assert runs.length[0, 0, 0].tolist() == [1, 2, 0, 4, 2]
    assert read.item() == 9


@pytest.mark.parametrize(("sizes", "probes"), [([21, 21, 21, 27], 4), ([1] * 63 + [9, 9, 9], 66)])
@pytest.mark.parametrize(("visit", "read"), [(0.7, {4: 42, 66: 62}), (63, {4: 63, 66: 63})])
def test_a_share_that_is_just_reached_is_counted_as_by_torch(sizes, probes, visit, read):
    """.7 of 90 is a little less than 63 in float64, and 63 in float32."""
    sizes = torch.tensor([sizes], device=DEVICE)
    scores = torch.arange(probes, 0, -1.0, device=DEVICE)[None, None]
    edges = torch.nn.functional.pad(sizes.cumsum(1), (1, 0))[:, None].contiguous()
    limits = Limits(probes, visit=visit)
    for form in (routing, reference):
        found = form.visit(scores, sizes, edges, limits, Staged.on(DEVICE, 90, 0))
        assert found[1].item() == read[probes]


def expected(query, by, heads):
    """The mean probability of every bucket over a group, of which there are logits."""
    return reference.mean_probability(routing.expect(query, by, heads))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 2, 4, 1, 64, 100, 300), torch.float32),
        ((2, 3, 2, 3, 20, 70, 33), torch.float32),
        ((1, 2, 2, 1, 32, 0, 130), torch.float32),
        ((1, 2, 4, 1, 64, 128, 256), torch.float16),
    ],
    ids=str,
)
def test_the_classifier_says_what_torch_says(shape, dtype):
    rows, heads, group, queries, width, hidden, buckets = shape
    draw = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=draw)).to(DEVICE, dtype)

    query, inner = normal(rows, heads * group, queries, width), hidden or width
    second, second_bias = normal(heads, inner, buckets, scale=inner**-0.5), normal(heads, 1, buckets)
    before = (normal(heads, width, hidden, scale=width**-0.5), normal(heads, 1, hidden)) if hidden else None
    by = Classifier(before, (second, second_bias))
    found = expected(query, by, heads)
    right = reference.classify(query.double(), as_doubles(by), heads)
    torch.testing.assert_close(found.double(), right.double(), rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-6)
    torch.testing.assert_close(found.sum(3), torch.ones_like(found.sum(3)))
    assert torch.equal(found, expected(query, by, heads))
    many = normal(1, heads * group, 65, width)
    assert routing.expect(many, by, heads) is None


@pytest.mark.parametrize("not_sorted", [0, routing.NOT_SORTED])
@pytest.mark.parametrize("limits", [one for one in SOME_LIMITS if one.probes], ids=str)
def test_buckets_are_chosen_by_logits_as_by_the_probabilities_they_mean(limits, not_sorted, monkeypatch):
    monkeypatch.setattr(routing, "NOT_SORTED", not_sorted)

    def by_logits(scores, *given, **options):
        logits = torch.stack([scores, 0.5 * scores, scores.flip(2)], 2)
        found, right = (form.visit(logits, *given, **options) for form in (routing, reference))
        assert torch.equal(found[0].length.sum(3), right[0].length.sum(3))
        assert torch.equal(found[0].begin, right[0].begin)
        assert torch.equal(found[1], right[1])
        return routing.visit(scores, *given, **options)

    check_visits(by_logits, limits, DEVICE, lanes=LANES)


@pytest.fixture
def in_bytes(monkeypatch):
    """Weights are read in bytes, however few they are; where numbers are interpreted, in float32."""
    monkeypatch.setattr(rounded, "LARGE", -1)
    monkeypatch.setattr(rounded, "ROUNDED", torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)


def some_classifier(shape, peaked=1.0):
    rows, heads, group, queries, width, hidden, buckets = shape
    draw = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=draw)).to(DEVICE, rounded.ROUNDED)

    first = normal(heads, width, hidden, scale=width**-0.5), normal(heads, 1, hidden)
    second = normal(heads, hidden, buckets, scale=peaked * hidden**-0.5), normal(heads, 1, buckets)
    return normal(rows, heads * group, queries, width), Classifier(first, second), heads


def as_bytes_say(by):
    """The classifier whose last weights are what their bytes stand for, in float64."""
    known, true = rounded.by_column(by.last[0], by.inner), as_doubles(by)
    unit = known.steps[:, None].double() * known.levels[..., None]
    assert bool(((known.weights.mT * unit - true.last[0]).abs() <= unit * 0.5001).all())
    return Classifier(true.inner, (known.weights.mT * unit, true.last[1]))


@pytest.mark.parametrize(
    "shape", [(1, 2, 4, 1, 64, 112, 300), (2, 3, 2, 3, 20, 64, 33), (1, 1, 4, 4, 32, 256, 130)], ids=str
)
@pytest.mark.usefixtures("in_bytes")
def test_the_classifier_in_bytes_says_what_the_numbers_say_that_they_stand_for(shape):
    query, by, heads = some_classifier(shape)
    by.last[0][:, :, 5], by.last[0][:, 7] = 0, 1e-24
    query[0, 0] = 0
    right = reference.classify(query.double(), as_bytes_say(by), heads).double()
    found = expected(query, by, heads)
    torch.testing.assert_close(found.double(), right, rtol=3e-3, atol=1e-7)
    assert torch.equal(found, expected(query, by, heads))
    assert by.noted[routing.NOTE][1].weights.dtype == torch.int8


@pytest.mark.parametrize("peaked", [1.0, 8.0])
@pytest.mark.usefixtures("in_bytes")
def test_buckets_by_bytes_are_worth_as_much(peaked):
    query, by, heads = some_classifier((1, 4, 4, 1, 64, 128, 256), peaked)
    right = reference.classify(query.double(), as_doubles(by), heads)[0, :, 0].double()
    found = expected(query, by, heads)[0, :, 0]
    best, chosen = (x.topk(16).indices for x in (right, found))
    assert right.gather(1, chosen).sum() >= 0.995 * right.gather(1, best).sum()
    assert (best[..., None] == chosen[:, None]).any(2).float().mean() >= 0.9


@pytest.mark.usefixtures("in_bytes")
def test_bytes_hide_no_numbers_that_are_none():
    query, by, heads = some_classifier((1, 2, 2, 1, 32, 64, 96))
    query[0, 1, 0, 7] = math.nan
    found = expected(query, by, heads)
    assert found[0, 0].isnan().all()
    assert found[0, 1].isfinite().all()
    by.last[0][0, 3] = math.inf
    assert rounded.by_column(by.last[0], by.inner) is None


@pytest.mark.usefixtures("in_bytes")
def test_a_classifier_whose_tensors_were_moved_is_read_where_it_is_now():
    query, by, heads = some_classifier((1, 2, 2, 1, 32, 64, 96))
    before = routing.expect(query, by, heads)
    move(by.tensors)
    assert torch.equal(routing.expect(query, by, heads), before)


def test_bytes_are_read_where_weights_are_many_and_in_the_kind_that_is_rounded(monkeypatch):
    monkeypatch.setattr(rounded, "ROUNDED", torch.float32)
    for hidden, buckets, asking, wanted in (
        (256, 160, 4, True), (256, 96, 4, False), (250, 160, 4, False), (256, 160, 17, False), (1040, 64, 4, False),
    ):  # fmt: skip
        _, by, _ = some_classifier((1, 1, 1, 1, 16, hidden, buckets))
        assert (routing._in_bytes(by, asking) is not None) == wanted
    _, by, _ = some_classifier((1, 1, 1, 1, 16, 256, 160))
    assert routing._in_bytes(Classifier(None, by.last), 4) is None


def test_what_is_expected_is_logits_where_they_are_taken():
    query, by, heads = some_classifier((1, 2, 4, 1, 32, 64, 96))
    query, by = query.float(), Classifier(*(tuple(x.float() for x in layer) for layer in (by.inner, by.last)))
    logits = expect(query, by, heads)
    assert logits.shape == (1, 2, 1, 4, 96)
    right = reference.classify(query.double(), as_doubles(by), heads).float()
    torch.testing.assert_close(logits.softmax(4).mean(3), right, rtol=1e-4, atol=1e-6)
