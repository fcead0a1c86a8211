"""Kernels in Triton: on a GPU where there is one, else under Triton's interpreter."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvsketch
import test_contract
from kvsketch.algorithms.draws import uniforms
from kvsketch.attention import NO_MASS, Partial, WeightedTokens, merge, weighted_attention
from kvsketch.caches.core.chooser import Pool
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens, Unrotated
from kvsketch.caches.forgetting.balancekv.practical import WALKS
from kvsketch.kernels import few_queries, gpu, native
from kvsketch.kernels.balanced_walk import gathered, strips, walk_in_triton
from kvsketch.kernels.directions import in_triton as directions_in_triton
from kvsketch.kernels.directions import reference as directions_reference
from kvsketch.kernels.draws import in_triton
from kvsketch.kernels.gpu import attention, many_queries
from kvsketch.kernels.places import in_triton as places_in_triton
from kvsketch.kernels.places import reference as places_reference
from kvsketch.kernels.sources import Entries, Segments
from made_index import make_index
from test_contract import BY_PROFILE, HEADS, KINDS, LOOKUPS, ROWS, SMALL, WIDTH, feed, padded_in_front, stream
from waiting import Waits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOW = DEVICE.type == "cpu"  # a program after the other, in Python: less is asked of kernels then
triton = pytest.importorskip("triton", reason="Triton is not installed")
if DEVICE.type == "cpu" and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
    pytest.skip(
        f"the interpreter of Triton {triton.__version__} fails with numpy 2.4; that of 3.9 does not",
        allow_module_level=True,
    )


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(test_contract, "DEVICE", DEVICE)
    if DEVICE.type == "cpu":
        monkeypatch.setenv(gpu.INTERPRETED, "1")
    with native.off():  # what is in C comes first on a CPU
        yield


def entries(draw, shape, dtype=torch.float32, *, mass=False, extra=False, runs=None, lanes=None):
    """Random entries; of those in runs, what is in none is not a number."""
    rows, heads, count, width, value_width = shape
    keys = torch.randn(rows, heads, count, width, generator=draw).to(dtype)
    values = torch.randn(rows, heads, count, value_width, generator=draw).to(dtype)
    log_mass, log_value = (
        torch.randn(rows, 1 if wanted == "shared" else heads, count, generator=draw) if wanted else None
        for wanted in (mass, extra)
    )
    segments = None
    if runs is not None:
        queries, number = runs
        cuts = torch.stack(
            [torch.randperm(count, generator=draw)[: 2 * number].sort().values for _ in range(rows * heads * queries)]
        ).reshape(rows, heads, queries, number, 2)
        begin, length = cuts[..., 0].contiguous(), cuts[..., 1] - cuts[..., 0]
        length[..., 1::3] = 0  # some runs are empty
        segments = Segments(begin, length)
        unread = ~segments.mask(count).any(2)
        keys[unread], values[unread] = float("nan"), float("nan")
    return on(DEVICE, Entries(WeightedTokens(keys, values, log_mass, log_value), lanes=lanes, segments=segments))


def on(device, part):
    """The same entries there."""
    parts = (part.tokens.keys, part.tokens.values, part.tokens.log_mass, part.tokens.log_value)
    tokens = WeightedTokens(*(None if x is None else x.to(device) for x in parts))
    lanes = None if part.lanes is None else part.lanes.to(device)
    segments = (
        None if part.segments is None else Segments(part.segments.begin.to(device), part.segments.length.to(device))
    )
    return Entries(tokens, lanes=lanes, segments=segments)


def by_definition(query, parts, heads, scale, softcap):
    """In float64, lane by lane."""
    rows, query_heads, queries, _ = query.shape
    group = query_heads // heads
    query, parts = query.cpu(), [on("cpu", part) for part in parts]
    outs, sums = [], []
    for lane in range(rows * heads):
        row, head = divmod(lane, heads)
        asked = query[row : row + 1, head * group : (head + 1) * group].double()
        found = [part for part in (of_lane(part, lane) for part in parts) if part is not None]
        answers = [
            weighted_attention(asked, tokens, scale, visible=visible, softcap=softcap) for tokens, visible in found
        ]
        whole = merge(*answers) if answers else None
        outs.append(torch.zeros(group, queries, parts[0].tokens.values.shape[3]) if whole is None else whole.out[0])
        sums.append(torch.full((group, queries), NO_MASS) if whole is None else whole.lse[0])
    return Partial(
        torch.stack(outs).reshape(rows, query_heads, queries, -1), torch.stack(sums).reshape(query.shape[:3])
    )


def of_lane(part, lane):
    if part.lanes is not None:
        if lane not in part.lanes:
            return None
        lane = part.lanes.tolist().index(lane)
    row, head = divmod(lane, part.tokens.keys.shape[1])
    here = slice(row, row + 1), slice(head, head + 1)
    tokens = WeightedTokens(
        *(None if x is None else x[here].nan_to_num().double() for x in (part.tokens.keys, part.tokens.values)),
        *(
            None if x is None else x.expand(part.tokens.keys.shape[:3])[here].double()
            for x in (part.tokens.log_mass, part.tokens.log_value)
        ),
    )
    visible = None
    if part.segments is not None:
        visible = part.segments.mask(part.tokens.count)[here]
    return tokens, visible


CASES = {  # rows, KV heads, group, queries, widths, kind, softcap; and parts
    "exact": ((1, 2, 4, 1, 64, 64), torch.float32, None, [{"count": 150}]),
    "half precision": ((1, 2, 4, 1, 64, 64), torch.float16, None, [{"count": 150, "mass": True}]),
    "two weights": ((2, 2, 2, 1, 64, 64), torch.float32, None, [{"count": 90, "mass": True, "extra": True}]),
    "values alone weighted": ((1, 2, 2, 1, 32, 32), torch.float32, None, [{"count": 90, "extra": True}]),
    "odd widths, a softcap, a block": ((2, 2, 2, 3, 40, 24), torch.float32, 5.0, [{"count": 70, "mass": True}]),
    "wide heads": ((1, 1, 2, 1, 256, 256), torch.float16, None, [{"count": 70}]),
    "runs and a window": (
        (1, 2, 4, 1, 64, 64), torch.float16, None, [{"count": 300, "runs": (1, 11)}, {"count": 9, "mass": True}],
    ),
    "many runs": ((1, 1, 2, 1, 16, 16), torch.float32, None, [{"count": 400, "runs": (1, 130)}]),
    "runs of each query": ((1, 2, 2, 3, 32, 32), torch.float32, None, [{"count": 300, "runs": (3, 5)}, {"count": 9}]),
    "some lanes, and none": (
        (2, 2, 2, 1, 32, 32), torch.float32, None,
        [{"count": 90, "mass": True, "lanes": [3, 0]}, {"count": 20, "lanes": [1, 3]}],
    ),
    "weights that heads share": ((2, 2, 2, 1, 32, 32), torch.float32, None, [{"count": 70, "mass": "shared"}]),
    "one run for all queries": ((1, 2, 2, 3, 32, 32), torch.float32, None, [{"count": 90, "runs": (1, 5)}]),
    "more lanes than programs at once": ((3, 4, 1, 1, 16, 16), torch.float32, None, [{"count": 70, "mass": True}]),
    "one entry": ((1, 1, 1, 1, 16, 16), torch.float32, None, [{"count": 1}]),
    "many rows": ((1, 1, 8, 8, 32, 32), torch.float16, None, [{"count": 100, "mass": True}]),
    "more parts than a launch takes": ((1, 2, 2, 1, 32, 32), torch.float32, None, [{"count": 9, "mass": True}] * 8),
    "some lanes' runs": (
        (1, 3, 2, 1, 32, 32), torch.float32, None, [{"count": 90, "runs": (1, 4), "lanes": [2, 0]}, {"count": 5}],
    ),
    "two kinds": (
        (1, 2, 2, 1, 32, 32), torch.float16, None, [{"count": 90}, {"count": 33, "mass": True, "kind": torch.float32}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_says_what_the_definition_says(case):
    (rows, heads, group, queries, width, value_width), dtype, softcap, wanted = CASES[case]
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(rows, heads * group, queries, width, generator=draw).to(DEVICE, dtype)
    parts = []
    for options in wanted:
        lanes = None if "lanes" not in options else torch.tensor(options["lanes"])
        shape = (rows, heads) if lanes is None else (1, len(lanes))
        of_part = {name: options[name] for name in ("mass", "extra", "runs") if name in options}
        kind = options.get("kind", dtype)
        parts.append(entries(draw, (*shape, options["count"], width, value_width), kind, lanes=lanes, **of_part))
    found = attention.attend(query, parts, heads, width**-0.5, softcap)
    right = by_definition(query, parts, heads, width**-0.5, softcap)
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 3e-3, "atol": 1e-3}
    torch.testing.assert_close(found.out.double().cpu(), right.out.double(), **close)
    torch.testing.assert_close(found.lse.double().cpu(), right.lse.double(), rtol=1e-5, atol=1e-5 if softcap else 1e-4)
    again = attention.attend(query, parts, heads, width**-0.5, softcap)
    assert torch.equal(found.out, again.out)
    assert torch.equal(found.lse, again.lse)


def test_empty_slots_may_hold_anything():
    draw = torch.Generator().manual_seed(1)
    part = entries(draw, (1, 2, 90, 32, 32), mass=True)
    query, tokens = torch.randn(1, 4, 1, 32, generator=draw).to(DEVICE), part.tokens
    tokens.log_mass[..., ::3] = NO_MASS
    tokens.log_mass[:, 1] = NO_MASS  # a head that holds nothing
    right = weighted_attention(query, tokens, 0.2)
    tokens.keys[..., ::3, :], tokens.values[..., ::3, :] = float("nan"), float("nan")
    found = attention.attend(query, [part], 2, 0.2)
    torch.testing.assert_close((found.out, found.lse), (right.out, right.lse), rtol=1e-5, atol=1e-6)
    assert (found.lse[:, 2:] == NO_MASS).all()


SINGLE = torch.float32 if DEVICE.type == "cpu" else torch.float16  # of which GPUs hold too few in registers


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize(
    ("shape", "dtype", "sizes"),
    [
        ((4, 128, 32, 32), SINGLE, [128, 2, 0, 70]) if SLOW else ((6, 128, 32, 32), SINGLE, [128, 128, 2, 0, 70, 64]),
        ((3, 70, 40, 24), SINGLE, [70, 2, 64]),
        ((2, 130, 64, 64), torch.float16, [130, 66]),
    ],
)
def test_blocks_are_halved_as_by_torch(shape, dtype, sizes, walk):
    """But where rounding decides: of all blocks, in one more than of those in float32."""
    blocks, count, width, value_width = shape
    draw, gain = torch.Generator().manual_seed(4), WALKS[walk]
    keys = (0.5 * torch.randn(blocks, count, width, generator=draw) + 0.7).to(dtype)
    values = (torch.randn(blocks, count, value_width, generator=draw) + 1).to(dtype)
    uniforms, sizes = torch.rand(blocks, count, generator=draw), torch.tensor(sizes)
    keys, values, uniforms, sizes = (x.to(DEVICE) for x in (keys, values, uniforms, sizes))
    given = uniforms, sizes, width**-0.5, gain
    exact = strips.halving_signs(keys.double(), values.double(), *given) > 0
    single = strips.halving_signs(keys, values, *given) > 0
    fair = strips.halving_signs(keys, values, uniforms, sizes, width**-0.5, 0.0) > 0
    assert walk == "fair" or not torch.equal(exact, fair), "products matter"
    for block, size in enumerate(sizes.tolist()):
        keys[block, size:] = values[block, size:] = float("nan")
    kept = walk_in_triton.keep_half(keys, values, *given)
    assert torch.equal(kept.sum(1), sizes // 2)
    differ, in_single = ((x != exact).any(1).sum() for x in (kept, single))
    assert differ <= in_single + (walk != "fair")
    if not SLOW:  # nothing is done at once there
        assert torch.equal(kept, walk_in_triton.keep_half(keys, values, *given))


@pytest.mark.parametrize("at_once", [1, 1 << 13])
def test_numbered_tokens_are_halved_where_they_lie(at_once, monkeypatch):
    """As if they were copied block by block; of the last block of a lane some tokens may lack."""
    monkeypatch.setattr(walk_in_triton, "AT_ONCE", at_once)
    draw, lanes, blocks, count = torch.Generator().manual_seed(5), 2, 2, 70
    keys = torch.randn(lanes, 300, 40, generator=draw).to(DEVICE, SINGLE)
    values = torch.randn(lanes, 300, 60, generator=draw).to(DEVICE, SINGLE)[..., 8:32] + 1
    index = torch.stack([torch.randperm(300, generator=draw) for _ in range(lanes)]).to(DEVICE)
    uniforms = torch.rand(lanes, blocks, count, generator=draw, dtype=torch.float64).to(DEVICE)
    sizes = torch.tensor([count, 36], device=DEVICE).expand(lanes, -1)
    layouts = (index[:, : count + 36], index[:1].expand(lanes, -1), index.mT.contiguous().mT)
    for some in layouts[:1] if at_once == 1 else layouts[SLOW:]:
        kept = walk_in_triton.keep_half_of(keys, values, some, uniforms, sizes, 0.1, WALKS["greedy"])
        copied = gathered(keys, values, some[:, : blocks * count], blocks, count)
        given = uniforms.flatten(0, 1), sizes.flatten(), 0.1, WALKS["greedy"]
        assert torch.equal(kept, walk_in_triton.keep_half(*copied, *given))


def test_draws_are_those_of_torch_bit_for_bit():
    heads, ranks = torch.tensor([[5], [0], [77]], device=DEVICE), torch.arange(-3, 700, device=DEVICE)
    for address in ((3, 1, heads, 2, ranks), (heads[..., None], 4, ranks.view(19, 37).T), (2**62, -1, ranks), (ranks,)):
        found = in_triton.uniforms(*address)
        assert torch.equal(found, uniforms(*address))
    for number in (1, 16, -5, 2**40):
        assert torch.equal(in_triton.uniforms(3, ranks, number), uniforms(3, ranks, number))
    assert in_triton.uniforms(ranks, 2**62) is None
    assert in_triton.uniforms(3, ranks.int()) is None
    assert in_triton.uniforms(3, ranks[:0]) is None


@pytest.mark.parametrize(("shape", "dtype"), [((3, 1100, 16), torch.float16), ((2, 70, 200), torch.float32)])
def test_places_are_copied_and_numbered_as_by_torch(shape, dtype):
    draw = torch.Generator().manual_seed(7)
    lanes, count, _ = shape
    x = torch.randn(shape, generator=draw).to(DEVICE, dtype)
    across = (
        torch.randn(count, lanes, 2 * shape[2], generator=draw).to(DEVICE, dtype).transpose(0, 1)[..., 5 : 5 + shape[2]]
    )
    there = (torch.rand(lanes, count, generator=draw) < 0.2).to(DEVICE)
    there[0] = lanes == 2  # all, or none
    order = places_in_triton.in_front(there)
    assert torch.equal(order, places_reference.in_front(there))
    assert torch.equal(places_in_triton.in_front((9 * there.byte()).view(torch.bool)), order), "bytes may be any"
    turned = there[:, :90].mT
    assert torch.equal(places_in_triton.in_front(turned), places_reference.in_front(turned))
    for index in (order, order[:, :3], order[:, ::7], order[:, :1].expand(-1, 40)):
        found = places_in_triton.chosen_of((x, across), index)
        assert all(map(torch.equal, found, places_reference.chosen_of((x, across), index)))
    assert places_in_triton.chosen_of((x, x[..., 0]), order) is None, "torch copies single numbers"
    assert places_in_triton.chosen_of((x.long(),), order) is None
    assert places_in_triton.in_front(there[:, :0]) is None


def test_the_least_are_numbered_first_as_by_torch():
    draw = torch.Generator().manual_seed(9)
    x = torch.randn(5, places_in_triton.COUNTED + 70, generator=draw, dtype=torch.float64)
    x[1], x[2], x[3] = x[1].round(), 0.0, x[3] * 1e-300
    x[2, ::3], x[4, 7::90], x[4, :5] = -0.0, torch.nan, -torch.inf
    x = x.to(DEVICE)
    for some in (x, x[:4, :60].contiguous(), x[:, :1].contiguous()):
        for most in {0, 1, min(2100, some.shape[1]), some.shape[1]} - ({1} if SLOW and some is x else set()):
            right = places_reference.least_in_front(some, most)
            assert torch.equal(places_in_triton.least_in_front(some, most), right)
    beside = torch.tensor([[torch.nan, torch.inf, 1, torch.nan, torch.inf]], dtype=torch.float64, device=DEVICE)
    for form in (places_in_triton, places_reference):
        assert form.least_in_front(beside, 2).tolist() == [[0, 2, 1, 3, 4]]
    assert places_in_triton.least_in_front(x.float(), 1) is None
    assert places_in_triton.least_in_front(x[:, 1:], 1) is None


def test_directions_are_those_of_torch():
    draw = torch.Generator().manual_seed(8)
    keys = torch.randn(3, 90, 24, generator=draw).to(DEVICE)
    keys[1, 4], keys[:, 50:] = 0, keys[:, 50:] * 1e4
    for some in (keys, keys[:, ::3], keys.half()):
        mean = some.sum(1, dtype=torch.float64)
        right = directions_reference.towards(some, mean)
        torch.testing.assert_close(directions_in_triton.towards(some, mean), right, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(directions_in_triton.total(some), mean, rtol=1e-12, atol=1e-12)
    assert directions_in_triton.towards(keys, keys.sum(1)) is None, "sums of fewer bits are not what was asked for"
    many = torch.randn(2, 2 * directions_in_triton.SUMMED + 9, 40, generator=draw).to(DEVICE)[:, 1:, 3:]
    right = directions_reference.total(many)
    torch.testing.assert_close(directions_in_triton.total(many), right, rtol=1e-12, atol=1e-12)
    assert directions_in_triton.total(keys[:, :0]) is None


def test_more_runs_than_a_program_holds_are_read_in_parts(monkeypatch):
    monkeypatch.setattr(attention, "LISTS", (3,))
    draw = torch.Generator().manual_seed(9)
    tokens = WeightedTokens(*(torch.randn(1, 2, 60, 16, generator=draw).to(DEVICE) for _ in range(2)))
    begin = (3 * torch.arange(20, device=DEVICE)).expand(1, 2, 1, -1)
    runs = Segments(begin, torch.arange(20, device=DEVICE).expand_as(begin) % 3)
    query = torch.randn(1, 4, 1, 16, generator=draw).to(DEVICE)
    found = attention.attend(query, [Entries(tokens, segments=runs)], 2, 0.25)
    right = weighted_attention(query.double(), attention.doubled(tokens), 0.25, visible=runs.mask(60))
    gpu.assert_like(found.out, right.out, found.lse, right.lse)


def test_it_is_refused_where_it_would_be_wrong(monkeypatch):
    draw = torch.Generator().manual_seed(2)
    part = entries(draw, (1, 2, 50, 32, 32))
    query = torch.randn(1, 4, 1, 32, generator=draw).to(DEVICE)
    assert attention.attend(query, [part], 2, 0.2) is not None
    tokens = part.tokens
    for other in (
        replace(tokens, keys=tokens.keys[:, :, :0], values=tokens.values[:, :, :0]),
        replace(tokens, keys=tokens.keys.mT.contiguous().mT),
        replace(tokens, values=tokens.values.double()),
        *(
            [replace(tokens, keys=tokens.keys.bfloat16(), values=tokens.values.bfloat16())]
            if DEVICE.type == "cpu"
            else []
        ),
    ):
        assert attention.attend(query, [Entries(other)], 2, 0.2) is None
    wide = entries(draw, (1, 2, 50, 300, 300))
    assert attention.attend(torch.randn(1, 4, 1, 300, device=DEVICE), [wide], 2, 0.2) is None
    assert attention.attend(torch.randn(1, 4, 65, 32, device=DEVICE), [part], 2, 0.2) is None
    assert attention.attend(query.clone().requires_grad_(), [part], 2, 0.2) is None
    monkeypatch.setenv(gpu.SWITCH, "off")
    monkeypatch.setattr(gpu, "_found", {})
    assert attention.attend(query.detach(), [part], 2, 0.2) is None
    monkeypatch.setenv(gpu.SWITCH, "of")
    monkeypatch.setattr(gpu, "_found", {})
    with pytest.raises(ValueError, match="KVSKETCH_GPU_KERNELS is 'of', and must be auto or off"):
        attention.attend(query.detach(), [part], 2, 0.2)


def test_entries_are_read_where_they_lie():
    """Keys beside values, in a buffer with room for more, and queries as models have them."""
    draw = torch.Generator().manual_seed(6)
    pairs = torch.randn(1, 2, 80, 56, generator=draw).to(DEVICE)
    keys, values = pairs[:, :, 3:70].split((32, 24), dim=3)
    mass = torch.randn(1, 2, 90, generator=draw).to(DEVICE)[..., 5:72]
    query = torch.randn(1, 3, 4, 32, generator=draw).to(DEVICE).transpose(1, 2)
    parts = [Entries(WeightedTokens(keys, values, mass))]
    found, right = attention.attend(query, parts, 2, 0.2), by_definition(query, parts, 2, 0.2, None)
    torch.testing.assert_close(found.out.double().cpu(), right.out.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.lse.double().cpu(), right.lse.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 3])
def test_runs_may_end_where_the_buffer_ends_or_hold_nothing(queries):
    draw = torch.Generator().manual_seed(5)
    part, window = entries(draw, (1, 2, 90, 32, 32)), entries(draw, (1, 2, 7, 32, 32))
    query = torch.randn(1, 4, queries, 32, generator=draw).to(DEVICE)
    begin = torch.tensor([60, 0, 90]).expand(1, 2, queries, 3).contiguous()
    length = torch.tensor([30, 4, 0]).repeat(1, 2, queries, 1)
    length[:, :, -1] *= torch.tensor([1, 0])[:, None]  # the second head's last query reads none
    runs = Segments(begin.to(DEVICE), length.to(DEVICE))
    for parts in ([replace(part, segments=runs)], [replace(part, segments=runs), window]):
        found, right = attention.attend(query, parts, 2, 0.2), by_definition(query, parts, 2, 0.2, None)
        torch.testing.assert_close(found.out.double().cpu(), right.out.double(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.lse.double().cpu(), right.lse.double(), rtol=1e-5, atol=1e-5)
    alone = attention.attend(query, [replace(part, segments=runs)], 2, 0.2)
    assert (alone.lse[:, 2:, -1] == NO_MASS).all()
    assert not alone.out[:, 2:, -1].any()


def test_kernels_that_say_another_thing_than_torch_are_not_used(monkeypatch, caplog):
    monkeypatch.setattr(attention, "weighted_attention", lambda query, *a, **o: Partial(query, query[..., 0]))
    monkeypatch.setattr(gpu, "_found", {})
    monkeypatch.setattr(gpu, "_refused", set())
    assert not attention.runs_on(DEVICE)
    assert not attention.runs_on(DEVICE)
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("torch's own kernels are used instead of the faster ones in Triton: kernels.gpu.attention, ")
    assert "AssertionError" in said


def test_heads_that_no_kernel_is_made_for_are_torchs_and_reported_so(monkeypatch, caplog):
    monkeypatch.setattr(gpu, "_refused", set())
    draw = torch.Generator().manual_seed(4)
    wide = entries(draw, (1, 2, 50, 288, 288))
    query = torch.randn(1, 4, 1, 288, generator=draw).to(DEVICE)
    assert few_queries.attend(query, [wide], 2, 0.2) is None
    assert many_queries.attend(query, wide.tokens, 0.2) is None
    assert few_queries.name(DEVICE, torch.float32, 2, 288) == "torch"
    assert few_queries.name(DEVICE, torch.float32, attention.MOST_ROWS + 1, 32) == "torch"
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("torch attends to heads of 288 numbers in torch.float32, more slowly: ")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    for width, named in ((288, "torch"), (32, "Triton")):
        config = LlamaConfig(vocab_size=50, num_key_value_heads=1, head_dim=width, **shape)
        model = LlamaForCausalLM(config).eval().to(DEVICE)
        cache = kvsketch.prefill(model, torch.ones(1, 5, dtype=torch.long, device=DEVICE), kvsketch.make_cache(model))
        assert cache.report().kernels == named
        kvsketch.detach(model)


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("triton", "Triton is not installed"),
        ("capability", "An old one is older than compute capability 8.0"),
        ("compiler", "InductorError: no C compiler was found"),
    ],
)
def test_where_kernels_cannot_be_torch_computes_and_one_line_says_why(missing, says, monkeypatch, caplog):
    """What is missing, or the GPU that is too old, is pretended."""
    monkeypatch.setattr(gpu, "_found", {})
    monkeypatch.setattr(gpu, "_refused", set())

    class InductorError(Exception):
        pass

    def compiling(device, dtype):
        raise InductorError("no C compiler was found")

    device, check = DEVICE, lambda device, dtype: None
    if missing == "triton":
        monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    elif missing == "capability":
        device = torch.device("cuda", 0)
        monkeypatch.delenv(gpu.INTERPRETED, raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "An old one")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    else:
        check = compiling
    for what in ("attention", "a walk"):
        for kind in (torch.float32, torch.float16):
            assert not gpu.works(what, device, kind, check)
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("torch's own kernels are used instead of the faster ones in Triton: ")
    assert says in said


def test_a_launch_for_which_there_is_no_room_is_torchs_work_this_time(monkeypatch):
    def full(*given):
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    assert gpu.tried("a kernel", DEVICE, full) is None
    assert gpu.tried("a kernel", DEVICE, lambda: 1) == 1
    monkeypatch.setattr(gpu, "_found", {})
    with pytest.raises(RuntimeError, match="out of memory"):  # a check says nothing then, for good or ill
        gpu.works("a kernel", DEVICE, torch.float32, full)
    assert gpu.works("a kernel", DEVICE, torch.float32, lambda device, dtype: None)


def test_what_is_held_is_read_by_them():
    """Attention of weighted entries goes to Triton wherever it can run, and is reported."""
    assert few_queries.name(DEVICE, torch.float32, 8, 128) == "Triton"
    draw = torch.Generator().manual_seed(3)
    part = entries(draw, (1, 2, 50, 32, 32))
    found = few_queries.attend(torch.randn(1, 4, 1, 32, generator=draw).to(DEVICE), [part], 2, 0.2)
    assert found is not None
    assert attention.NOTED in part.noted


def test_a_launch_in_a_graph_has_counters_that_nobody_else_gets(monkeypatch):
    device, zeros, made = torch.device("cuda", 0), torch.zeros, []
    monkeypatch.setattr(
        torch, "zeros", lambda *shape, dtype, device: made.append(zeros(*shape, dtype=dtype)) or made[-1]
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    for name, value in (("_counters", {}), ("_for_graphs", {}), ("FOR_GRAPHS", 3)):
        monkeypatch.setattr(gpu, name, value)
    recording = False
    monkeypatch.setattr(gpu, "recording", lambda device: recording)
    assert gpu.counters(8, device) is gpu.counters(20, device)
    recording = True
    places = [gpu.counters(8, device) for _ in range(3)]
    for number, place in enumerate(places):
        place.fill_(number + 1)
    assert [int(place[0]) for place in places] == [1, 2, 3]
    count = len(made)
    assert not gpu.counters(8, device).any(), "there are no more: these are made in the graph"
    assert not gpu.counters(1000, device).any(), "so are many"
    assert len(made) == count + 2
    assert gpu._for_graphs[device][0][:, 0].tolist() == [1, 2, 3], "what graphs count in stays there"


BLOCKS = {"clustergen", "subgen", "balancekv", "balancekv, plain", "balancekv, faithful"}  # that come into being wait


@pytest.mark.parametrize("name", [name for name in KINDS if name not in {*BY_PROFILE, *LOOKUPS}])
def test_a_decode_step_waits_for_no_number(name, monkeypatch):
    """But for steps in which tokens leave the window and are clustered or halved: one in 32."""
    monkeypatch.delenv(gpu.INTERPRETED, raising=False)  # torch does the same here, and sooner
    assert len(waits_of(KINDS[name](**SMALL[name]), steps=16)) <= (name in BLOCKS)


@pytest.mark.parametrize("name", ["saap, estimated", "kmeans", "lsh", "lsh, magicpig", "random_buckets", "retrieval"])
def test_looking_up_waits_for_no_number(name, tmp_path):
    """Where rows are read as they lie; torch alone copies as many as there are."""
    given = SMALL[name] | ({"index": make_index(tmp_path, heads=HEADS, width=WIDTH)} if "index" in SMALL[name] else {})
    assert not waits_of(KINDS[name](**given), steps=2)


@pytest.mark.parametrize("name", ["exact", "uniform", "kvzip", "h2o"])
def test_rows_of_unequal_lengths_wait_only_where_tokens_leave_the_window(name, monkeypatch):
    monkeypatch.delenv(gpu.INTERPRETED, raising=False)
    waiting = waits_of(KINDS[name](**SMALL[name]), steps=16, padding=7)
    assert all(any(line.startswith("stream.py") for line in lines) for lines in waiting), waiting
    assert len(waiting) <= 4


@pytest.mark.parametrize("name", ["streaming_llm", "clustergen"])
def test_windows_of_unequal_lengths_wait_no_more_than_others(name, monkeypatch):
    """But that each window has steps of its own in which tokens leave it."""
    monkeypatch.delenv(gpu.INTERPRETED, raising=False)
    config = KINDS[name](**SMALL[name])
    assert config.window_by_budget
    assert len(waits_of(config, steps=16, shares=rising)) <= HEADS * (name in BLOCKS)


def rising(_, heads, budget):
    """Shares of a layer's heads, no two of which are alike."""
    return [2 * (head + 1) / (heads + 1) for head in range(heads)]


def waits_of(config, steps, padding=0, shares=None):
    """What each decode step that waits for something waits for."""
    count = 300 + steps
    query, keys, values = (x.to(DEVICE) for x in stream(count, rows=1 if not padding else ROWS))
    valid = padded_in_front(count, padding).to(DEVICE) if padding else None
    waiting, cache = list[list[str]](), LayerCache(config, 0, shares=shares)
    gpu.works(attention.WHAT, DEVICE, query.dtype, attention._check)  # kernels are tried first
    with native.off(), torch.no_grad(), pytest.MonkeyPatch.context() as as_on_a_gpu:
        as_on_a_gpu.setattr(Pool, "stays_apart", lambda own, index: False)
        with pytest.MonkeyPatch.context() as quickly:  # by torch; and the last by kernels, which note what they need
            quickly.delenv(gpu.INTERPRETED, raising=False)
            feed(cache, *(x[:, :, :299] for x in (query, keys, values)), [299], valid)
        feed(cache, *(x[:, :, 299:300] for x in (query, keys, values)), [1], None)
        for place in range(300, count):
            asking, key, value = (x[:, :, place : place + 1] for x in (query, keys, values))
            with Waits() as waits:
                cache.read(asking, NewTokens(key, value, None, Unrotated(asking.flip(-1), key.flip(-1))), WIDTH**-0.5)
            waiting += [list(waits.lines)] if waits.lines else []
    return waiting
