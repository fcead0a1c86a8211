"""The walks, k-center and draws in C: what torch's forms give, at any size, kind and layout of what comes in."""

import math

import pytest
import torch

from drawn import normal
from kvsketch.algorithms import draws
from kvsketch.caches.forgetting.balancekv.practical import WALKS
from kvsketch.kernels import balanced_walk, kcenter, native
from kvsketch.kernels.balanced_walk import native as walk
from kvsketch.kernels.balanced_walk import reference, strips
from kvsketch.kernels.draws import native as native_draws
from kvsketch.kernels.draws import uniforms
from kvsketch.kernels.kcenter import native as native_kcenter
from kvsketch.kernels.kcenter import reference as plain_kcenter
from repeated import ONCE_MORE
from test_kcenter import KINDS, points

GREEDY = WALKS["greedy"]
needs_compiler = pytest.mark.skipif(native.library() is None, reason="there are no kernels in C here")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def torch_alone(monkeypatch):
    monkeypatch.setenv(native.SWITCH, "off")
    native.loaded.cache_clear()
    yield
    monkeypatch.undo()
    native.loaded.cache_clear()


@pytest.fixture
def on_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def chances(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- the walks


def signs_in_float64(keys, values, uniforms, sizes, scale, gain):
    return strips.halving_signs(keys.double(), values.double(), uniforms, sizes, scale, gain)


@needs_compiler
@pytest.mark.parametrize(("d", "e", "apart"), [(6, 6, 0), (33, 70, 0), (128, 1, 0), (64, 64, 8)])
def test_signs_are_those_of_torch_but_where_rounding_decides(numbers, d, e, apart):
    """As often as those of the form in strips are: of 64 blocks, at most a few have a near tie."""
    sizes = torch.tensor([256, 2, 64, 66, 130, 200, 254, 128] * (2 if ONCE_MORE else 8))
    blocks = len(sizes)
    keys, values = normal(blocks, 256, d) + apart * normal(blocks, 1, d, seed=2), normal(blocks, 256, e, seed=1)
    keys, values, u = keys.to(numbers), values.to(numbers), chances(blocks, 256)
    exact = signs_in_float64(keys, values, u, sizes, d**-0.5, GREEDY)
    single = strips.halving_signs(keys, values, u, sizes, d**-0.5, GREEDY)
    kept = walk.keep_half(keys, values, u, sizes, d**-0.5, GREEDY)
    assert torch.equal(kept.sum(1), sizes // 2)
    assert not (kept & (torch.arange(256) >= sizes[:, None])).any()
    differ, strips_differ = ((x != (exact > 0)).any(1).sum() for x in (kept, single > 0))
    assert differ <= 1 + blocks // 32 + 2 * strips_differ


@needs_compiler
def test_blocks_of_numbered_tokens_are_halved_where_they_lie(numbers):
    keys, values = normal(3, 400, 40).to(numbers), normal(3, 400, 24, seed=1).to(numbers)
    index = torch.rand(3, 400, generator=torch.Generator().manual_seed(2)).argsort(1)[:, :330]
    u, sizes = chances(3, 3, 130), torch.tensor([[130, 130, 70], [130, 130, 70], [130, 64, 2]])
    kept = walk.keep_half_of(keys, values, index, u, sizes, 0.2, GREEDY)
    copied = balanced_walk.gathered(keys, values, index, 3, 130)
    assert torch.equal(kept, walk.keep_half(*copied, u.flatten(0, 1), sizes.flatten(), 0.2, GREEDY))
    assert torch.equal(kept.sum(1), sizes.flatten() // 2)
    index[2, 5] = 400
    assert walk.keep_half_of(keys, values, index, u, sizes, 0.2, GREEDY) is None, "there is no such token"
    assert walk.keep_half_of(keys, values, index[:, :320], u, sizes, 0.2, GREEDY) is None, "more than are numbered"


@needs_compiler
@pytest.mark.parametrize("gain", [0.0, 0.3])
def test_signs_of_a_fair_walk_are_all_torchs(gain):
    keys, values, u = normal(40, 130, 16), normal(40, 130, 16, seed=1), chances(40, 130)
    sizes = torch.tensor([130, 128, 0, 2, 66] * 8)
    kept = walk.keep_half(keys, values, u, sizes, 0.25, gain)
    assert torch.equal(kept, signs_in_float64(keys, values, u, sizes, 0.25, gain) > 0)


@needs_compiler
def test_both_halves_answer_as_much_alike_as_torchs():
    """‖Σ sign · exp⟨q, k⟩ · v‖ over 256 blocks and 8 queries: the mean is torch's, and well below that of coins."""
    keys, values, u = normal(256, 128, 8), normal(256, 128, 8, seed=1) + 1, chances(256, 128)
    sizes, queries = torch.full((256,), 128), normal(256, 8, 8, seed=2)
    weights = torch.exp(torch.einsum("lqd,lnd->lqn", queries, keys) * 8**-0.5)

    def error(positive):
        signs = torch.where(positive, 1.0, -1.0)
        return float(torch.einsum("lqn,ln,lne->lqe", weights, signs, values).norm(dim=2).mean())

    coins = error(chances(256, 128, seed=3) < 0.5)
    mine = error(walk.keep_half(keys, values, u, sizes, 8**-0.5, GREEDY))
    torchs = error(strips.halving_signs(keys, values, u, sizes, 8**-0.5, GREEDY) > 0)
    assert abs(mine / torchs - 1) < 0.05
    assert mine < 0.75 * coins


@needs_compiler
@pytest.mark.parametrize("bound", [0.2, 30.0])
def test_the_theorems_walk_is_torchs_also_where_it_fails(numbers, bound, torch_form):
    keys, values, u = normal(60, 150, 12) / 2, normal(60, 150, 7, seed=1), chances(60, 150)
    keys, values = keys.to(numbers), values.to(numbers)
    real = torch.rand(60, 150, generator=torch.Generator().manual_seed(2)) < torch.linspace(0, 1, 60)[:, None]
    bounds = torch.full((60,), bound)
    kept, lost = walk.keep_smaller(keys, values, real, u, 12**-0.5, bounds)
    expected, failed = torch_form(balanced_walk.keep_smaller, keys, values, real, u, 12**-0.5, bounds)
    assert torch.equal(lost, failed)
    assert torch.equal(kept, expected)
    assert bool(failed.any()) == (bound == 0.2)


@needs_compiler
@pytest.mark.parametrize("size", [0.0, 1e-19, 1e-25])
def test_values_of_next_to_nothing_take_the_walk_that_torchs_do(size, torch_form):
    """Also in tiles of bfloat16, where what they are multiplied by, squared, would be beyond float32."""
    keys, values = normal(3, 128, 64).bfloat16(), (normal(3, 128, 64, seed=1) * size).bfloat16()
    real, given = torch.ones(3, 128, dtype=torch.bool), (chances(3, 128), 0.125, torch.full((3,), 30.0))
    kept, lost = balanced_walk.keep_smaller(keys, values, real, *given)
    expected, failed = torch_form(balanced_walk.keep_smaller, keys, values, real, *given)
    assert torch.equal(lost, failed)
    assert torch.equal(kept, expected)
    assert size or 40 < kept.sum() / 3 < 65


@needs_compiler
@pytest.mark.parametrize("place", [0, 4, 7])
def test_centres_of_a_point_that_is_none_are_not_chosen_in_c(place):
    points = normal(1, 50, 8)
    points[0, 3, place] = math.nan
    assert native_kcenter.k_center(points, torch.tensor([9]), torch.ones(1, 50, dtype=torch.bool), 9) is None


@pytest.fixture
def torch_form(monkeypatch):
    """Calls a function where there are no kernels in C."""

    def call(function, *arguments):
        with monkeypatch.context() as there:
            there.setenv(native.SWITCH, "off")
            native.loaded.cache_clear()
            found = function(*arguments)
        native.loaded.cache_clear()
        return found

    return call


@needs_compiler
def test_layouts_and_threads_change_nothing(numbers, on_threads):
    both = normal(9, 70, 2, 24).to(numbers)  # keys and values side by side
    keys, values, u = both[:, :, 0], both[:, :, 1], chances(9, 140)[:, ::2]
    sizes, real = torch.full((9,), 70), torch.rand(9, 70) < 0.8
    turned = keys.transpose(1, 2).contiguous().transpose(1, 2)
    plain = [x.contiguous() for x in (keys, values, u)]
    bounds = torch.full((9,), 30.0)
    halves, smaller, found = [], [], []
    for count in (1, 2):
        on_threads(count)
        for k, v, x in ((keys, values, u), (turned, values, u), plain):
            halves.append(walk.keep_half(k, v, x, sizes, 0.2, GREEDY))
            smaller.append(walk.keep_smaller(k, v, real, x, 0.2, bounds))
            found.append(native_kcenter.k_center(k, torch.arange(9) * 5, real, 40))
    assert all(torch.equal(x, halves[0]) for x in halves)
    assert all(torch.equal(x, y) for pair in smaller for x, y in zip(pair, smaller[0], strict=True))
    for field in ("centres", "nearest", "distance"):
        assert all(torch.equal(getattr(x, field), getattr(found[0], field)) for x in found)


@needs_compiler
@pytest.mark.parametrize("shape", [(0, 8, 4), (3, 0, 4), (3, 2, 1)])
def test_there_may_be_next_to_nothing(shape):
    blocks, n, _ = shape
    keys, sizes, valid = torch.ones(shape), torch.full((blocks,), n), torch.ones(blocks, n, dtype=torch.bool)
    assert torch.equal(walk.keep_half(keys, keys, chances(blocks, n), sizes, 1.0, GREEDY).sum(1), sizes // 2)
    kept, lost = walk.keep_smaller(keys, keys, ~valid, chances(blocks, n), 1.0, torch.ones(blocks))
    assert not kept.any()
    assert not lost.any()
    found = native_kcenter.k_center(keys, torch.zeros(blocks).long(), valid, 0)
    assert found.centres.shape == (blocks, 0)
    assert not found.nearest.any()


@needs_compiler
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_numbers_that_are_none_still_halve_exactly(bad):
    keys, values = normal(2, 70, 5), normal(2, 70, 5, seed=1)
    keys[0, 3, 2] = bad
    kept = walk.keep_half(keys, values, chances(2, 70), torch.tensor([70, 64]), 0.4, GREEDY)
    assert kept.sum(1).tolist() == [35, 32]


# -- k-center


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, "repeated", "far away"])
def test_centres_are_those_of_the_reference(kind, dtype):
    count, most = (501, 100) if ONCE_MORE else (1501, 300)
    keys = points({"repeated": "gauss", "far away": "gauss"}.get(kind, kind), count, width=36)
    if kind == "repeated":
        keys = keys[torch.randint(most // 2, (count,), generator=torch.Generator().manual_seed(1))]
    keys = (keys + 500 * (kind == "far away")).to(dtype).expand(4, -1, -1).clone()
    keys[3] *= 50
    valid = torch.ones(4, count, dtype=torch.bool)
    valid[1, :250] = valid[2, ::3] = valid[3, 7:] = False
    keys[2, ::3] = math.nan  # what is not valid is not read
    wanted = torch.tensor([most, 2 * most // 3, 1, 7])
    found = native_kcenter.k_center(keys, wanted, valid, most)
    expected = plain_kcenter.k_center(keys.double().masked_fill(~valid[..., None], 0), wanted, valid)
    assert torch.equal(found.centres, expected.centres)
    assert torch.equal(found.nearest.masked_fill(~valid, 0), expected.nearest.masked_fill(~valid, 0))
    torch.testing.assert_close(found.distance, expected.distance.float())


@needs_compiler
def test_what_float32_has_no_products_of_is_torchs(torch_form):
    valid, wanted = torch.ones(1, 50, dtype=torch.bool), torch.tensor([9])
    for size in (1e-30, 1e30, math.nan):
        keys = points("gauss", 50)[None] * size
        found = native_kcenter.k_center(keys, wanted, valid, 9)
        assert (found is None) == (size != 1e-30)
    keys = points("gauss", 50)[None, None] * 1e30
    expected = torch_form(kcenter.k_center, keys, wanted)
    assert torch.equal(kcenter.k_center(keys, wanted).centres, expected.centres)


# -- draws


@needs_compiler
def test_draws_are_the_same_bits():
    heads, ranks = torch.arange(5), torch.arange(300).view(5, 60) << 40
    for address in (
        (7, heads),
        (-3, 2**62, heads[:, None], ranks[:, ::7]),
        (0, heads[:, None, None], ranks[:, :, None], 5, torch.arange(200)),
        (heads[:, None], 1, torch.zeros(1, 0).long()),
        (heads[None, :, None, None], heads[:, None, None, None], ranks[0], 9),
    ):
        found, expected = native_draws.uniforms(*address), draws.uniforms(*address)
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype == torch.float64
    assert native_draws.uniforms(1, 2) is None
    assert native_draws.uniforms(*heads, heads[:, None]) is not None
    assert native_draws.uniforms(*range(8), heads) is None, "more parts than there is room for"
    assert torch.equal(uniforms(*range(8), heads), draws.uniforms(*range(8), heads))


# -- without C


@pytest.mark.usefixtures("torch_alone")
def test_switched_off_all_is_torchs():
    keys, values, u = normal(4, 64, 8), normal(4, 64, 8, seed=1), chances(4, 64)
    sizes, real = torch.full((4,), 64), torch.ones(4, 64, dtype=torch.bool)
    assert walk.keep_half(keys, values, u, sizes, 0.4, GREEDY) is None
    assert walk.keep_smaller(keys, values, real, u, 0.4, torch.full((4,), 9.0)) is None
    assert native_kcenter.k_center(keys, sizes // 4, real, 16) is None
    assert native_draws.uniforms(0, sizes) is None
    kept = balanced_walk.keep_half(keys, values, u, sizes, 0.4, GREEDY)
    assert torch.equal(kept, strips.halving_signs(keys, values, u, sizes, 0.4, GREEDY) > 0)
    signs, lost = reference.bounded_signs(
        reference.bounded_products(keys, values, real, 0.4), torch.full((4,), 9.0), u, real
    )
    found = balanced_walk.keep_smaller(keys, values, real, u, 0.4, torch.full((4,), 9.0))
    assert torch.equal(found[0].sum(1), torch.minimum((signs > 0).sum(1), (signs < 0).sum(1)))
    assert torch.equal(found[1], lost)
    centres = kcenter.k_center(keys[None], torch.tensor([16])).centres[0]
    assert torch.equal(centres, plain_kcenter.k_center(keys.double(), sizes // 4, real).centres)
