"""k-center: the guarantee, the same centres from every form, and what the cache makes of them."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch.algorithms.kcenter import Clusters, greedy_k_center, take_tokens
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens
from kvsketch.caches.forgetting.clustergen import ClusterGen
from kvsketch.kernels import kcenter
from kvsketch.kernels.kcenter import lazy, reference
from lanes import Fed


def points(kind, count, width=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, width, generator=generator)
    if kind == "gauss":
        return noise
    if kind == "clustered":
        centres = 3 * torch.randn(40, width, generator=generator)
        return centres[torch.randint(40, (count,), generator=generator)] + noise / 2
    if kind == "heavy tails":
        return noise / torch.rand(count, 1, generator=generator).sqrt()
    assert kind == "few different ones"
    return torch.randint(0, 3, (count, 4), generator=generator).float().repeat(1, width // 4)


KINDS = ["gauss", "clustered", "heavy tails", "few different ones"]


def lanes(*kinds, count):
    stacked = torch.stack([points(kind, count, seed=i) for i, kind in enumerate(kinds)])
    valid = torch.ones(len(kinds), count, dtype=torch.bool)
    return stacked.double(), valid


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 4))
def test_no_choice_of_as_many_centres_has_less_than_half_of_the_radius(seed, count, centres):
    keys = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    distances = torch.cdist(keys, keys)
    best = min(
        float(distances[:, list(chosen)].amin(1).max()) for chosen in combinations(range(count), min(centres, count))
    )
    assert float(greedy_k_center(keys, centres).radius) <= 2 * best + 1e-12


def test_every_centre_is_the_point_farthest_from_those_before_it():
    keys = points("clustered", 300).double()
    found = greedy_k_center(keys, 50)
    distances = torch.cdist(keys, keys[found.centres])
    for number in range(1, 50):
        before = distances[:, :number].amin(1)
        assert before[found.centres[number]] == before.max()
    assert torch.equal(found.nearest, distances.argmin(1))
    torch.testing.assert_close(found.radius, distances.amin(1).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("candidates", [1, 7, 16, 64])
def test_choosing_several_centres_a_pass_gives_the_same_ones(kind, candidates):
    prepared, valid = lanes(kind, count=1500)
    wanted = torch.tensor([200])
    one, several = reference.k_center(prepared, wanted, valid), lazy.k_center(prepared, wanted, valid, candidates)
    assert torch.equal(several.centres, one.centres)
    assert torch.equal(several.nearest, one.nearest)
    torch.testing.assert_close(several.distance, one.distance, rtol=1e-9, atol=1e-9)


def test_heads_with_other_numbers_of_points_and_centres_are_served_together():
    prepared, valid = lanes(*KINDS, count=600)
    valid[1, :250] = False
    valid[2, ::3] = False
    valid[3, 5:] = False
    wanted = torch.tensor([64, 100, 1, 5])
    together, plain = lazy.k_center(prepared, wanted, valid), reference.k_center(prepared, wanted, valid)
    assert torch.equal(together.centres, plain.centres)
    for lane, count in enumerate(wanted.tolist()):
        where = valid[lane].nonzero()[:, 0]
        alone = reference.k_center(
            prepared[lane : lane + 1, where], wanted[lane : lane + 1], torch.ones(1, len(where), dtype=torch.bool)
        )
        assert torch.equal(together.centres[lane, :count], where[alone.centres[0]])
        assert (together.centres[lane, count:] == -1).all()
        assert torch.equal(together.nearest[lane, where], alone.nearest[0])


@pytest.mark.parametrize("kind", KINDS[:3])
def test_the_kernel_agrees_with_the_one_head_algorithm(kind):
    keys = points(kind, 800)
    expected = greedy_k_center(keys.double(), 100)
    found = kcenter.k_center(keys[None, None], torch.tensor([100]))
    assert torch.equal(found.centres[0, 0], expected.centres)
    assert torch.equal(found.nearest[0, 0], expected.nearest)
    torch.testing.assert_close(float(found.distance.max()), float(expected.radius), rtol=1e-6, atol=0)


def test_many_heads_are_cut_into_parts_without_a_difference(monkeypatch):
    keys = torch.stack([points("gauss", 200, seed=i) for i in range(6)]).view(2, 3, 200, 32)
    counts = torch.tensor([30, 20])
    whole = kcenter.k_center(keys, counts)
    monkeypatch.setattr(kcenter, "AT_ONCE", 200 * 32 * 2)
    parts = kcenter.k_center(keys, counts)
    assert torch.equal(whole.centres, parts.centres)
    assert torch.equal(whole.nearest, parts.nearest)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_neither_huge_nor_tiny_keys_overflow(size):
    keys = points("gauss", 300).bfloat16()
    found = kcenter.k_center((keys.double() * size).float()[None, None], torch.tensor([40]))
    expected = kcenter.k_center(keys[None, None].float(), torch.tensor([40]))
    assert torch.equal(found.centres, expected.centres)
    assert found.distance.isfinite().all()


@pytest.mark.parametrize("outlier", [1e3, 1e6, 1e12])
def test_one_huge_key_does_not_blur_the_others(outlier):
    keys = points("gauss", 500).double()
    keys[123, 7] = outlier
    found = kcenter.k_center(keys[None, None], torch.tensor([60]))
    assert torch.equal(found.centres[0, 0], greedy_k_center(keys, 60).centres)


def test_equal_points_are_taken_in_their_order():
    keys = torch.ones(1, 1, 9, 4)
    found = kcenter.k_center(keys, torch.tensor([5]))
    assert found.centres[0, 0].tolist() == [0, 1, 2, 3, 4]
    assert found.nearest[0, 0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0, 0]


def test_more_centres_than_points_are_all_points():
    found = kcenter.k_center(points("gauss", 7)[None, None], torch.tensor([20]))
    assert sorted(found.centres[0, 0].tolist()) == list(range(7))


# -- the cache


AS_PUBLISHED = {"entries": "centre", "apart": 0}


def with_room(room, heads, **options):
    """One that has room for `room(count)` entries when `count` tokens have left the window."""

    class WithRoom(ClusterGen):
        def room(self, budget, count):
            return room(count)

    return Fed(WithRoom(**options), Budget(0.25, None, 136), heads=heads)


@pytest.mark.parametrize(("entries", "apart"), [("centre", 0), ("mean", 0), ("centre", 0.25), ("mean", 0.5)])
def test_the_cache_holds_what_the_algorithm_holds(entries, apart):
    """Three calls, two heads: sizes, and how far tokens are, follow through all of them."""
    keys = torch.stack([points("clustered", 900, seed=i) for i in range(2)])[None].double() + 1
    values = torch.stack([points("gauss", 900, seed=i + 5) for i in range(2)])[None].double()
    fed = with_room(lambda count: 100 + count // 10, heads=2, entries=entries, apart=apart)
    held = [Clusters(keys[0, 0, :0], values[0, 0, :0], *torch.zeros(2, 0).double())] * 2
    for start, stop in ((0, 400), (400, 640), (640, 900)):
        fed.write(keys[:, :, start:stop], values[:, :, start:stop])
        for head in range(2):
            part, count = (keys[0, head, start:stop], values[0, head, start:stop]), 100 + stop // 10
            held[head] = take_tokens(held[head], *part, count, apart=int(apart * count), means=entries == "mean")
    found = fed.holding.entries()
    for head in range(2):
        for name, own in (("keys", found.keys), ("values", found.values), *found.per_entry.items()):
            torch.testing.assert_close(own[head].double(), getattr(held[head], name), rtol=1e-5, atol=1e-5)
    assert found.per_entry["sizes"].sum() == 2 * 900


@pytest.mark.parametrize(("apart", "means"), [(0, False), (20, True)])
def test_no_token_is_farther_from_its_entry_than_the_entry_says(apart, means):
    """The token's own centre is dropped in turn, and its tokens go where it goes: nowhere else do masses agree."""
    keys = points("gauss", 1024, width=8)
    marks = torch.eye(1024)  # a value says which tokens went into it
    held = Clusters(keys[:0], marks[:0], torch.zeros(0), torch.zeros(0))
    members = torch.zeros(0, 1024)
    for start in range(0, 1024, 128):
        part = slice(start, start + 128)
        pool = torch.cat([members, marks[part]])
        numbered = Clusters(held.keys, members, held.sizes, held.reach)
        count = min(60, len(pool))
        members = (take_tokens(numbered, keys[part], marks[part], count, apart=apart, means=True).values > 0).float()
        held = take_tokens(held, keys[part], marks[part], count, apart=apart, means=means)
    assert torch.equal(members.sum(0), torch.ones(1024)), "every token went somewhere, once"
    assert torch.equal(members.sum(1), held.sizes)
    for i, own in enumerate(members.bool()):
        assert (keys[own] - held.keys[i]).norm(dim=1).max() <= held.reach[i] + 1e-4
        if means:
            torch.testing.assert_close(held.keys[i], keys[own].mean(0), rtol=1e-4, atol=1e-5)
    assert int((held.sizes == 1).sum()) >= apart


def test_a_token_that_points_away_from_all_others_stays_alone():
    """K-center takes long keys, whatever their direction; this one is short."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 800, 16, generator=generator) + 0.5
    keys[:, :, 321] = -0.1
    held = {}
    for apart in (0, 0.5):
        fed = with_room(lambda count: 60, 2, apart=apart)
        found = fed.write(keys, keys).holding.entries()
        alone = (found.keys == keys[0, :, 321:322]).all(2) & (found.per_entry["sizes"] == 1)
        held[apart] = alone.any(1).tolist()
    assert held == {0: [False, False], 0.5: [True, True]}


def test_weights_are_sizes_or_as_published_none():
    keys, values = torch.randn(2, 1, 3, 500, 8, generator=torch.Generator().manual_seed(0))
    counted, published = (
        with_room(lambda count: 50, 3, weights=weights).write(keys, values).entries() for weights in ("count", "none")
    )
    assert torch.equal(counted.keys, published.keys)
    torch.testing.assert_close(counted.log_mass.exp().sum(2), torch.full((1, 3), 500.0))
    assert published.log_mass is None


def test_half_of_the_budget_goes_to_the_latest_tokens():
    cache = LayerCache(ClusterGen(keep=2048, sinks=0), 0)
    keys = torch.randn(1, 1, 6000, 4, generator=torch.Generator().manual_seed(0))
    cache.hold(NewTokens(keys, keys))
    assert cache.window.length - 1024 in range(32)
    assert int(cache.past.count_entries()) == 1024 - 32  # the window may run over by a block
    assert torch.equal(cache.window.columns.keys[0, 0, -1024:], keys[0, 0, -1024:])


def test_a_trickle_of_tokens_is_not_clustered_at_every_block():
    """Room is made for an eighth of the centres: between, tokens are only added."""
    config = ClusterGen(keep=2048)
    cache = LayerCache(config, 0)
    keys = torch.randn(1, 1, 8000, 4, generator=torch.Generator().manual_seed(0))
    cache.hold(NewTokens(keys[:, :, :6000], keys[:, :, :6000]))
    entries = []
    for i in range(6000, 8000):
        cache.hold(NewTokens(keys[:, :, i : i + 1], keys[:, :, i : i + 1]))
        entries.append(int(cache.past.count_entries()))
    falls = sum(after < before for before, after in pairwise(entries))
    assert max(entries) <= 1024
    assert 10 < falls < 25  # 62 blocks of 32 tokens


@pytest.mark.parametrize("keep", [264, 0.01])
def test_many_sinks_and_the_least_budget_leave_room_for_the_latest_tokens(keep):
    config = ClusterGen(keep=keep, sinks=100)
    assert config.least_entries() == 264
    cache = LayerCache(config, 0)
    for seed in range(10):
        keys = torch.randn(1, 2, 64, 4, generator=torch.Generator().manual_seed(seed))
        cache.hold(NewTokens(keys, keys))
        assert int(cache.count_entries().max()) <= 264


def test_wrong_options_are_refused_by_name():
    with pytest.raises(ValueError, match="weights must be one of count, none, got 'sum'"):
        ClusterGen(weights="sum")
    with pytest.raises(ValueError, match="entries must be one of mean, centre, got 'median'"):
        ClusterGen(entries="median")
    with pytest.raises(ValueError, match="apart must be a positive number below 1, got 1"):
        ClusterGen(apart=1)
    with pytest.raises(ValueError, match="window must be a whole number of at least 1, got 0"):
        ClusterGen(window=0)
    with pytest.raises(ValueError, match="needs at least 100"):
        ClusterGen(keep=99)
