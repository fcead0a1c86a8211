"""The definition of weighted attention, its faster forms, and merging."""

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from kvsketch.attention import (
    Partial,
    WeightedTokens,
    exact_attention,
    fold_groups,
    log_of,
    merge,
    unfold_groups,
    weighted_attention,
)
from kvsketch.kernels import native
from kvsketch.kernels.native import prompt as in_c
from kvsketch.kernels.weighted_attention import causal_attention, fused, reference
from kvsketch.kernels.weighted_attention import weighted_attention as chosen

ROWS, HEADS, GROUP, QUERIES, ENTRIES, WIDTH = 2, 2, 4, 3, 200, 32
SCALE = WIDTH**-0.5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUTES = {"reference": reference.attend, "biased": fused.attend_biased}
if native.library() is not None:
    ROUTES["C"] = in_c.attend


def draw(dtype=torch.float32, *, entries=ENTRIES, queries=QUERIES, value_width=WIDTH, spread=2.0):
    query = (torch.randn(ROWS, HEADS * GROUP, queries, WIDTH) * spread).to(dtype)
    keys = torch.randn(ROWS, HEADS, entries, WIDTH).to(dtype)
    values = torch.randn(ROWS, HEADS, entries, value_width).to(dtype)
    return query, keys, values


def weights(kind):
    """(log_mass, log_value) of one kind; zeros in either are -inf."""
    shape = (ROWS, HEADS, ENTRIES)
    some = torch.where(torch.rand(shape) > 0.3, 1.0, 0.0)
    keys_only = torch.where(torch.rand(shape) > 0.2, 0.0, 1.0)
    return {
        "all one": lambda: (None, None),
        "equal": lambda: (torch.empty(shape).uniform_(0, 8 * math.log(2)), None),
        "shared by heads": lambda: (torch.randn(ROWS, 1, ENTRIES), None),
        "equal with empty slots": lambda: ((torch.rand(shape) * some).log(), None),
        "different": lambda: (torch.randn(shape), torch.randn(shape)),
        "different with zeros": lambda: ((torch.rand(shape) * some).log(), (torch.rand(shape) * some.flip(-1)).log()),
        "wide": lambda: (torch.empty(shape).uniform_(-6, 6), torch.empty(shape).uniform_(-6, 6)),
        "values or keys": lambda: (
            (32 * torch.rand(shape) * keys_only).log(),
            (8 * torch.rand(shape) * (1 - keys_only)).log(),
        ),
    }[kind]()


KINDS = [
    "all one",
    "equal",
    "shared by heads",
    "equal with empty slots",
    "different",
    "different with zeros",
    "wide",
    "values or keys",
]


def in_float64(query, tokens, **options):
    wide = [None if t is None else t.double() for t in (tokens.log_mass, tokens.log_value)]
    return weighted_attention(
        query.double(), WeightedTokens(tokens.keys.double(), tokens.values.double(), *wide), SCALE, **options
    )


def plain_torch(query, tokens):
    """The same estimate in plain torch at this dtype: the yardstick for ours.

    With a = b that is torch's own attention, weights left out; with a ≠ b the two sums as one would write them.
    """
    keys, values = tokens.keys, tokens.values
    if tokens.log_value is None:
        truth = F.scaled_dot_product_attention(query.double(), keys.double(), values.double(), enable_gqa=True)
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True).double(), truth
    logits = (fold_groups(query, HEADS) @ keys.transpose(-1, -2)).float() * SCALE
    share = torch.exp(logits - logits.amax(-1, keepdim=True))
    numerator = (share * tokens.log_value.exp()[:, :, None]).to(values.dtype) @ values
    denominator = (share * tokens.log_mass.exp()[:, :, None]).to(values.dtype).sum(-1, keepdim=True)
    return unfold_groups((numerator / denominator).double(), HEADS * GROUP), in_float64(query, tokens).out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_is_within_twice_plain_torchs_error(route, kind, dtype):
    query, keys, values = draw(dtype)
    tokens = WeightedTokens(keys, values, *weights(kind))
    truth = in_float64(query, tokens)
    got = ROUTES[route](query, tokens, SCALE)
    error = (got.out.double() - truth.out).norm() / truth.out.norm()
    plain, plain_truth = plain_torch(query, tokens)
    assert error <= 2 * (plain - plain_truth).norm() / plain_truth.norm()
    assert (got.lse.double() - truth.lse).abs().max() <= (1e-4 if dtype == torch.float32 else 4e-3)


def test_the_definition_is_a_ratio_of_two_sums():
    query, keys, values = draw()
    log_mass, log_value = weights("different with zeros")
    logits = fold_groups(query, HEADS).double() @ keys.double().transpose(-1, -2) * SCALE
    numerator = (logits.exp() * log_value.double().exp()[:, :, None]) @ values.double()
    denominator = (logits.exp() * log_mass.double().exp()[:, :, None]).sum(-1)
    expected = unfold_groups(numerator / denominator[..., None], HEADS * GROUP)
    got = weighted_attention(query, WeightedTokens(keys, values, log_mass, log_value), SCALE)
    torch.testing.assert_close(got.out.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.lse.double(), denominator.log().reshape(got.lse.shape), rtol=1e-5, atol=1e-5)


def test_an_integer_weight_is_that_many_copies():
    query, keys, values = draw()
    copies = torch.randint(1, 5, (ENTRIES,))
    repeated = exact_attention(query, keys.repeat_interleave(copies, 2), values.repeat_interleave(copies, 2), SCALE)
    log_mass = copies.float().log().expand(ROWS, 1, -1)
    got = chosen(query, WeightedTokens(keys, values, log_mass), SCALE)
    torch.testing.assert_close(got.out, repeated.out)
    torch.testing.assert_close(got.lse, repeated.lse)


@settings(max_examples=50, deadline=None)
@given(cuts=st.lists(st.integers(0, ENTRIES), min_size=1, max_size=5), order=st.randoms(use_true_random=False))
def test_parts_merge_to_the_whole_in_any_order(cuts, order):
    torch.manual_seed(len(cuts))
    query, keys, values = draw()
    log_mass, log_value = weights("different with zeros")
    whole = weighted_attention(query, WeightedTokens(keys, values, log_mass, log_value), SCALE)
    edges = [0, *sorted(cuts), ENTRIES]
    pieces = [slice(a, b) for a, b in itertools.pairwise(edges) if b > a]
    parts = [
        weighted_attention(
            query, WeightedTokens(keys[:, :, p], values[:, :, p], log_mass[..., p], log_value[..., p]), SCALE
        )
        for p in pieces
    ]
    # A numerator without any mass is not a Partial (there is nothing to divide by): leave such cuts out.
    assume(not any((part.lse == -math.inf).any() for part in parts))
    order.shuffle(parts)
    while len(parts) > 1:  # a random tree, not only left to right
        at = order.randrange(len(parts) - 1)
        parts[at : at + 2] = [merge(parts[at], parts[at + 1])]
    torch.testing.assert_close(parts[0].out, whole.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts[0].lse, whole.lse, rtol=1e-5, atol=1e-5)


def test_merging_with_an_empty_part_changes_nothing():
    query, keys, values = draw()
    part = exact_attention(query, keys, values, SCALE)
    empty = Partial(torch.zeros_like(part.out), torch.full_like(part.lse, -math.inf))
    for merged in (merge(part, empty), merge(empty, part)):
        torch.testing.assert_close(merged.out, part.out)
        torch.testing.assert_close(merged.lse, part.lse)
    nothing = merge(empty, empty)
    assert (nothing.out == 0).all()
    assert (nothing.lse == -math.inf).all()


@pytest.mark.parametrize("route", ROUTES)
def test_a_head_without_entries_answers_zero_with_no_mass(route):
    query, keys, values = draw()
    log_mass = torch.zeros(ROWS, HEADS, ENTRIES)
    log_mass[0, 1] = -math.inf
    got = ROUTES[route](query, WeightedTokens(keys, values, log_mass), SCALE)
    dead = slice(GROUP, 2 * GROUP)
    assert (got.out[0, dead] == 0).all()
    assert (got.lse[0, dead] == -math.inf).all()
    assert got.lse[1].isfinite().all()
    assert got.lse[0, :GROUP].isfinite().all()


@pytest.mark.parametrize("route", ROUTES)
def test_huge_logits_and_weights_stay_finite(route):
    query, keys, values = draw(spread=1000.0)
    log_mass = torch.empty(ROWS, HEADS, ENTRIES).uniform_(0, 60)
    tokens = WeightedTokens(keys, values, log_mass, log_mass + 1)
    got, truth = ROUTES[route](query, tokens, SCALE), in_float64(query, tokens)
    assert got.out.isfinite().all()
    torch.testing.assert_close(got.out.double(), truth.out, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("value_width", [8, 48])
def test_values_may_have_a_width_of_their_own(value_width):
    query, keys, values = draw(value_width=value_width)
    tokens = WeightedTokens(keys, values, *weights("different"))
    truth = in_float64(query, tokens)
    for attend in ROUTES.values():
        torch.testing.assert_close(attend(query, tokens, SCALE).out.double(), truth.out, rtol=1e-4, atol=1e-5)


def test_softcap_bends_the_logits_before_the_weights():
    query, keys, values = draw(spread=10.0)
    log_mass, _ = weights("equal")
    logits = fold_groups(query, HEADS) @ keys.transpose(-1, -2) * SCALE
    bent = 5.0 * torch.tanh(logits / 5.0) + log_mass[:, :, None]
    expected = unfold_groups(bent.softmax(-1) @ values, HEADS * GROUP)
    got = chosen(query, WeightedTokens(keys, values, log_mass), SCALE, softcap=5.0)
    torch.testing.assert_close(got.out, expected, rtol=1e-4, atol=1e-5)


def test_the_reference_in_blocks_is_the_definition(monkeypatch):
    query, keys, values = draw(queries=50)
    tokens = WeightedTokens(keys, values, *weights("different"))
    whole = weighted_attention(query, tokens, SCALE)
    monkeypatch.setattr(reference, "LOGITS_AT_ONCE", 7 * ROWS * HEADS * GROUP * ENTRIES)
    blocks = reference.attend(query, tokens, SCALE)
    torch.testing.assert_close(blocks.out, whole.out)
    torch.testing.assert_close(blocks.lse, whole.lse)


@pytest.mark.parametrize("kernels", [nullcontext, native.off], ids=["C", "torch"])
def test_no_tokens_at_all_get_no_answer(kernels):
    """Torch's own kernel would divide by their number, and end the process."""
    query, keys, values = draw(entries=0, queries=0)
    with kernels():
        found = causal_attention(query, keys, values, SCALE)
    assert found.out.shape == query.shape
    assert not found.lse.numel()


@pytest.mark.parametrize("kernels", [nullcontext, native.off], ids=["C", "torch"])
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
def test_no_rows_at_all_get_no_answer(dtype, kernels):
    for queries, entries in itertools.product((1, QUERIES, 64), (0, 64)):
        query, keys, values = (x[:0] for x in draw(dtype, queries=queries, entries=entries))
        tokens = WeightedTokens(keys, values, torch.zeros(0, 1, entries))
        with kernels():
            found = [chosen(query, tokens, SCALE), chosen(query, WeightedTokens(keys, values), SCALE)]
            if entries == queries:
                found.append(causal_attention(query, keys, values, SCALE))
        assert all(one.out.shape == query.shape and one.lse.shape == query.shape[:3] for one in found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal_attention_without_c_is_bitwise_torchs_own(dtype):
    query, keys, values = draw(dtype, entries=77, queries=77)
    with native.off():
        got = causal_attention(query, keys, values, SCALE)
    stock = F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True, scale=SCALE)
    assert torch.equal(got.out, stock)


@pytest.mark.parametrize("kernels", [nullcontext, native.off], ids=["C", "torch"])
def test_numbers_of_a_token_need_not_lie_side_by_side(kernels):
    """Where halves of width 1 are put together torch lays tokens side by side, and its own kernel does not look."""
    query, keys, values = draw(entries=60, queries=60)
    valid = torch.rand(ROWS, 60) < 0.7
    forms = (
        lambda q, k, v: causal_attention(q, k, v, SCALE),
        lambda q, k, v: causal_attention(q, k, v, SCALE, valid=valid),
        lambda q, k, v: weighted_attention(q, WeightedTokens(k, v, torch.zeros(ROWS, 1, 60)), SCALE),
    )
    for form in forms:
        expected = form(query, keys, values)
        for turned in range(3):
            given = [x.mT.contiguous().mT if i == turned else x for i, x in enumerate((query, keys, values))]
            with kernels():
                got = form(*given)
            torch.testing.assert_close(got.out, expected.out, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(got.lse, expected.lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 40])
def test_an_answer_that_is_not_merged_may_come_without_its_mass(queries):
    """Where no kernel of ours runs, as in float64, it is torch's own call, with an lse of NaN that nobody can use."""
    query, keys, values = (t.double() for t in draw(queries=queries, entries=40))
    alone = causal_attention(query, keys[:, :, :queries], values[:, :, :queries], SCALE, lse=False)
    whole = causal_attention(query, keys[:, :, :queries], values[:, :, :queries], SCALE)
    torch.testing.assert_close(alone.out, whole.out)
    assert alone.lse.isnan().all()
    assert whole.lse.isfinite().all()
    among_all = chosen(query, WeightedTokens(keys, values), SCALE, lse=False)
    torch.testing.assert_close(among_all.out, exact_attention(query, keys, values, SCALE).out)
    log_mass = torch.randn(ROWS, 1, 40)  # weights need the mass: it is there
    assert chosen(query, WeightedTokens(keys, values, log_mass), SCALE, lse=False).lse.isfinite().all()


@pytest.mark.parametrize("kernels", [nullcontext, native.off], ids=["C", "torch"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_padded_causal_attention_in_blocks_equals_rows_without_padding(softcap, kernels, monkeypatch):
    from kvsketch.kernels import weighted_attention as kernel

    monkeypatch.setattr(kernel, "MASK_AT_ONCE", 16 * ROWS * 77)
    query, keys, values = draw(entries=77, queries=77)
    valid = torch.ones(ROWS, 77, dtype=torch.bool)
    valid[0, :20] = False  # left
    valid[1, 30:35] = False  # a hole
    with kernels():
        got = causal_attention(query, keys, values, SCALE, valid=valid, softcap=softcap)
    assert got.out.isfinite().all()
    for row in range(ROWS):
        real = valid[row]
        single = [t[row : row + 1][:, :, real] for t in (query, keys, values)]
        with kernels():
            alone = causal_attention(*single, SCALE, softcap=softcap)
        torch.testing.assert_close(got.out[row : row + 1][:, :, real], alone.out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got.lse[row : row + 1][:, :, real], alone.lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value_width", [WIDTH, 5])
@pytest.mark.parametrize("kind", ["all one", "equal with empty slots", "different"])
def test_gradients_of_merged_answers_are_those_of_the_definition(kind, value_width):
    """torch's kernel has no gradient of its lse, which says how much each part counts."""
    torch.manual_seed(4)
    drawn, logs = draw(value_width=value_width), weights(kind)
    new = draw(entries=QUERIES, value_width=value_width)[1:]
    causal = torch.ones(QUERIES, QUERIES, dtype=torch.bool).tril()[None, None]
    found = []
    for fast in (True, False):
        query, keys, values, new_keys, new_values = (x.clone().requires_grad_() for x in (*drawn, *new))
        if fast:
            past = chosen(query, WeightedTokens(keys, values, *logs), SCALE)
            answer = merge(past, causal_attention(query, new_keys, new_values, SCALE))
        else:
            past = weighted_attention(query, WeightedTokens(keys, values, *logs), SCALE)
            answer = merge(past, exact_attention(query, new_keys, new_values, SCALE, visible=causal))
        (answer.out.square().sum() + answer.lse.sin().sum()).backward()
        found.append([x.grad for x in (query, keys, values, new_keys, new_values)])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_gradients_pass_through_the_definition():
    query, keys, values = (t.double().requires_grad_() for t in draw(entries=5, queries=1))
    log_mass = torch.randn(ROWS, HEADS, 5, dtype=torch.float64).requires_grad_()

    def answer(query, keys, values, log_mass):
        return weighted_attention(query, WeightedTokens(keys, values, log_mass), SCALE).out

    assert torch.autograd.gradcheck(answer, (query, keys, values, log_mass))


# -- while tests run


def test_types_and_shapes_are_checked():
    with pytest.raises(TypeCheckError):
        log_of(torch.zeros(3))
    with pytest.raises(TypeCheckError):
        Partial(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5))


def test_nothing_is_checked_as_users_run_it(as_users_run_it):
    assert Partial(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5)).lse.shape == (1, 2, 5)
