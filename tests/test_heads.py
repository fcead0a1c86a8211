"""Heads with unequal budgets: each lane is what it would be if all had its own, in calls, batches, beams and files."""

import copy
import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import calls
import kvsketch
import zoo
from drawn import normal
from kvsketch.attention import WeightedTokens, weighted_attention
from kvsketch.caches.core.allocation import budgets_of
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.chooser import Chooser, Kept
from kvsketch.caches.core.config import WindowedConfig
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.shares import filled, levels
from kvsketch.caches.core.tokens import NewTokens
from states import difference, state_of
from uneven import made_profile, uneven

WIDTH, GROUP, SCALE = 8, 2, 0.4
SPECS = [
    "uniform(keep=0.25, window=16)",
    "uniform(keep=160, window=16)",
    "streaming_llm(keep=0.25)",
    "streaming_llm(keep=160)",
    "clustergen(keep=0.25)",
    "clustergen(keep=160, window=16)",
    "balancekv(keep=0.3, window=16, augmented=False)",
    "balancekv(keep=200, window=16)",
    "balancekv(keep=200, window=16, mode='faithful')",
    "subgen(keep=0.3, window=16)",
    "subgen(keep=200, window=16, t=2)",
]
fed = partial(calls.fed, scale=SCALE)


def stream(count, rows=1, heads=4, seed=0):
    """Queries, keys and values."""
    shapes = ((rows, heads * GROUP), (rows, heads), (rows, heads))
    return tuple(normal(*shape, count, WIDTH, seed=3 * seed + i) for i, shape in enumerate(shapes))


@pytest.mark.once
@pytest.mark.parametrize("spec", SPECS)
def test_each_head_answers_as_if_all_heads_had_its_budget(spec):
    query, keys, values = stream(720)
    sizes = [600, *[1] * 35, 50, *[1] * 35]
    cache = uneven(spec)
    got = fed(cache, query, keys, values, sizes)
    assert len(set(cache.budgets)) == 4, "every head has another budget"
    entries = cache.count_entries()[0].tolist()
    assert len(set(entries)) > 1
    for head, budget in enumerate(cache.budgets):
        alike = LayerCache(kvsketch.parse_spec(spec), 1)
        alike.begin(1, [budget] * 4)
        expected = fed(alike, query, keys, values, sizes)
        group = slice(head * GROUP, (head + 1) * GROUP)
        torch.testing.assert_close(got[:, group], expected[:, group], rtol=1e-4, atol=1e-5)
        assert entries[head] == int(alike.count_entries()[0, head])


@pytest.mark.once
@pytest.mark.parametrize("spec", SPECS)
def test_a_padded_row_of_unequal_heads_equals_the_row_alone(spec):
    query, keys, values = stream(700, rows=3)
    valid = torch.ones(3, 700, dtype=torch.bool)
    for row, padding in enumerate((0, 130, 320)):
        valid[row, :padding] = False
    sizes = [600, *[1] * 40, 60]
    cache = uneven(spec)
    got = fed(cache, query, keys, values, sizes, valid)
    for row, padding in enumerate((0, 130, 320)):
        alone = uneven(spec)
        own = [x[row : row + 1, :, padding:] for x in (query, keys, values)]
        expected = fed(alone, *own, [600 - padding, *sizes[1:]])
        torch.testing.assert_close(got[row : row + 1, :, padding:], expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(cache.count_entries()[row], alone.count_entries()[0])
    assert sum(len(s.past.bundles) for s in cache.streams.all if s.past is not None) in (0, 12), (
        "of each head and length"
    )


@pytest.mark.once
@pytest.mark.parametrize("spec", SPECS)
def test_rows_move_and_state_comes_back(spec):
    query, keys, values = stream(500, rows=2)
    cache = uneven(spec)
    fed(cache, query, keys, values, [400, 60, *[1] * 40])
    rows = [1, 0, 1]
    expected = cache.attend(query[:, :, -1:], SCALE).out[rows]
    cache.map_rows(rows)
    torch.testing.assert_close(cache.attend(query[rows, :, -1:], SCALE).out, expected)
    tensors, numbers = cache.state()
    twin = uneven(spec)
    twin.restore({name: tensor.clone() for name, tensor in tensors.items()}, copy.deepcopy(numbers))
    assert torch.equal(twin.count_entries(), cache.count_entries())
    more = [x[rows] for x in stream(300, rows=2, seed=5)]
    answers = [fed(one, *more, [*[1] * 40, 260]) for one in (cache, twin)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("spec", ["uniform(keep=0.2)", "balancekv(keep=800)", "clustergen(keep=0.2)"])
def test_lanes_lie_in_few_bundles_of_the_bytes_that_were_given(spec):
    """Eight heads, each with another share: four bundles at most, and hardly a byte beside what is held."""
    heads, count = 8, 4000
    _, keys, values = stream(count, heads=heads)
    cache, equal = uneven(spec, 0), LayerCache(kvsketch.parse_spec(spec), 0)
    for one in (cache, equal):
        one.hold(NewTokens(keys, values))
    bundles = [bundle for held in cache.streams.all for bundle in held.past.bundles]
    assert len(bundles) == 4
    used = int(cache.count_entries().sum())
    assert used <= 1.02 * int(equal.count_entries().sum())
    entry = 2 * WIDTH * keys.element_size()
    assert cache.nbytes <= 1.05 * used * (entry + 12) + 8 * cache.window.length * len(cache.streams.all)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.01, 0.03, 0.2, 0.6, 1.0]), min_size=2, max_size=6), min_size=1, max_size=8
    ),
    st.sampled_from([0.05, 0.25, 0.8]),
    st.integers(0, 9000),
)
def test_the_sum_over_all_heads_is_that_of_equal_shares(parts, keep, count):
    """Whatever was measured, and however many tokens have come; no head is promised more than there are."""
    wanted = dict(enumerate(parts))
    if not any(map(any, parts)):
        return
    part = 0.25 if count % 2 else 0.0  # of all, in every head
    for budget, most in ((Budget(keep, None, 68, latest=part), 1 / keep), (Budget(None, 1000, 100, latest=part), 1e6)):
        if most < 1e6 and sum(share > 0 for heads in parts for share in heads) * most < sum(map(len, parts)):
            continue  # the few heads that have a part at all cannot hold so much
        found = [one for shares in filled(wanted, most).values() for one in budgets_of(budget, shares)]
        held = [one.entries(count) for one in found]
        mean = 1000 if budget.fraction is None else max(keep * count, budget.least)
        assert (mean - 1.001) * len(held) <= sum(held) <= mean * len(held) + 1e-6
        assert min(held) >= budget.least + int(part * (mean - budget.least))
        assert budget.fraction is None or max(held) <= max(count, budget.least)


def test_levels_are_means_of_neighbours():
    assert levels([1.0, 2.0, 3.0, 4.0], 4) == [1, 2, 3, 4]
    assert levels([10.0, 1.0, 1.5, 9.0, 5.0], 3) == [9.5, 1.25, 1.25, 9.5, 5]


def test_a_cache_by_profile_is_saved_and_loaded_without_the_profile(tmp_path):
    model = zoo.build("llama", layers=2)
    profile = made_profile(tmp_path / "profile.json", model)
    spec = f"clustergen(keep=0.3, window=16, heads={profile!r})"
    cache = kvsketch.prefill(model, zoo.tokens(2, 300), kvsketch.make_cache(model, spec))
    entries = [layer.entries for layer in cache.report().layers]
    assert entries[0][0] < entries[0][1] < entries[1][1]
    cache.save(tmp_path / "cache.safetensors")
    (tmp_path / "profile.json").unlink()
    loaded = kvsketch.load_cache(model, tmp_path / "cache.safetensors")
    assert difference(state_of(loaded), state_of(cache)) is None
    assert [layer.entries for layer in loaded.report().layers] == entries
    steps = [kvsketch.prefill(model, zoo.tokens(2, 9, seed=3), one) for one in (cache, loaded)]
    assert difference(state_of(steps[0]), state_of(steps[1])) is None
    with pytest.raises(ValueError, match="there is no profile"):
        kvsketch.make_cache(model, spec)


@pytest.mark.parametrize("spec", ["uniform(keep=0.4, window=16, heads='PROFILE')", "kvzip(keep=0.4)"])
def test_beams_over_unequal_heads_follow_their_rows(spec, tmp_path):
    """In a padded batch every prompt gives what it gives alone."""
    model = zoo.build("llama", layers=2)
    profile = made_profile(tmp_path / "profile.json", model)
    kvsketch.attach(model)
    ids, mask = zoo.tokens(2, 220), torch.ones(2, 220, dtype=torch.long)
    mask[0, :60] = 0

    def beams(ids, mask=None):
        cache = kvsketch.make_cache(model, spec.replace("PROFILE", profile))
        return model.generate(
            ids, attention_mask=mask, past_key_values=cache, num_beams=3, max_new_tokens=20, do_sample=False
        )

    together = beams(ids, mask)
    for row, skip in enumerate((60, 0)):
        assert torch.equal(together[row, 220:], beams(ids[row : row + 1, skip:])[0, 220 - skip :])


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "olmo2", "lfm2", "falcon_h1", "qwen3_next"])
def test_in_every_kind_of_model_a_padded_row_by_profile_is_the_row_alone(family, tmp_path):
    """Layers that slide or sum up have no share, and heads of the others have theirs."""
    model = zoo.build(family)
    spec = f"keydiff(keep=0.3, heads={made_profile(tmp_path / 'profile.json', model)!r})"
    ids, mask = zoo.tokens(2, 220), torch.ones(2, 220, dtype=torch.long)
    mask[0, :60] = 0

    def read(ids, mask):
        cache, steps = kvsketch.prefill(model, ids, kvsketch.make_cache(model, spec), attention_mask=mask), []
        for token in zoo.tokens(1, 12, seed=3).expand(len(ids), -1).split(1, 1):
            inputs = cache.new_tokens(token)
            inputs["position_ids"] = inputs["attention_mask"].cumsum(1)[:, -1:] - 1
            with torch.no_grad():
                steps.append(model(**inputs, past_key_values=cache).logits)
        return [layer.held.count_entries() for layer in cache.sketch_layers], torch.cat(steps, 1)

    entries, logits = read(ids, mask)
    assert max(len(set(layer[1].tolist())) for layer in entries) > 1, "heads hold different numbers"
    for row, skip in enumerate((60, 0)):
        own, expected = read(ids[row : row + 1, skip:], None)
        assert [layer[row].tolist() for layer in entries] == [layer[0].tolist() for layer in own]
        torch.testing.assert_close(logits[row], expected[0], rtol=1e-4, atol=1e-4)


# -- a method that asks what entries got of the attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heaviest(WindowedConfig):
    """Keeps the entries that got most of the attention so far (for tests; H2O, arXiv:2306.14048)."""

    name = "heaviest"

    def new_method(self, layer):
        return HeaviestEntries(self)


class HeaviestEntries(Chooser):
    observes = frozenset({"mass"})

    def __init__(self, config):
        self.config, self.per_entry = config, {"mass": torch.float32}

    def choose(self, held, new, budget):
        pool, room = held.with_new(new), self.config.room(budget, new.after)
        return Kept(pool.per_entry["mass"].topk(min(room, pool.count), dim=1).indices.sort(1).values)


def test_observed_mass_is_the_attention_that_entries_got():
    """Only what is committed counts: answering alone changes nothing."""
    config = Heaviest(keep=130, window=16, sinks=2)
    query, keys, values = stream(300, heads=2)
    cache = LayerCache(config, 0)
    fed(cache, query[:, :, :200], keys[:, :, :200], values[:, :, :200], [200])
    held = cache.past.bundles[0].holding
    assert (held.held["entry.mass"].view == 0).all(), "nobody has asked them yet"
    asked = query[:, :, 200:203]
    before = held.held["entry.mass"].view.clone()
    cache.attend(asked, SCALE)
    assert torch.equal(held.held["entry.mass"].view, before)
    cache.read(asked[:, :, :1], NewTokens(keys[:, :, 200:201], values[:, :, 200:201]), SCALE)
    past, window = held.weighted, cache.window.tokens()
    every = WeightedTokens(torch.cat([past.keys, window.keys], 2), torch.cat([past.values, window.values], 2))
    whole = weighted_attention(asked[:, :, :1], every, SCALE).lse
    logits = torch.einsum("bhgqd,bhnd->bhgqn", asked[:, :, :1].unflatten(1, (2, -1)), past.keys) * SCALE
    shares = torch.exp(logits - whole.unflatten(1, (2, -1))[..., None]).sum((2, 3))[0]
    torch.testing.assert_close(held.held["entry.mass"].view, shares)
