"""Attention of many queries in Triton: on a GPU where there is one, else under Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvsketch.attention import NO_MASS, Partial, WeightedTokens, weighted_attention
from kvsketch.kernels import gpu
from kvsketch.kernels import weighted_attention as front
from kvsketch.kernels.gpu import flash, many_queries
from kvsketch.kernels.weighted_attention import causal_attention, fused
from test_gpu_kernels import DEVICE, SLOW, entries, interpreted  # noqa: F401 (a fixture that all tests here use)


def doubled(tokens):
    parts = (tokens.keys, tokens.values, tokens.log_mass, tokens.log_value)
    return WeightedTokens(*(None if x is None else x.nan_to_num(0, neginf=NO_MASS).double() for x in parts))


def seen_by(count, valid):
    """Which of the new tokens each of them sees."""
    at = torch.arange(count, device=DEVICE)
    visible = (at[:, None] >= at)[None, None]
    return visible if valid is None else visible & valid[:, None, None] | (at[:, None] == at)


OPERATORS = {"flash": flash.in_flash, "cudnn": flash.in_cudnn}


@pytest.mark.parametrize("attended", OPERATORS.values(), ids=OPERATORS)
def test_torchs_operators_take_what_is_given_and_say_the_denominator(attended):
    """As far as can be seen without a GPU: their arguments, and the shapes of what they give back."""
    with FakeTensorMode():
        for causal, count in ((False, 90), (True, 70)):
            query, keys, values = (
                torch.empty(2, heads, steps, 64, dtype=torch.bfloat16, device="cuda")
                for heads, steps in ((8, 70), (2, count), (2, count))
            )
            found = attended(query, keys, values, 0.1, causal)
            assert (found.out.shape, found.out.dtype) == (query.shape, query.dtype)
            assert (found.lse.shape, found.lse.dtype) == (query.shape[:3], torch.float32)


def test_where_cudnn_has_no_plan_flash_attention_answers(monkeypatch, caplog):
    asked = list[bool]()

    def failing(query, keys, values, scale, causal):
        asked.append(causal)
        raise RuntimeError("no execution plan")

    for name, always in (("cudnn_pays", True), ("_works", True), ("_aligned", True)):
        monkeypatch.setattr(flash, name, lambda *given, always=always: always)
    monkeypatch.setattr(gpu, "can_read", lambda *given: True)
    monkeypatch.setattr(flash, "in_cudnn", failing)
    monkeypatch.setattr(flash, "_refused", set())
    with FakeTensorMode():
        query, keys = (torch.empty(1, heads, 70, 64, dtype=torch.float16, device="cuda") for heads in (4, 2))
        for causal in (True, True, False):
            found = flash.attend(query, keys, keys, 0.1, causal=causal)
            assert found.out.shape == query.shape
    assert asked == [True, False]
    assert ["no execution plan" in line for line in caplog.messages] == [True, True]


def test_cudnn_is_not_asked_for_little_or_for_wide_heads():
    for heads, count, width in ((8, 1000, 64), (32, 16_384, 256)):
        query = torch.empty(1, heads, count, width, dtype=torch.bfloat16, device="meta")
        assert not flash.cudnn_pays(query, query, query)


def test_numbers_lie_so_that_many_are_read_at_once():
    x = torch.zeros(2, 3, 20, 72, dtype=torch.float16)
    assert all(
        flash._aligned(one) for one in (x, x[:, 1:, 3:, 8:], x.transpose(1, 2), x[:1, :, :1].expand(2, 3, 20, 72))
    )
    odd = torch.zeros(2, 3, 20, 68, dtype=torch.float16)
    assert not any(flash._aligned(one) for one in (x[..., 4:68], x.mT, odd[..., :64]))


@pytest.mark.parametrize(
    ("heads", "dtype", "widths", "linear"),
    [
        (8, torch.bfloat16, (64, 64), True),
        (8, torch.float32, (64, 64), False),
        (8, torch.float16, (64, 48), False),
        (8, torch.bfloat16, (288, 288), False),
        (2, torch.float32, (288, 64), True),  # no groups: torch has other kernels
    ],
)
def test_prompts_for_which_torch_makes_a_matrix_of_logits_take_another_way(heads, dtype, widths, linear, monkeypatch):
    """On a GPU, where that is made in one piece: it would be n² numbers."""
    called = list[str]()

    def way(name):
        def attend(query, *given, **named):
            called.append(name)
            return Partial(query.new_empty(*query.shape[:3], widths[1]), torch.empty(query.shape[:3], device="cuda"))

        return attend

    monkeypatch.setattr(flash, "attend", lambda *given, **named: None)
    monkeypatch.setattr(many_queries, "attend", way("another"))
    monkeypatch.setattr(front, "_answer_alone", way("torch's call"))
    with FakeTensorMode():
        query, keys, values = (
            torch.empty(1, of, 70, width, dtype=dtype, device="cuda")
            for of, width in ((heads, widths[0]), (2, widths[0]), (2, widths[1]))
        )
        causal_attention(query, keys, values, 0.1, lse=False)
        causal_attention(query, keys, values, 0.1)
    assert called == ["torch's call" if linear else "another", "another"]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="there is no GPU")
@pytest.mark.parametrize("dtype", flash.DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_torchs_operators_say_what_the_definition_says(name, dtype, monkeypatch):
    monkeypatch.setattr(flash, "LEAST_LOGITS", 0 if name == "cudnn" else 1 << 62)
    draw = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, heads, 200, 64, generator=draw).to(DEVICE, dtype) for heads in (4, 2, 2))
    for causal in (False, True):
        found = flash.attend(query, keys, values, 0.2, causal=causal)
        visible = seen_by(200, None) if causal else None
        right = weighted_attention(query.double(), doubled(WeightedTokens(keys, values)), 0.2, visible=visible)
        gpu.assert_like(found.out, right.out, found.lse, right.lse)
    if name == "cudnn" and flash.cudnn_pays(query, keys, values):
        assert gpu._found[f"{flash.CUDNN} × 64 in {str(dtype).removeprefix('torch.')}", query.device]
        assert not flash._refused


CASES = {  # rows, KV heads, group, queries, entries, widths; kind, softcap, weights
    "blocks of queries": ((1, 2, 2, 40 if SLOW else 140, 70, 64, 64), torch.float32, None, {}),
    "weights": ((2, 2, 1, 40, 150, 32, 32), torch.float32, None, {"mass": True}),
    "two weights, half precision": ((1, 1, 3, 33, 90, 64, 64), torch.float16, None, {"mass": True, "extra": True}),
    "odd widths and a softcap": ((1, 2, 2, 17, 65, 40, 24), torch.float32, 5.0, {"mass": "shared"}),
    "wide heads": ((1, 1, 2, 20, 40, 256, 200), torch.float32, None, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_says_what_the_definition_says(case):
    (rows, heads, group, queries, count, width, value_width), dtype, softcap, weights = CASES[case]
    draw = torch.Generator().manual_seed(0)
    tokens = entries(draw, (rows, heads, count, width, value_width), dtype, **weights).tokens
    query = torch.randn(rows, heads * group, queries, width, generator=draw).to(DEVICE, dtype)
    if weights:  # in an empty slot may be anything
        for x in (tokens.log_mass, tokens.log_value):
            if x is not None:
                x[..., ::7] = NO_MASS
        tokens.keys[..., ::7, :], tokens.values[..., ::7, :] = float("nan"), float("nan")
    found = many_queries.attend(query, tokens, width**-0.5, softcap)
    right = weighted_attention(query.double(), doubled(tokens), width**-0.5, softcap=softcap)
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 3e-3, "atol": 1e-3}
    torch.testing.assert_close(found.out.double(), right.out, **close)
    torch.testing.assert_close(found.lse.double(), right.lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("queries", "dtype"), [(70 if SLOW else 150, torch.float32), (64, torch.float16), (5, torch.float32)]
)
def test_new_tokens_see_themselves_and_what_is_before(queries, dtype, padded):
    draw = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(2, 2, queries, 32, generator=draw).to(DEVICE, dtype) for _ in range(2))
    query = torch.randn(2, 4, queries, 32, generator=draw).to(DEVICE, dtype)
    valid = None
    if padded:
        valid = torch.rand(2, queries, generator=draw).to(DEVICE) < 0.7
        valid[1] = False
    found = many_queries.attend(query, WeightedTokens(keys, values), 0.2, causal=True, valid=valid)
    right = weighted_attention(
        query.double(), doubled(WeightedTokens(keys, values)), 0.2, visible=seen_by(queries, valid)
    )
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 3e-3, "atol": 1e-3}
    torch.testing.assert_close(found.out.double(), right.out, **close)
    torch.testing.assert_close(found.lse.double(), right.lse, rtol=1e-5, atol=1e-4)
    if not SLOW:  # nothing is done at once there
        again = many_queries.attend(query, WeightedTokens(keys, values), 0.2, causal=True, valid=valid)
        assert torch.equal(found.out, again.out)


@pytest.mark.parametrize("whole", [True, False])
def test_blocks_come_with_masks_or_without(whole):
    """Whatever is in empty slots, of which some blocks have none."""
    draw, blocks = torch.Generator().manual_seed(4), many_queries.Blocks(16, 16, 4, 2, whole)
    tokens = entries(draw, (1, 2, 100, 32, 32), torch.float32, mass=True).tokens
    query = torch.randn(1, 4, 20, 32, generator=draw).to(DEVICE)
    for empty in (slice(0, 0), slice(40, 60, 3), slice(90, 100)):
        tokens.log_mass[:, 1, empty] = NO_MASS
        tokens.keys[:, 1, empty], tokens.values[:, 1, empty] = float("nan"), float("nan")
        found = many_queries._attended(query, tokens, 0.2, None, False, None, blocks)
        right = weighted_attention(query.double(), doubled(tokens), 0.2)
        torch.testing.assert_close(found.out.double(), right.out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.lse.double(), right.lse, rtol=1e-5, atol=1e-4)


def test_nothing_with_mass_is_an_answer_of_zero():
    draw = torch.Generator().manual_seed(2)
    tokens = entries(draw, (1, 2, 40, 32, 32), mass=True).tokens
    tokens.log_mass[:, 1] = NO_MASS
    found = many_queries.attend(torch.randn(1, 4, 20, 32, generator=draw).to(DEVICE), tokens, 0.2)
    assert (found.lse[:, 2:] == NO_MASS).all()
    assert not found.out[:, 2:].any()
    assert found.lse[:, :2].isfinite().all()


def test_prompts_are_read_by_it(monkeypatch):
    """Where the CPU's own fused kernel is not: chunks against weighted entries, and new tokens with padding."""
    monkeypatch.setattr(fused, "can_run", lambda *given: False)
    calls, ask, draw = [], many_queries.attend, torch.Generator().manual_seed(3)
    monkeypatch.setattr(many_queries, "attend", lambda *a, **o: calls.append(o) or ask(*a, **o))
    tokens = entries(draw, (1, 2, 40, 32, 32), mass=True).tokens
    query = torch.randn(1, 4, 70, 32, generator=draw).to(DEVICE)
    found = front.weighted_attention(query, tokens, 0.2)
    torch.testing.assert_close(found.out, weighted_attention(query, tokens, 0.2).out, rtol=1e-4, atol=1e-5)
    new = torch.randn(1, 2, 70, 32, generator=draw).to(DEVICE)
    causal_attention(query, new, new, 0.2, valid=torch.ones(1, 70, dtype=torch.bool, device=DEVICE))
    assert [one.get("causal", False) for one in calls] == [False, True]
    monkeypatch.setattr(many_queries, "attend", ask)
    gradient = query.clone().requires_grad_()
    assert many_queries.attend(gradient, tokens, 0.2) is None
    assert many_queries.attend(query, replace(tokens, keys=tokens.keys.mT.contiguous().mT), 0.2) is None
    monkeypatch.setenv("KVSKETCH_GPU_KERNELS", "off")
    monkeypatch.setattr(gpu, "_found", {})
    assert many_queries.attend(query, tokens, 0.2) is None
