"""BalanceKV's cache: halves, levels and weights; and that it is better than a sample of as many."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import normal
from kvsketch.algorithms.balancekv import halve_exactly, softmax_balance
from kvsketch.algorithms.draws import uniforms as uniforms_at
from kvsketch.attention import exact_attention
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.chooser import Held, Pool
from kvsketch.caches.core.config import BLOCK
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import Arriving, NewTokens
from kvsketch.caches.forgetting.balancekv import BalanceKV
from kvsketch.caches.forgetting.balancekv.levels import Levels
from kvsketch.caches.forgetting.balancekv.practical import WALKS, Halves, Halving, _places_of
from kvsketch.caches.forgetting.uniform import Uniform
from kvsketch.kernels.balanced_walk import gathered, keep_half, reference, strips
from lanes import Fed, entries_of, entries_of_rows
from waiting import Waits

GREEDY = WALKS["greedy"]


PLAIN = partial(BalanceKV, sharpness=1, augmented=False)  # as in the paper's experiments


def draws(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_what_is_kept_of_blocks_is_found_without_asking_how_many():
    kept = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i)) < 3 for i in range(20)])
    kept, places = kept.view(5, 24), 10 + torch.arange(24).view(4, 6)
    with Waits() as waits:
        found = _places_of(kept, places, 12)
    assert not waits.lines
    assert found.tolist() == [(10 + own.nonzero()[:, 0]).tolist() for own in kept]


@pytest.mark.parametrize("sizes", [[6], [6, 6, 4], [6, 2, 2, 2], [2, 6, 4]])
def test_blocks_have_the_tokens_of_a_level_in_their_order(sizes):
    keys, here = normal(2, 40, 3), torch.stack([torch.arange(20), torch.arange(20, 40)]) % 37
    halves = Halves(Halving(6, "greedy", 1, 0.0, 0, 0), lambda budget, count: count)
    held, came = keys.split([29, 11], 1)
    pool = Pool(Held(held, held), Arriving(came, came, 29, lambda _: torch.arange(2)))
    blocks, places = halves._blocks(pool, here, sizes, 0, 5, torch.arange(2), torch.arange(46))
    found, _ = gathered(blocks.keys, blocks.values, blocks.index, len(sizes), max(sizes))
    real = torch.arange(max(sizes)) < torch.tensor(sizes * 2)[:, None]
    expected = torch.cat([keys[lane, here[lane, : sum(sizes)]] for lane in range(2)])
    assert torch.equal(found[real], expected)
    drawn = uniforms_at(0, 0, torch.arange(2)[:, None], 0, torch.arange(5, 5 + sum(sizes)))
    assert torch.equal(blocks.numbers.flatten(0, 1)[real].view(2, -1), drawn)
    order = _places_of(real.view(2, -1), places, sum(sizes))
    assert order.tolist() == [[*range(sum(sizes))]] * 2


# -- the walk over many blocks


@pytest.mark.parametrize("gain", [0.0, 0.3, GREEDY])
@pytest.mark.parametrize("size", [2, 32, 64])
def test_all_blocks_together_have_the_signs_of_the_one_head_algorithm(gain, size):
    keys, values = normal(5, size, 8), normal(5, size, 6, seed=1)
    products = reference.products(keys, values, 8**-0.5).double()
    uniforms = draws(5, size)
    signs = reference.halving_signs(products, uniforms, gain)
    for block in range(5):
        assert torch.equal(signs[block], halve_exactly(products[block], gain, uniforms[block]))


def test_a_small_gain_is_the_theorems_walk_until_half_have_one_sign():
    """Algorithm 2 with its own step 1/(2cR²): the same signs, up to the place where the exact half cuts in."""
    keys, values = normal(64, 4).double(), normal(64, 3, seed=1).double()
    r_key, r_value, failure, scale = float(keys.norm(dim=1).max()), float(values.norm(dim=1).max()), 0.1, 0.5
    uniforms = draws(64)
    walk = softmax_balance(keys, values, r_key, r_value, failure, uniforms, scale)
    products = torch.exp(keys @ keys.T * scale) * (values @ values.T)
    bound = 30 * math.log(64 / failure) * math.exp(r_key**2 * scale) * r_value**2
    signs = halve_exactly(products, 1 / (2 * bound), uniforms)
    assert walk.failed_at is None
    first_cut = next(j for j in range(1, 65) if max((signs[:j] > 0).sum(), (signs[:j] < 0).sum()) == 32)
    assert first_cut > 40
    assert torch.equal(signs[:first_cut], walk.signs[:first_cut])


@pytest.mark.parametrize("gain", [0.0, 0.3, GREEDY])
def test_the_form_in_strips_has_the_signs_of_the_reference(gain):
    """In float64, where rounding decides nothing; blocks of any even size together, as many as several pieces."""
    sizes = torch.tensor([256, 2, 64, 66, 130, 200, 254, 128] * 9)
    keys, values = (normal(72, 256, 6, seed=seed).double() for seed in (0, 1))
    uniforms = draws(72, 256)
    signs = strips.halving_signs(keys, values, uniforms, sizes, 0.4, gain)
    for block, size in enumerate(sizes.tolist()):
        part = (slice(block, block + 1), slice(size))
        expected = reference.halving_signs(reference.products(keys[part], values[part], 0.4), uniforms[part], gain)
        assert torch.equal(signs[part], expected)
        assert not signs[block, size:].any()


def test_in_single_precision_only_near_ties_differ():
    """A sign that rounding decides changes all that follow it; of 64 blocks of 256 at most a quarter may have one."""
    keys, values, uniforms = normal(64, 256, 16), normal(64, 256, 16, seed=1), draws(64, 256)
    signs = strips.halving_signs(keys, values, uniforms, torch.full((64,), 256), 0.25, GREEDY)
    expected = reference.halving_signs(reference.products(keys, values, 0.25), uniforms, GREEDY)
    assert (signs == expected).all(1).float().mean() > 0.75


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([2, 6, 32]), st.sampled_from([0.0, 1.0, GREEDY]))
def test_exactly_half_of_every_block_is_kept(seed, size, gain):
    keys, values = normal(3, size, 4, seed=seed), normal(3, size, 4, seed=seed + 1)
    sizes = torch.tensor([size, size - 2, 2])
    kept = keep_half(keys, values, draws(3, size, seed=seed), sizes, 0.5, gain)
    assert torch.equal(kept.sum(1), sizes // 2)
    assert not (kept & (torch.arange(size) >= sizes[:, None])).any()


def test_every_token_is_kept_as_often_as_not():
    """4,000 walks over one block of 32 tokens: every frequency within 4.5 standard errors of 1/2."""
    walks, size = 4000, 32
    keys, values = normal(size, 4).expand(walks, -1, -1), normal(size, 4, seed=1).expand(walks, -1, -1)
    frequency = keep_half(keys, values, draws(walks, size), torch.full((walks,), size), 0.5, GREEDY).double().mean(0)
    assert ((frequency - 0.5).abs() < 4.5 * 0.5 / math.sqrt(walks)).all()


def test_opposite_numbers_keep_the_other_half():
    keys, values, uniforms = normal(4, 32, 4), normal(4, 32, 4, seed=1), draws(4, 32)
    one, other = (keep_half(keys, values, u, torch.full((4,), 32), 0.5, GREEDY) for u in (uniforms, 1 - uniforms))
    assert torch.equal(one, ~other)


def test_identical_tokens_halve_to_the_same_sum():
    keys, values = torch.ones(1, 64, 4), torch.ones(1, 64, 2)
    signs = reference.halving_signs(reference.products(keys, values, 0.5), draws(1, 64), GREEDY)
    assert signs.sum() == 0
    assert (signs.view(1, 32, 2).sum(2) == 0).all(), "every token is answered by the next"


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3, 1e15])
def test_products_are_finite_whatever_the_norms(size):
    found = reference.products(normal(2, 32, 8).bfloat16() * size, torch.zeros(2, 32, 8), 1.0)
    assert found.isfinite().all()
    kept = keep_half(
        normal(2, 32, 8) * size, normal(2, 32, 8) * size, draws(2, 32), torch.tensor([32, 30]), 1.0, GREEDY
    )
    assert kept.sum(1).tolist() == [16, 15]


def test_products_have_at_least_single_precision():
    """Those of 16-bit keys lose nothing to their sum, and those in float64 nothing at all."""
    keys, values = normal(2, 32, 8), normal(2, 32, 8, seed=1)
    assert reference.products(keys.bfloat16(), values.bfloat16(), 1.0).dtype == torch.float32
    precise = reference.products(keys.double(), values.double(), 1.0)
    centred = keys.double() - keys.double().mean(1, keepdim=True)
    expected = torch.exp(centred @ centred.mT) * (values.double() @ values.double().mT + reference.ONES)
    torch.testing.assert_close(precise / precise[:, :1, :1], expected / expected[:, :1, :1], rtol=1e-12, atol=0)


# -- levels


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=20),
    st.sampled_from([64, 100, 333, 1000]),
    st.sampled_from([32, 256]),
)
def test_levels_fit_and_lose_no_weight(calls, room, block):
    levels = Levels()
    count = 0
    for blocks_of_tokens in calls:
        for _ in range(blocks_of_tokens):
            new = BLOCK * (1 + count % 3 * 5)  # a trickle, and now and then a long call
            levels, _ = levels.after(new, room, block)
            count += new
            assert sum(levels.held) <= room
            assert sum(2**level * held for level, held in enumerate(levels.held)) == count
    for level, halved in enumerate(levels.halved[:-1]):
        assert halved // 2 == levels.halved[level + 1] + levels.held[level + 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(300, 20_000), st.floats(0.03, 0.9), st.sampled_from([32, 64, 128, 256]))
def test_after_one_long_call_weights_differ_by_a_factor_of_two(count, share, block):
    """But for a single odd token at each lower level; and of the room no more than half a small block is left."""
    room = max(64, int(share * count))
    levels, _ = Levels().after(count, room, block)
    tops = [level for level, held in enumerate(levels.held) if held > 1]
    assert tops in ([tops[-1]], [tops[-1] - 1, tops[-1]])
    assert count <= room or room - 32 <= levels.total <= room


def numbered(count, rows=1):
    """Values that say which token it was."""
    keys = normal(rows, 2, count, 8)
    return keys, torch.arange(1.0, count + 1)[None, None, :, None].expand(rows, 2, -1, 1).contiguous()


@pytest.mark.parametrize("keep", [0.125, 0.25, 0.3, 0.75])
def test_older_tokens_come_first_and_stand_for_at_least_as_many(keep):
    keys, values = numbered(4096)
    held = Fed(PLAIN(keep=keep), Budget(keep, None, 164), heads=2).write(keys, values).entries()
    assert (held.values[..., 0].diff(dim=2) > 0).all(), "tokens keep their order, and none comes twice"
    weights = held.log_mass.exp().round()
    assert (weights.diff(dim=2) <= 0).all()
    assert weights.sum(2).tolist() == [[4096, 4096]]
    assert 0.95 * keep < (held.keys.shape[2] + 68) / 4164 <= keep
    assert weights.max() <= 2 ** math.ceil(math.log2(1 / keep) + 0.2), "no token stands for more than it has to"


def test_the_blocks_that_are_halved_together_are_halved_as_one_by_one():
    """A long call halves many blocks at once; its halves are those of the algorithm, block after block."""
    count, size = 1024, 64
    keys, values = normal(1, 1, count, 8), normal(1, 1, count, 8, seed=1)
    fed = Fed(PLAIN(keep=512, block=size), Budget(None, 100 + 640, 132), layer=5).write(keys, values)
    held, halved = (fed.holding.numbers()[name] for name in ("held", "halved"))
    assert held[0] + held[1] == sum(held)
    kept = []
    for start in range(0, halved[0], size):
        part = slice(start, start + size)
        products = reference.products(keys[0, :, part], values[0, :, part], 8**-0.5)[0].double()
        drawn = uniforms_at(0, 5, 0, 0, torch.arange(start, start + size))
        kept += (start + (halve_exactly(products, GREEDY, drawn) > 0).nonzero()[:, 0]).tolist()
    kept += range(halved[0], count)
    assert torch.equal(fed.entries().keys[0, 0], keys[0, 0, kept])


def test_sharpness_is_a_factor_on_the_logits_of_the_walk():
    """The same tokens are kept as with keys that are shorter by its root."""
    keys, values = normal(1, 2, 1000, 8), normal(1, 2, 1000, 4, seed=1)
    caches = [LayerCache(PLAIN(keep=0.25, sharpness=sharpness), 0) for sharpness in (0.25, 1, 1)]
    for cache, given_keys in zip(caches, (2 * keys, keys, 2 * keys), strict=True):
        cache.hold(NewTokens(given_keys, values))
    soft, half, sharp = (entries_of(cache.past).values for cache in caches)
    assert torch.equal(soft, half)
    assert not torch.equal(soft, sharp)


def test_the_estimate_is_unbiased():
    """400 seeds; numerator and denominator of one query within four standard errors."""
    count, seeds = 512, 400
    keys, values = normal(1, 1, count, 8) / 2, normal(1, 1, count, 4, seed=1)
    query = normal(8, seed=2)
    found = []
    for seed in range(seeds):
        held = Fed(PLAIN(keep=0.25, seed=seed, block=32), Budget(0.25, None, 132)).write(keys, values).entries()
        weights = torch.exp(held.keys[0, 0] @ query + held.log_mass[0, 0])
        found.append(torch.cat([weights @ held.values[0, 0], weights.sum()[None]]))
    got = torch.stack(found).double()
    weights = torch.exp(keys[0, 0] @ query)
    expected = torch.cat([weights @ values[0, 0], weights.sum()[None]]).double()
    assert ((got.mean(0) - expected).abs() < 4 * got.std(0) / math.sqrt(seeds)).all()


def relative_error(config, keys, values, query, scale):
    cache = LayerCache(config, 0)
    cache.hold(NewTokens(keys, values))
    exact = exact_attention(query, keys, values, scale).out
    return float((cache.attend(query, scale).out - exact).norm() / exact.norm())


def clustered(count, seed):
    """40 clusters of keys with values that go with them."""
    which = torch.randint(40, (count,), generator=torch.Generator().manual_seed(seed))
    keys = normal(40, 32, seed=seed)[which] + normal(count, 32, seed=seed + 1) / 2
    values = normal(40, 32, seed=seed + 2)[which] + 0.3 * normal(count, 32, seed=seed + 3)
    return keys[None, None], values[None, None]


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0.5, 0.25, 0.125])
def test_its_error_is_below_that_of_a_weighted_sample_and_of_fair_coins(keep):
    """Keys and queries of norms for which exp⟨q, k⟩ is smooth over a cluster; 20 seeds, paired; a fifth at least."""
    differences = {"uniform": [], "fair": []}
    for seed in range(20):
        keys, values = clustered(4096, seed)
        query, scale = normal(1, 1, 64, 32, seed=seed + 9), 32**-0.5
        ours = relative_error(PLAIN(keep=keep, seed=seed), keys, values, query, scale)
        sample = relative_error(Uniform(keep=keep, seed=seed), keys, values, query, scale)
        coins = relative_error(PLAIN(keep=keep, seed=seed, walk="fair"), keys, values, query, scale)
        differences["uniform"].append(ours / sample - 1)
        differences["fair"].append(ours / coins - 1)
    for name, found in differences.items():
        ratio = torch.tensor(found)
        assert ratio.mean() + 4 * ratio.std() / math.sqrt(20) < -0.2, name


@pytest.mark.parametrize("augmented", [False, True])
def test_a_stream_in_chunks_loses_no_weight(augmented):
    """A chunk pushes the window out, and most of itself: two calls of whatever sizes."""
    cache = LayerCache(BalanceKV(keep=0.25, augmented=augmented), 0)
    for number in range(6):
        cache.hold(NewTokens(normal(1, 2, 500, 8, seed=number), normal(1, 2, 500, 4, seed=number)))
        assert entries_of(cache.past).log_mass.exp().sum(2).round().tolist() == [[cache.left[0]] * 2]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "call"), [(5_000, 64)])
def test_a_trickle_with_little_room_has_no_larger_error_than_a_sample(count, call):
    """A twentieth of the tokens, fed a few at a time, 4 streams: weights are uneven then, and yet no worse."""
    ratios = []
    for seed in range(4):
        keys, values = clustered(count, seed)
        query = normal(1, 1, 64, 32, seed=seed + 9)
        exact = exact_attention(query, keys, values, 32**-0.5).out
        errors = []
        for config in (PLAIN(keep=0.05, seed=seed), Uniform(keep=0.05, seed=seed)):
            cache = LayerCache(config, 0)
            for start in range(0, count, call):
                part = slice(start, start + call)
                cache.hold(NewTokens(keys[:, :, part], values[:, :, part]))
            errors.append(float((cache.attend(query, 32**-0.5).out - exact).norm()))
        ratios.append(errors[0] / errors[1])
    assert sum(ratios) / 4 < 1.1


def test_rows_of_unequal_lengths_have_levels_of_their_own():
    lengths = [64, 320, 4096]
    keys, values = numbered(4096, rows=3)
    ranks = torch.arange(4096).expand(3, -1).clone()
    for row, length in enumerate(lengths):
        ranks[row, : 4096 - length] = -1
        ranks[row, 4096 - length :] = torch.arange(length)
    fed = Fed(PLAIN(keep=0.25), Budget(0.25, None, 132), rows=3, heads=2).write(keys, values, ranks=ranks)
    weights = [held.log_mass.exp().round().sum(2).tolist() for held in entries_of_rows(fed.lanes)]
    assert weights == [[[length] * 2] for length in lengths]
    assert fed.count_entries()[0].tolist() == [64, 64]


# -- set apart


def with_room(room, *, rows=1, heads=1, **options):
    """One that holds `room` tokens at most."""
    config = BalanceKV(keep=room + 100, **options)
    return Fed(config, Budget(None, config.exact_entries() + room, config.least_entries()), rows=rows, heads=heads)


def outliers(keys, mean, count):
    """The keys with the least cosine to the mean, in their order."""
    cosines = torch.nn.functional.cosine_similarity(keys, mean[:, :, None], dim=3)
    index = cosines.argsort(dim=2)[:, :, :count].sort(dim=2).values
    return keys.gather(2, index[..., None].expand(*index.shape, keys.shape[3]))


@pytest.mark.parametrize("apart", [0.25, 0.5])
def test_what_points_away_from_the_mean_of_all_keys_is_set_apart(apart):
    keys, values = 1 + normal(2, 3, 600, 8), normal(2, 3, 600, 4, seed=1)
    held = with_room(200, rows=2, heads=3, apart=apart).write(keys, values).entries()
    count = int(200 * apart)
    assert torch.equal(held.keys[:, :, :count], outliers(keys, keys.mean(2), count))
    assert (held.log_mass[:, :, :count] == 0).all()
    torch.testing.assert_close(held.log_mass.exp().sum(2), torch.full((2, 3), 600.0), rtol=1e-6, atol=0)


def test_what_does_not_point_away_any_more_comes_back_to_the_levels():
    """The mean moves to the other side: those set apart before are the usual ones then."""
    early, late = 3 + normal(1, 1, 300, 8), -3 + normal(1, 1, 2000, 8, seed=1)
    early[:, :, 100:110] *= -1
    fed = with_room(200).write(early, early)
    first = outliers(early, early.mean(2), 100)
    assert torch.equal(fed.entries().keys[:, :, :100], first)
    fed.write(late, late)
    mean = torch.cat([early, late], 2).mean(2)
    # Of the early keys only those set apart then were still at hand, one by one.
    assert torch.equal(fed.entries().keys[:, :, :100], outliers(torch.cat([first, late], 2), mean, 100))
    assert fed.entries().log_mass.exp().sum() == pytest.approx(2300, rel=1e-6)


def test_a_small_room_is_left_to_the_levels():
    fed = with_room(BLOCK, apart=0.9).write(normal(1, 1, 900, 8), normal(1, 1, 900, 4))
    assert fed.holding.numbers()["apart"] == 0
    assert fed.entries().count <= BLOCK


@pytest.mark.parametrize("options", [{}, {"augmented": False}, {"walk": "fair"}, {"mode": "faithful"}], ids=str)
@pytest.mark.parametrize("calls", [[1], [3, 1, 1], [33, 7, 500, 1, 255, 2, 1], [1] * 70], ids=str)
def test_calls_of_any_size_are_taken(options, calls):
    """Odd counts, single tokens, calls smaller and larger than a block; some values are zero."""
    room = 64
    fed = with_room(room, heads=2, **options)
    seen = 0
    for number, count in enumerate(calls):
        values = normal(1, 2, count, 4, seed=number)
        values[:, :, ::3] = 0.0
        fed.write(normal(1, 2, count, 8, seed=number), values)
        seen += count
        held = fed.entries()
        assert fed.count_entries().max() <= room
        if seen <= room:
            assert fed.count_entries().tolist() == [[seen, seen]]
        got = fed.attend(normal(1, 2, 3, 8), 1.0)
        assert got.out.isfinite().all()
        mass = held.log_mass.exp().sum(2)
        assert mass.max() <= seen * (1 + 1e-6)
        if options.get("mode") != "faithful":
            assert mass.min() >= seen * (1 - 1e-6), "every token is stood for"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 16}, "block must be a whole number of at least 32, got 16"),
        ({"block": 100}, "block must be a power of two, got 100"),
        ({"apart": 1.0}, "apart must be a positive number below 1, got 1.0"),
        ({"augmented": False, "apart": 0.25}, "apart is an option of augmented=True, got apart=0.25 without it"),
        ({"sharpness": 0}, "sharpness must be a positive number, got 0"),
        ({"walk": "random"}, "walk must be one of greedy, fair, got 'random'"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"keep": 100}, "needs at least"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        BalanceKV(**options)
