"""SubGen: the two lemmas, the theorem, and a cache that equals the one-head algorithm."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsketch
import zoo
from drawn import normal_doubles as normal
from kvsketch.algorithms.draws import uniforms
from kvsketch.algorithms.subgen import (
    log_normalizer,
    log_terms_of_numerator,
    make_room,
    nearest_cluster,
    no_clusters,
    no_samples,
    query_stream_attn,
    update_matrix_product,
    update_softmax_normalizer,
    update_within_capacity,
)
from kvsketch.attention import exact_attention
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.config import BLOCK
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens
from kvsketch.caches.forgetting.subgen import SubGen
from kvsketch.caches.forgetting.subgen.clusters import KEY, MERGE, Clusters
from kvsketch.caches.forgetting.subgen.slots import Draws
from kvsketch.caches.forgetting.subgen.value_samples import VALUE
from lanes import Fed, arriving, holding_of


def clustered(count, clusters, *, width=8, spread=0.05, seed=0, distance=2.0):
    """Keys in balls of radius `spread` around centres of norm `distance`; values at random."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(clusters, width, generator=generator, dtype=torch.float64)
    centres *= distance / centres.norm(dim=1, keepdim=True)
    away = torch.randn(count, width, generator=generator, dtype=torch.float64)
    away *= spread * torch.rand(count, 1, generator=generator, dtype=torch.float64) / away.norm(dim=1, keepdim=True)
    keys = centres[torch.randint(clusters, (count,), generator=generator)] + away
    return keys, torch.randn(count, width, generator=generator, dtype=torch.float64)


def draws(count, each, seed=0):
    return torch.rand(count, each, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(keys, values, *, delta, s, t, seed=0):
    """Algorithm 1 over a stream."""
    clusters, samples = no_clusters(t, keys[0]), no_samples(s, keys[0], values[0])
    for key, value, u, w in zip(keys, values, draws(len(keys), t, seed), draws(len(keys), s, seed + 1), strict=True):
        clusters = update_softmax_normalizer(clusters, delta, key, u)
        samples = update_matrix_product(samples, key, value, w)
    return clusters, samples


def exact(query, keys, values):
    return exact_attention(query[None, None, None], keys[None, None], values[None, None], 1.0).out[0, 0, 0]


# -- Lemma 2


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.floats(0.05, 4.0), st.integers(1, 3))
def test_clusters_partition_the_keys_and_keep_their_distances(seed, count, delta, t):
    """Lemma 2, properties 1 to 4, after every token."""
    keys = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    clusters, members = no_clusters(t, keys[0]), list[list[int]]()
    for i, (key, u) in enumerate(zip(keys, draws(count, t, seed), strict=True)):
        nearest, distance = nearest_cluster(clusters, key)
        if distance > delta:
            members.append([i])
        else:
            members[nearest].append(i)
        clusters = update_softmax_normalizer(clusters, delta, key, u)
        assert clusters.sizes.tolist() == [len(cluster) for cluster in members]  # 2: n = |C|
        for x, samples, cluster in zip(clusters.representatives, clusters.samples, members, strict=True):
            assert torch.equal(x, keys[cluster[0]])  # 1: x is in C
            assert (keys[cluster] - x).norm(dim=1).max() <= delta  # 3
            assert all(any(torch.equal(sample, keys[j]) for j in cluster) for sample in samples)
        apart = torch.cdist(clusters.representatives, clusters.representatives).fill_diagonal_(math.inf)
        assert apart.min() > delta  # 4


def frequencies(samples, keys):
    """How often each key was drawn."""
    return (samples[:, None] == keys).all(2).double().mean(0)


def test_samples_of_a_cluster_are_uniform_and_independent():
    """Lemma 2, property 5: seven keys, 20,000 samples; every frequency within four standard errors."""
    count, t = 7, 20_000
    keys = torch.arange(count, dtype=torch.float64)[:, None] / 100
    clusters, _ = run(keys, keys, delta=1.0, s=1, t=t)
    found = frequencies(clusters.samples[0], keys)
    error = math.sqrt(1 / count * (1 - 1 / count) / t)
    assert ((found - 1 / count).abs() < 4 * error).all()
    # Neighbouring samples agree as often as independent ones.
    pairs = (clusters.samples[0, ::2] == clusters.samples[0, 1::2]).double().mean()
    assert abs(float(pairs) - 1 / count) < 4 * math.sqrt(1 / count * (1 - 1 / count) / (t / 2))


@pytest.mark.parametrize("start", [0.0, 0.15])
def test_merged_samples_stay_uniform(start):
    """Two clusters of 2 and 5 keys become one: all seven keys are as frequent. 20,000 samples."""
    t = 20_000
    keys = torch.tensor([0.0, 0.1, 1.0, 1.1, 1.05, 0.95, 1.02], dtype=torch.float64)[:, None]
    clusters = no_clusters(t, keys[0])
    for key, u in zip(keys, draws(7, t), strict=True):
        clusters = update_softmax_normalizer(clusters, 0.15, key, u)
    assert clusters.sizes.tolist() == [2, 5]
    clusters, delta = make_room(clusters, start, draws(2, t, seed=5))
    assert clusters.sizes.tolist() == [7]
    assert delta == (1.0 if start == 0 else 1.2)
    found = frequencies(clusters.samples[0], keys)
    assert ((found - 1 / 7).abs() < 4 * math.sqrt(1 / 7 * 6 / 7 / t)).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.sampled_from([0.0, 0.3]))
def test_a_full_memory_keeps_the_lemma_with_twice_the_radius(seed, capacity, start):
    """With a bound on the clusters: sizes are right, representatives apart, no key farther than 2δ."""
    keys = torch.randn(80, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    clusters, delta = no_clusters(1, keys[0]), start
    members = dict[tuple[float, ...], list[int]]()  # of each representative
    for i, (key, u, merging) in enumerate(zip(keys, draws(80, 1), draws(80, capacity, seed=1), strict=True)):
        before = delta
        clusters, delta = update_within_capacity(clusters, delta, capacity, key, u, merging[:, None])
        assert len(clusters.sizes) <= capacity
        if delta > before:
            members = _regroup(members, clusters, i, keys)
        x = clusters.representatives[nearest_cluster(clusters, key)[0]]
        members.setdefault(tuple(x.tolist()), []).append(i)
        for x, size in zip(clusters.representatives, clusters.sizes, strict=True):
            theirs = members[tuple(x.tolist())]
            assert len(theirs) == size
            assert (keys[theirs] - x).norm(dim=1).max() <= 2 * delta + 1e-12
        if len(clusters.sizes) > 1:
            apart = torch.cdist(clusters.representatives, clusters.representatives).fill_diagonal_(math.inf)
            assert apart.min() > delta
    assert delta > start


def _regroup(members, clusters, count, keys):
    """Every old cluster goes to the nearest representative that is left."""
    stayed = clusters.representatives
    if torch.equal(stayed[-1], keys[count]):  # founded by the new key, after the merge
        stayed = stayed[:-1]
    merged = dict[tuple[float, ...], list[int]]()
    for x, theirs in members.items():
        nearest = stayed[(stayed - torch.tensor(x, dtype=torch.float64)).norm(dim=1).argmin()]
        merged.setdefault(tuple(nearest.tolist()), []).extend(theirs)
    return merged


# -- Lemma 1


def test_each_token_is_kept_in_proportion_to_its_squared_norm():
    """Lemma 1: seven tokens, one of them with a value of zero; 20,000 samples."""
    s = 20_000
    keys = torch.arange(7, dtype=torch.float64)[:, None]
    values = torch.tensor([[1.0], [0.5], [2.0], [0.0], [1.5], [-3.0], [0.1]], dtype=torch.float64)
    _, samples = run(keys, values, delta=0.5, s=s, t=1)
    assert float(samples.mass) == pytest.approx(float(values.square().sum()))
    expected = values.square().sum(1) / values.square().sum()
    found = frequencies(samples.keys, keys)
    error = (expected * (1 - expected) / s).sqrt()
    assert ((found - expected).abs() <= 4 * error).all()
    assert found[3] == 0
    assert torch.equal(samples.values, values[samples.keys[:, 0].long()])


def test_values_of_zero_are_never_sampled_and_divide_nothing():
    keys, _ = clustered(20, 3)
    clusters, samples = run(keys, torch.zeros(20, 4, dtype=torch.float64), delta=0.2, s=5, t=2)
    assert (query_stream_attn(clusters, samples, keys[0]) == 0).all()
    samples = update_matrix_product(samples, keys[1], torch.ones(4), draws(1, 5)[0])
    assert (samples.values == 1).all(), "the first value that is not zero fills all samples"


# -- the estimate


def test_numerator_and_denominator_are_unbiased():
    """One stream of 40 tokens; 20,000 samples of each kind, each an estimate by itself."""
    keys, values = clustered(40, 4, spread=0.5)
    query = torch.randn(8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    count = 20_000
    clusters, samples = run(keys, values, delta=0.6, s=count, t=count)
    weights = (keys @ query).exp()

    logs, directions = log_terms_of_numerator(samples, query, 1.0)
    terms = count * logs.exp()[:, None] * directions
    error = terms.std(0) / math.sqrt(count)
    assert ((terms.mean(0) - weights @ values).abs() < 4 * error).all()

    of_slots = (clusters.sizes[:, None] * (clusters.samples @ query).exp()).sum(0)  # τ if t were 1, slot by slot
    error = of_slots.std() / math.sqrt(count)
    assert error > 0
    assert abs(float(of_slots.mean() - weights.sum())) < 4 * float(error)
    torch.testing.assert_close(log_normalizer(clusters, query, 1.0).exp(), of_slots.mean())


def test_one_token_is_answered_exactly():
    keys, values = clustered(1, 1)
    clusters, samples = run(keys, values, delta=1.0, s=3, t=2)
    torch.testing.assert_close(query_stream_attn(clusters, samples, torch.ones(8, dtype=torch.float64)), values[0])


def test_identical_keys_are_one_cluster_and_the_answer_is_the_mean_of_values():
    keys = torch.ones(50, 8, dtype=torch.float64)
    values = torch.ones(50, 3, dtype=torch.float64) * torch.tensor([1.0, 2.0, 3.0])
    clusters, samples = run(keys, values, delta=0.1, s=4, t=2)
    assert clusters.sizes.tolist() == [50]
    torch.testing.assert_close(query_stream_attn(clusters, samples, keys[0]), values[0])


def theorem_errors(*, epsilon, runs, s, t, keys, values, delta, r):
    """‖z/τ - Attn‖ over ‖softmax‖₂‖V‖_op, for queries of norm r."""
    errors = []
    for seed in range(runs):
        query = torch.randn(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        query *= r / query.norm()
        clusters, samples = run(keys, values, delta=delta, s=s, t=t, seed=2 * seed)
        softmax = torch.softmax(keys @ query, 0)
        scale = softmax.norm() * torch.linalg.matrix_norm(values, ord=2)
        errors.append(float((query_stream_attn(clusters, samples, query) - exact(query, keys, values)).norm() / scale))
    return torch.tensor(errors)


@pytest.mark.slow
def test_the_error_bound_holds_as_often_as_the_theorem_says():
    """Theorem 1 with s = 9 d/ε² and t = e^{2δr} log n /ε²: 1 % of 200 streams may miss (+ 4 standard errors)."""
    epsilon, delta, r, runs = 0.5, 0.2, 2.0, 200
    keys, values = clustered(300, 10, spread=delta / 2)
    s = math.ceil(9 * 8 / epsilon**2)
    t = math.ceil(math.exp(2 * delta * r) * math.log(300) / epsilon**2)
    errors = theorem_errors(epsilon=epsilon, runs=runs, s=s, t=t, keys=keys, values=values, delta=delta, r=r)
    missed = float((errors > epsilon).double().mean())
    assert missed <= 0.01 + 4 * math.sqrt(0.01 * 0.99 / runs)
    assert errors.median() > 0.02, "the bound is not met because nothing is approximated"


@pytest.mark.slow
def test_the_error_falls_with_the_root_of_the_samples():
    """s from 16 to 256, t large: the mean squared error falls sixteenfold, within four standard errors. 150 streams."""
    keys, values = clustered(200, 5)
    setting = {"epsilon": 1.0, "runs": 150, "t": 64, "keys": keys, "values": values, "delta": 0.2, "r": 1.0}
    few, many = (theorem_errors(s=s, **setting).square() for s in (16, 256))
    ratio = float(few.mean() / many.mean())
    relative = math.hypot(*(float(x.std() / x.mean()) / math.sqrt(len(x)) for x in (few, many)))
    assert abs(ratio - 16) < 4 * 16 * relative
    assert relative < 0.2


# -- the cache


def clustering(config, budget, *, layer=0, heads=1):
    """Clusters and samples from the first token on: none are held exactly."""
    fed = Fed(config, budget, layer=layer, heads=heads)
    fed.holding.room = lambda count: 0
    return fed


def sizes_of(holding):
    """Value samples and clusters that there is room for."""
    return holding.sizes(holding.samples.keys.shape[2], holding.samples.values.shape[2])


def one_head(config, keys, values, *, head, layer, capacities, samples_plan):
    """The algorithm with the numbers that the cache draws; value samples per stratum."""
    clusters, delta = no_clusters(config.t, keys[0]), config.delta or 0.0
    strata = dict[int, object]()
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        address = (config.seed, layer, head, i)
        merging = uniforms(*address, MERGE, torch.arange(capacities[i] * config.t)).view(capacities[i], config.t)
        drawn = uniforms(*address, KEY, torch.arange(config.t))
        clusters, delta = update_within_capacity(
            clusters, delta, capacities[i], key, drawn, merging, float(config.growth)
        )
        stratum, _ = samples_plan.stratum_of(i)
        held = strata.get(stratum) or no_samples(samples_plan.slots, key, value)
        drawn = uniforms(*address, VALUE, torch.arange(samples_plan.slots))
        strata[stratum] = update_matrix_product(held, key, value, drawn)
    return clusters, delta, list(strata.values())


def test_beside_a_given_number_of_samples_all_room_of_a_fraction_is_for_clusters():
    """Every stratum of 32 entries, of 256 bytes each: clusters of 128 + 8 and one sample of 128 + 4 bytes."""
    sizes = SubGen(keep=0.25, s=40).sizes(Budget(0.25, None, 140), 64, 64)
    assert sizes.samples.slots == 40
    assert sizes.clusters.slots == 32 * 256 // (128 + 8 + 128 + 4)
    with pytest.raises(ValueError, match="t must be"):
        SubGen(t=(1 << 16) + 1)


KEEPS = [Budget(None, 200, 164), Budget(0.25, None, 164)]


@pytest.mark.parametrize("budget", KEEPS, ids=["fixed", "fraction"])
@pytest.mark.parametrize(
    ("given", "kind"),
    [({}, "clusters"), ({}, "noise"), ({"delta": 0.5, "t": 3}, "lattice"), ({"s": 20, "t": 2}, "lattice")],
    ids=str,
)
def test_the_cache_holds_what_the_algorithm_holds(budget, given, kind):
    """Two heads, calls of 96, 32 and 384 tokens; clusters, noise that merges again and again, and a lattice of ties."""
    count, layer = 512, 3
    config = SubGen(keep=0.25, **given)
    streams = [clustered(count, 12, seed=i) for i in range(2)]
    if kind != "clusters":
        streams = [(normal(count, 8, seed=i) * 1.5, values) for i, (_, values) in enumerate(streams)]
    if kind == "lattice":  # many equal distances, and many equal keys
        streams = [(keys.round(), values) for keys, values in streams]
    keys, values = (torch.stack(parts)[None] for parts in zip(*streams, strict=True))
    fed = clustering(config, budget, layer=layer, heads=2)
    for start, stop in ((0, 96), (96, 128), (128, 512)):
        fed.write(keys[:, :, start:stop], values[:, :, start:stop])
    plan, room = sizes_of(fed.holding).samples, sizes_of(fed.holding).clusters
    slots = plan.slots
    ends = [next(stop for stop in (96, 128, 512) if i < stop) for i in range(count)]  # of the calls
    capacities = [(room.stratum_of(end - 1)[0] + 1) * room.slots for end in ends]
    for head in range(2):
        clusters, delta, strata = one_head(
            config, keys[0, head], values[0, head], head=head, layer=layer, capacities=capacities, samples_plan=plan
        )
        held = {name: tensor[head] for name, tensor in fed.holding.tensors().items()}
        number = int(held["clusters.number"])
        assert torch.equal(held["clusters.representatives"][:number], clusters.representatives)
        assert torch.equal(held["clusters.samples"][:number], clusters.samples)
        assert torch.equal(held["clusters.sizes"][:number].long(), clusters.sizes)
        assert float(held["clusters.delta"]) == pytest.approx(delta, rel=1e-6)
        assert kind == "clusters" or held["clusters.growths"] > 0
        for stratum, samples in enumerate(strata):
            part = slice(stratum * slots, (stratum + 1) * slots)
            assert torch.equal(held["samples.keys"][part], samples.keys)
            assert torch.equal(held["samples.values"][part], samples.values)
            torch.testing.assert_close(held["samples.mass"][stratum], samples.mass)


@pytest.mark.parametrize("growth", [2, 1.25])
def test_no_key_is_farther_from_its_representative_than_the_cluster_reaches(growth):
    """Memberships are followed through all merges."""
    config = SubGen(keep=200, growth=growth)
    keys = torch.randn(320, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    held = clustering(config, Budget(None, 200, 164)).write(keys[None, None], keys[None, None]).holding
    capacity = sizes_of(held).clusters.slots
    clusters, delta = no_clusters(1, keys[0]), 0.0
    members = dict[tuple[float, ...], list[int]]()
    for i, key in enumerate(keys):
        before = delta
        zeros = torch.zeros(capacity, 1)
        clusters, delta = update_within_capacity(clusters, delta, capacity, key, zeros[0], zeros, float(growth))
        if delta > before:
            members = _regroup(members, clusters, i, keys)
        x = clusters.representatives[nearest_cluster(clusters, key)[0]]
        members.setdefault(tuple(x.tolist()), []).append(i)
    assert held.clusters.growths > 1
    reach = held.clusters.reach[0]
    for x, bound in zip(clusters.representatives, reach, strict=False):
        farthest = (keys[members[tuple(x.tolist())]] - x).norm(dim=1).max()
        assert farthest <= bound + 1e-6 <= delta * growth / (growth - 1) + 1e-5


@pytest.mark.parametrize("normalizer", ["clusters", "larger"])
def test_the_cache_answers_what_the_algorithm_answers(normalizer):
    """With one stratum: z/τ of the paper, or z over the larger of τ and the sum of z's own weights."""
    config = SubGen(keep=300, normalizer=normalizer, t=2)
    keys, values = clustered(600, 12)
    fed = clustering(config, Budget(None, 300, 164)).write(keys[None, None], values[None, None])
    room = sizes_of(fed.holding).clusters.slots
    clusters, _, (samples,) = one_head(
        config, keys, values, head=0, layer=0, capacities=[room] * 600, samples_plan=sizes_of(fed.holding).samples
    )
    for seed in range(5):
        query = torch.randn(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        log_terms, directions = log_terms_of_numerator(samples, query, 0.5)
        log_tau = log_normalizer(clusters, query, 0.5)
        if normalizer == "larger":
            log_tau = torch.maximum(log_tau, log_terms.logsumexp(0))
        got = fed.attend(query[None, None, None], 0.5)
        torch.testing.assert_close(got.out[0, 0, 0], torch.exp(log_terms - log_tau) @ directions, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got.lse[0, 0, 0], log_tau, rtol=1e-5, atol=1e-6)


def test_no_answer_is_longer_than_the_longest_value():
    """Keys that do not cluster at all: the paper's ratio explodes, the larger normaliser does not."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 1, 2000, 16, generator=generator)
    query = 4 * torch.randn(1, 1, 50, 16, generator=generator)
    longest = {}
    for normalizer in ("clusters", "larger"):
        fed = clustering(SubGen(keep=300, normalizer=normalizer), Budget(None, 300, 164)).write(keys, values)
        longest[normalizer] = float(fed.attend(query, 1.0).out.norm(dim=-1).max() / values.norm(dim=-1).max())
    assert longest["larger"] <= 1 + 1e-5
    assert longest["clusters"] > 2


def test_huge_keys_in_bfloat16_are_held_as_they_are():
    keys = torch.randn(1, 1, 400, 8, generator=torch.Generator().manual_seed(0)).bfloat16() * 1e30
    fed = clustering(SubGen(keep=200), Budget(None, 200, 164)).write(keys, torch.ones(1, 1, 400, 8).bfloat16())
    assert all(tensor.isfinite().all() for tensor in fed.holding.tensors().values())
    assert fed.holding.clusters.sizes.sum() == 400


def test_identical_keys_never_fill_the_memory():
    keys = torch.full((1, 1, 3200, 8), 0.1)
    values = torch.randn(1, 1, 3200, 8, generator=torch.Generator().manual_seed(0))
    held = clustering(SubGen(keep=200), Budget(None, 200, 164)).write(keys, values).holding
    assert int(held.clusters.number) == 1
    assert int(held.clusters.growths) == 0


def test_memory_and_clusters_do_not_grow_with_the_stream():
    cache = LayerCache(SubGen(keep=400), 0)
    sizes = []
    for seed in range(6):
        keys = torch.randn(1, 2, 1024, 8, generator=torch.Generator().manual_seed(seed))
        cache.hold(NewTokens(keys, keys))
        sizes.append(cache.nbytes)
    assert sizes[1] == sizes[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": 0}, "delta must be a number above 1e-30 and below 1e.30, got 0"),
        ({"delta": -1.5}, "delta must be a number above 1e-30 and below 1e.30, got -1.5"),
        ({"delta": math.inf}, "delta must be a number above 1e-30 and below 1e.30, got inf"),
        ({"delta": math.nan}, "delta must be a number above 1e-30 and below 1e.30, got nan"),
        ({"delta": 10**400}, "delta must be a number above 1e-30 and below 1e.30, got 1000"),
        ({"seed": 2**63}, "seed must be a whole number from 0 to"),
        ({"s": 0}, "s must be a whole number of at least 1, got 0"),
        ({"t": 0}, "t must be a whole number of at least 1, got 0"),
        ({"delta": 1e-320}, "delta must be a number above 1e-30"),
        ({"growth": 1}, "growth must be a number above 1.0001 and below 1e.06, got 1"),
        ({"normalizer": "none"}, "normalizer must be one of larger, clusters, got 'none'"),
        ({"keep": 400, "s": 300}, "needs at least 432"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        SubGen(**options)


def test_a_short_row_and_a_long_row_of_a_batch_are_held_in_their_own_ways():
    """One overflows and is sampled, the other is still exact."""
    count, lengths = 400, [400, 150]
    keys, values = torch.randn(2, 2, 1, count, 8, generator=torch.Generator().manual_seed(0))
    valid = torch.ones(2, count, dtype=torch.bool)
    valid[1, : count - lengths[1]] = False
    cache = LayerCache(SubGen(keep=200), 0)
    cache.hold(NewTokens(keys, values, valid))
    query = torch.randn(2, 1, 3, 8, generator=torch.Generator().manual_seed(1))
    got = cache.attend(query, 1.0).out
    full = exact_attention(query, keys, values, 1.0, visible=valid[:, None, None]).out
    torch.testing.assert_close(got[1], full[1])
    assert (got[0] - full[0]).norm() > 0.01 * full[0].norm()
    held_exactly = {tuple(bundle.rows): bundle.holding.clusters is None for bundle in cache.past.bundles}
    assert held_exactly == {(0,): False, (1,): True}


@pytest.mark.parametrize("kind", ["clusters", "noise"])
def test_it_says_when_keys_do_not_cluster(kind):
    """Twelve tight clusters are within the theorem's condition; noise is not, and a user is told."""
    keys, values = clustered(1000, 12)
    if kind == "noise":
        keys = 3 * torch.randn_like(keys)
    cache = LayerCache(SubGen(keep=300), 0)
    cache.hold(NewTokens(keys[None, None], values[None, None]))
    cache.read(keys[None, None, :8], NewTokens(keys[None, None, :8], values[None, None, :8]), 1.0)
    details, warning = cache.past.details(), cache.past.warning()
    if kind == "clusters":
        assert details["log spread"] < 1
        assert warning is None
    else:
        assert details["log spread"] > 10
        assert "do not cluster" in warning


@pytest.mark.parametrize("keep", [0.25, 800])
@pytest.mark.parametrize("t", [1, 3, 15])
def test_many_samples_for_a_cluster_stay_within_the_budget(keep, t):
    keys, values = torch.randn(2, 1, 2, 4000, 16, generator=torch.Generator().manual_seed(0))
    cache = LayerCache(SubGen(keep=keep, t=t), 0)
    for start in range(0, 4000, 800):
        cache.hold(NewTokens(keys[:, :, start : start + 800], values[:, :, start : start + 800]))
    budget = keep if isinstance(keep, int) else keep * 4000
    entry = 2 * 2 * 16 * 4 + 12
    assert 0.8 * budget * entry <= cache.nbytes <= (1.05 * budget + 128) * entry
    assert sizes_of(holding_of(cache.past)).clusters.slots >= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_may_be_wider_or_narrower_than_keys(dtype):
    """Clusters hold keys alone: with narrow keys the same bytes hold more of them."""
    clusters = {}
    for width, wide in ((8, 24), (24, 8)):
        keys = torch.randn(1, 1, 800, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        values = torch.randn(1, 1, 800, wide, generator=torch.Generator().manual_seed(1)).to(dtype)
        cache = LayerCache(SubGen(keep=300), 0)
        cache.hold(NewTokens(keys, values))
        answer = cache.attend(keys[:, :, :5], 1.0)
        assert answer.out.shape == (1, 1, 5, wide)
        assert answer.out.isfinite().all()
        clusters[width] = sizes_of(holding_of(cache.past)).clusters.slots
    assert clusters[8] > 2 * clusters[24]


def test_samples_stay_uniform_through_many_merges():
    """2,000 heads with the same keys hold the same clusters, and each a sample of its own of every one of them."""
    heads, count, slots = 2000, 64, 6
    keys = normal(count, 2).float()[None, None].expand(1, heads, -1, -1)
    clusters = Clusters.none(keys[0], 1, 0.0)
    clusters.make_slots(slots)
    new = arriving(keys, keys)
    for start in range(0, count, BLOCK):
        clusters.take(new.part(start, start + BLOCK), slots, 1.25, Draws(0, 0, new.heads))
    assert clusters.growths[0] >= 5
    assert (clusters.representatives == clusters.representatives[:1]).all()
    owners = set[int]()
    for cluster in range(int(clusters.number[0])):
        drawn = (clusters.samples[:, cluster, 0, None] == keys[0, 0]).all(2).double().mean(0)
        size = int(clusters.sizes[0, cluster])
        members = drawn.nonzero()[:, 0].tolist()
        assert len(members) == size
        error = math.sqrt(1 / size * (1 - 1 / size) / heads)
        assert ((drawn[members] - 1 / size).abs() <= 4.5 * error).all()
        owners |= set(members)
    assert owners == set(range(count))


@pytest.mark.parametrize("normalizer", ["clusters", "larger"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_huge_logits_give_finite_answers_with_either_normalizer(normalizer, dtype):
    keys, values = torch.randn(2, 1, 2, 600, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    cache = LayerCache(SubGen(keep=0.25, normalizer=normalizer), 0)
    cache.hold(NewTokens(keys * 30, values))
    assert cache.attend(keys[:, :, :40] * 30, 1.0).out.to(dtype).isfinite().all()


def test_what_was_said_of_the_keys_is_kept_with_the_cache():
    keys = 3 * torch.randn(1, 1, 600, 8, generator=torch.Generator().manual_seed(0))
    cache = LayerCache(SubGen(keep=200), 0)
    cache.hold(NewTokens(keys, keys))
    assert "log spread" not in cache.past.details()
    assert cache.past.warning() is None, "nothing was asked yet"
    cache.read(keys[:, :, :5], NewTokens(keys[:, :, :5], keys[:, :, :5]), 1.0)
    assert "log spread" in cache.past.details()
    loaded = LayerCache(SubGen(keep=200), 0)
    loaded.restore(*cache.state())
    assert loaded.past.details() == cache.past.details()
    assert "do not cluster" in loaded.past.warning()


def test_no_queries_are_no_answers():
    keys = torch.randn(1, 1, 600, 8, generator=torch.Generator().manual_seed(0))
    cache = LayerCache(SubGen(keep=200), 0)
    cache.hold(NewTokens(keys, keys))
    assert cache.attend(keys[:, :, :0], 1.0).out.shape == (1, 1, 0, 8)


def test_the_memory_of_clusters_is_used():
    """Noise in 64 dimensions: all pairs are about equally far, and a large factor of growth would merge almost all."""
    keys = torch.randn(1, 4, 2048, 64, generator=torch.Generator().manual_seed(0))
    held = clustering(SubGen(keep=1024), Budget(None, 1024, 164), heads=4).write(keys, keys).holding
    assert held.clusters.number.min() > sizes_of(held).clusters.slots / 2
    share = clustering(SubGen(keep=0.5), Budget(0.5, None, 164), heads=4).write(keys, keys).holding
    assert share.clusters.number.min() > share.clusters.sizes.shape[1] / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_sizes_and_weights_are_within_the_budget_too(dtype):
    """A large budget, so that the fixed slack hides nothing: they are 8 bytes of 64 or more for narrow heads."""
    keys = torch.randn(1, 1, 6_000, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    cache = LayerCache(SubGen(keep=4096, delta=0.001), 0)
    cache.hold(NewTokens(keys, keys))
    entry = 2 * 16 * keys.element_size() + 12
    assert 0.75 * 4096 * entry <= cache.nbytes <= (1.05 * 4096 + 128) * entry


def test_values_of_zero_are_answered_with_zero_by_the_cache_too():
    keys = torch.randn(1, 1, 600, 8, generator=torch.Generator().manual_seed(0))
    cache = LayerCache(SubGen(keep=200), 0)
    cache.hold(NewTokens(keys, torch.zeros(1, 1, 600, 8)))
    assert (holding_of(cache.past).samples.norms == 0).all()
    answer = cache.attend(keys[:, :, :5], 1.0)
    assert (answer.out == 0).all()
    assert answer.lse.isfinite().all()


def test_a_report_says_which_layers_keys_do_not_cluster():
    """Random keys, sharpened: they lie far from one another."""
    model = zoo.build("llama", layers=2)
    cache = kvsketch.prefill(model, zoo.tokens(1, 700), kvsketch.make_cache(model, "subgen(keep=200)"))
    model(zoo.tokens(1, 1), past_key_values=cache)
    warned = [layer.layer for layer in cache.report().layers if layer.warning]
    assert warned, "choose sharper keys"
    assert f"warning (layers {', '.join(map(str, warned))}): keys do not cluster" in str(cache.report())
