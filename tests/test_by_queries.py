"""Methods that go by queries keep what their definitions keep: written plainly, for one head, from all weights."""

import warnings
from dataclasses import replace

import pytest
import torch
import transformers

import kvsketch
import zoo
from drawn import normal
from kvsketch.caches.core import asking
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.lanes import Lanes
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.query import Query
from kvsketch.caches.core.tokens import NewTokens
from kvsketch.caches.forgetting import dropped
from kvsketch.caches.forgetting.threshold import shares_of_prompt
from kvsketch.caches.registry import parse_spec
from kvsketch.evaluation.board.peak import peak_bytes
from kvsketch.evaluation.inspection.kept import held_tokens as tokens_of_layers
from kvsketch.files import TensorFile
from kvsketch.huggingface import free_memory, rereading
from kvsketch.huggingface.loading import _check_shares
from kvsketch.huggingface.naming import as_argument
from lanes import entries_of
from states import difference, state_of

HEADS, GROUP, WIDTH, SCALE = 2, 3, 8, 0.7


def all_weights(query, keys):
    """Causal attention weights of a prompt, [h, g, q, n], in float64."""
    count = keys.shape[2]
    logits = query[0].double().unflatten(0, (HEADS, GROUP)) @ keys[0].double()[:, None].mT * SCALE
    return logits.masked_fill(~torch.ones(count, count, dtype=torch.bool).tril(), -torch.inf).softmax(3)


def pooled(leaving):
    """Means over five neighbours of those that leave together."""
    return torch.nn.functional.pad(leaving, (2, 2)).unfold(0, 5, 1).mean(1)


def told_apart(leaving):
    """Weights from .7 on by the mean over five, or as many as there are."""
    return leaving.where(leaving < 0.7, 0.7 + 0.3 * pooled(leaving) / pooled(torch.ones_like(leaving)))


def mean_of_last(weights):
    return weights[:, :, -32:].mean((1, 2))


def mean_of_all(weights):
    """Over the queries that saw a token: itself, and those after it."""
    return weights.mean(1).sum(1) / torch.arange(weights.shape[3], 0, -1)


def largest_of_all(weights):
    return weights.amax((1, 2))


def largest_of_eight(weights):
    return weights[:, :, -8:].amax((1, 2))


def h2o(weights):
    return weights.sum((1, 2))


def tova(weights):
    return weights[:, :, -1].mean(1)


def best(score, count):
    """The numbers of the best, of equal ones the earlier."""
    order = sorted(range(len(score)), key=lambda i: (-float(score[i]), i))
    return sorted(order[:count])


@pytest.mark.parametrize(
    ("spec", "scores"),
    [
        ("snapkv", mean_of_last),
        ("snapkv, queries='context'", mean_of_all),
        ("kvzip, heads='equal', queries='context'", largest_of_all),
        ("kvzip, heads='equal', queries='context', pooled=1", largest_of_all),
        ("kvzip, heads='equal', queries='window', observed=8", largest_of_eight),
        ("h2o", h2o),
        ("tova", tova),
    ],
)
@pytest.mark.parametrize("keep", [0.25, 90])
def test_a_prompt_is_kept_by_the_definition(spec, scores, keep):
    name, _, options = spec.partition(", ")
    check_kept(parse_spec(f"{name}(keep={keep}, {options})"), scores)


def check_kept(config, scores):
    query, keys, values = (
        normal(1, HEADS * GROUP, 400, WIDTH),
        normal(1, HEADS, 400, WIDTH, seed=1),
        normal(1, HEADS, 400, WIDTH, seed=2),
    )
    cache = LayerCache(config, 0)
    cache.read(query, NewTokens(keys, values), SCALE)
    found, left = scores(all_weights(query, keys)), cache.left[0]
    assert left == (400 - 4 - config.window) // 8 * 8
    for head in range(HEADS):
        leaving = found[head, 4 : 4 + left]
        if config.name == "snapkv":
            leaving = pooled(leaving)
        if config.name == "kvzip" and config.pooled > 1:
            leaving = told_apart(leaving)
        expected = [4 + i for i in best(leaving, config.room(cache.budgets[0], left))]
        assert torch.equal(entries_of(cache.past).keys[0, head], keys[0, head, expected])
    return entries_of(cache.past).keys


def test_neighbours_decide_where_weights_saturate_and_there_alone():
    """Some fifteen tokens of each head have .7 and more: there is room for eight of them, or for all."""
    for keep, alike in ((36, False), (90, True)):
        kept = [
            check_kept(parse_spec(f"kvzip(keep={keep}, heads='equal', queries='context', pooled={n})"), largest_of_all)
            for n in (5, 1)
        ]
        assert torch.equal(*kept) == alike


def stepwise(spec, steps, keep=0.5):
    """A cache after a prompt of 60 tokens and so many single ones; and every query's weights over what was held then.

    Weights are by token, one row for each query, zero where nothing was held.
    """
    count = 60 + steps
    query, keys, values = (
        normal(1, HEADS * GROUP, count, WIDTH),
        normal(1, HEADS, count, WIDTH, seed=1),
        normal(1, HEADS, count, WIDTH, seed=2),
    )
    cache, weights = (
        LayerCache(parse_spec(f"{spec}(keep={keep}, window=16)"), 0),
        torch.zeros(HEADS, count, count, dtype=torch.float64),
    )
    cache.read(query[:, :, :60], NewTokens(keys[:, :, :60], values[:, :, :60]), SCALE)
    weights[:, :60, :60] = all_weights(query[:, :, :60], keys[:, :, :60]).sum(1)
    for i in range(60, count):
        held = held_tokens(cache, keys)
        part = slice(i, i + 1)
        cache.read(query[:, :, part], NewTokens(keys[:, :, part], values[:, :, part]), SCALE)
        for head in range(HEADS):
            seen = [*held[head], i]
            logits = query[0, head * GROUP : (head + 1) * GROUP, i].double() @ keys[0, head, seen].double().T * SCALE
            weights[head, i, seen] = logits.softmax(1).sum(0)
    return cache, keys, weights


def held_tokens(cache, keys):
    """The numbers of the tokens that each head holds, in window and past."""
    window = cache.window.keys.view[0]
    past = entries_of(cache.past).keys[0] if not cache.past.empty else window[:, :0]
    found = []
    for head in range(HEADS):
        every = torch.cat([past[head], window[head]])
        found.append(sorted((keys[0, head][None] == every[:, None]).all(2).nonzero()[:, 1].tolist()))
    return found


def test_h2o_goes_on_counting_what_tokens_get_while_they_are_held():
    cache, keys, weights = stepwise("h2o", 60)
    got = weights.sum(1)
    for head, held in enumerate(held_tokens(cache, keys)):
        past = entries_of(cache.past)
        noted = cache.past.bundles[0].holding.held["entry.mass"].view[head]
        tokens = (keys[0, head][None] == past.keys[0, head][:, None]).all(2).nonzero()[:, 1]
        torch.testing.assert_close(noted, got[head, tokens], rtol=1e-4, atol=1e-5)
        assert set(range(4)) <= set(held)


def test_tova_goes_by_the_latest_query_alone():
    cache, keys, weights = stepwise("tova", 61)
    for head in range(HEADS):
        past = entries_of(cache.past)
        noted = cache.past.bundles[0].holding.held["entry.mass"].view[head]
        tokens = (keys[0, head][None] == past.keys[0, head][:, None]).all(2).nonzero()[:, 1]
        latest = weights[head, -1, tokens]
        known = latest > 0  # those that left the window at the last step were not asked as entries
        torch.testing.assert_close(noted[known], latest[known], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec", ["snapkv", "kvzip"])
def test_a_prompt_keeps_its_share_of_the_room_while_text_is_written(spec):
    config = parse_spec(f"{spec}(keep=120, window=16)")
    query, keys, values = (
        normal(1, HEADS * GROUP, 900, WIDTH),
        normal(1, HEADS, 900, WIDTH, seed=1),
        normal(1, HEADS, 900, WIDTH, seed=2),
    )
    cache, start = LayerCache(config, 0), 0
    for size in (300, *[1] * 600):
        part = slice(start, start + size)
        cache.read(query[:, :, part], NewTokens(keys[:, :, part], values[:, :, part]), SCALE)
        start += size
        if size == 300:
            first = held_tokens(cache, keys)
    room = config.room(cache.budgets[0], cache.left[0])
    parts = cache.past.bundles[0].holding.host["parts"]
    assert [came for came, _, _ in parts] == [280, cache.left[0] - 280]
    assert parts[0][1] == room * 280 // cache.left[0]
    assert sum(there for _, there, _ in parts) == room
    for head, held in enumerate(held_tokens(cache, keys)):
        prompt = [token for token in held if 4 <= token < 284]
        assert len(prompt) == parts[0][1]
        assert set(prompt) <= set(first[head])


@pytest.mark.parametrize("weights", ["mass", "spread"])
def test_what_is_dropped_leaves_its_weight(weights):
    config = parse_spec(f"keydiff(keep=0.25, weights={weights!r})")
    keys, values = 1 + normal(1, HEADS, 500, WIDTH), normal(1, HEADS, 500, WIDTH, seed=1)
    cache = LayerCache(config, 0)
    cache.hold(NewTokens(keys, values))
    entries = entries_of(cache.past)
    stands = entries.log_mass.exp()[0]
    left = cache.left[0]
    torch.testing.assert_close(stands.sum(1), torch.full((HEADS,), float(left)), rtol=1e-5, atol=0)
    if weights == "spread":
        torch.testing.assert_close(stands, torch.full_like(stands, left / stands.shape[1]), rtol=1e-5, atol=0)
        return
    for head in range(HEADS):
        kept = entries.keys[0, head].double()
        nearest = torch.cdist(keys[0, head, 4 : 4 + left].double(), kept).argmin(1)
        torch.testing.assert_close(stands[head], nearest.bincount(minlength=len(kept)).float(), rtol=1e-5, atol=0)


# -- with a model


@pytest.fixture(scope="module")
def llama():
    return zoo.build("llama", layers=3)


def read(model, spec, ids, **given):
    return kvsketch.prefill(model, ids, kvsketch.make_cache(model, spec), **given)


@pytest.mark.parametrize("spec", ["kvzip(keep=0.4, window=0.3)", "keydiff(keep=200, window=0.3, heads='pyramid')"])
def test_a_window_may_be_a_part_of_what_heads_hold(spec, llama):
    """Of the mean of all, in every head, whatever it holds besides; and it grows as the text does."""
    cache, count = read(llama, spec, zoo.tokens(1, 500)), 500
    keep, budgets = cache.config.keep, set()
    for more in (0, 9, 100):
        for _ in range(more):
            kvsketch.prefill(llama, zoo.tokens(1, 1, seed=count), cache)
            count += 1
        mean = keep if isinstance(keep, int) else keep * count
        latest = 16 + int(0.3 * (mean - (4 + 16 + 8)))
        entries = torch.tensor([layer.held.count_entries()[0].tolist() for layer in cache.sketch_layers])
        for layer in cache.sketch_layers:
            ranks = layer.held.window.columns.ranks[0].tolist()
            assert ranks[:4] == [0, 1, 2, 3]
            assert ranks[4:] == list(range(count - len(ranks) + 4, count))
            assert latest <= len(ranks) - 4 < latest + 8
        assert entries.min() >= 4 + latest
        assert mean - 12 <= entries.double().mean() <= mean
        budgets.add(latest)
    assert len(set(entries.flatten().tolist())) > 2, "heads hold different numbers"
    assert len(budgets) == (1 if isinstance(keep, int) else 3)


@pytest.mark.parametrize("protect", [[], [(0, 9), (100, 120), (297, 300)]], ids=["", "some are protected"])
def test_one_threshold_over_all_layers_and_heads(protect, llama):
    """The best scores of all heads are kept, wherever they are; protected tokens do not compete."""
    ids = zoo.tokens(1, 300)
    exact = read(llama, "exact(noting='second reading')", ids)
    cache = read(llama, "kvzip(keep=0.25)", ids, protect=protect)
    protected = torch.tensor([rank for span in protect for rank in range(*span)], dtype=torch.int64)
    scores, kept = [], []
    for whole, layer in zip(exact.sketch_layers, cache.sketch_layers, strict=True):
        window, left = whole.held.window.columns, layer.held.left[0]
        there = torch.arange(4, 4 + left)
        there = there[~torch.isin(there, protected)]
        noted = window.notes.view(torch.float64)[0, :, there, 0]
        for bundle in layer.held.past.bundles:
            for lane, head in enumerate(bundle.heads):
                own = bundle.holding.entries().keys[lane]
                kept.append((window.keys[0, head, None, there] == own[:, None]).all(2).any(0))
                assert int(kept[-1].sum()) == len(own)
                scores.append(noted[head])
    held = torch.cat([torch.cat([s[k] for s, k in zip(scores, kept, strict=True)])])
    gone = torch.cat([s[~k] for s, k in zip(scores, kept, strict=True)])
    counts = [int(k.sum()) for k in kept]
    assert len(set(counts)) > 2, "heads hold different numbers"
    assert float(held.min()) >= float(gone.max()) * (1 - 2**-15)
    room = cache.config.room(Budget(0.25, None, cache.config.floor(), beside=28 if protect else 0), len(there))
    assert sum(counts) == len(kept) * room


@pytest.mark.parametrize(
    ("spec", "taken"),
    [
        ("snapkv(keep=0.25, pooled=1, queries='second reading')", lambda weights: weights.mean(1)),
        ("kvzip(keep=0.25, heads='equal', pooled=1)", lambda weights: weights.amax(1)),
    ],
)
def test_a_second_reading_is_the_same_text_behind_itself(spec, taken, llama):
    """What heads keep got more of its queries' attention, in a model that is plainly given the text twice."""
    ids = zoo.tokens(1, 200)
    cache, exact = read(llama, spec, ids), read(llama, "exact", ids)
    plain = zoo.build("llama", layers=3)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        twice = plain(torch.cat([ids, ids], 1), output_attentions=True).attentions
    left = cache.sketch_layers[0].held.left[0]
    for layer in tokens_of_layers(exact, cache):
        scores = taken(twice[layer.layer][0, :, 200:, :200].unflatten(0, (2, -1)).flatten(1, 2))[:, 4 : 4 + left]
        kept = layer.held[:, 4 : 4 + left]
        assert len(set(kept.sum(1).tolist())) == 1
        for score, own in zip(scores, kept, strict=True):
            assert 0 < own.sum() < left / 2
            assert float(score[own].min()) >= float(score[~own].max()) * (1 - 2**-12)


def test_where_layers_differ_in_width_it_is_bytes_that_one_threshold_divides():
    """The best scores are kept until their bytes are what a quarter of all heads would have; some would have fewer."""
    config, layers = parse_spec("snapkv(keep=0.25, heads='threshold', window=16, pooled=1)"), []
    for number, width in enumerate((8, 24)):
        cache = LayerCache(config, number)
        cache.recording = True
        keys, values = normal(1, HEADS, 400, width, seed=number), normal(1, HEADS, 400, width, seed=9)
        cache.read((number + 1) * normal(1, HEADS * GROUP, 400, width, seed=5), NewTokens(keys, values), SCALE)
        layers.append(cache)
    budgets = [cache.budgets[0] for cache in layers]
    shares = shares_of_prompt(config, layers, budgets)
    noted = [cache.window.noted.view(torch.float64)[0] for cache in layers]
    scores = [(x[:, 4:380, 0] / x[:, 4:380, 1]) for x in noted]  # what leaves by eights
    room, widths = config.room(budgets[0], 376), (8, 24)
    every = [(-float(x), n, w) for n, (own, w) in enumerate(zip(scores, widths, strict=True)) for x in own.flatten()]
    left, kept = room * HEADS * sum(widths), [0, 0]
    for _, layer, size in sorted(every):
        if (left := left - size) < 0:
            break
        kept[layer] += 1
    held = [
        sum(replace(budget, share=share).entries(config.seen_when(budget, 376)) - budget.least for share in rows[0])
        for budget, rows in zip(budgets, shares, strict=True)
    ]
    assert kept[0] != kept[1], "else nothing is seen of widths"
    assert held == kept
    assert sum(n * w for n, w in zip(held, widths, strict=True)) <= room * HEADS * sum(widths)


def test_of_equal_scores_the_lower_layer_comes_first_then_the_lower_head_then_the_earlier_token(llama):
    ids = zoo.tokens(1, 300)
    exact = read(llama, "exact(noting='second reading')", ids)
    for layer in exact.sketch_layers:
        window = layer.held.window
        window.renote(torch.zeros_like(window.noted), slice(None))
    cache = exact.compress("kvzip(keep=0.25)")
    left = cache.sketch_layers[0].held.left[0]
    kept = torch.cat([layer.held[:, 4 : 4 + left] for layer in tokens_of_layers(exact, cache)]).flatten()
    assert left < kept.sum() < len(kept) - left, "a head at least holds everything, and one nothing"
    assert torch.equal(kept, torch.arange(len(kept)) < kept.sum())


SPECS = (
    "kvzip(keep=0.25)",
    "kvzip(keep=70, heads='equal')",
    "snapkv(keep=0.25, heads='threshold', residual=0.1)",
    "kvzip(keep=0.4, window=0.3)",
    "snapkv(keep=0.25, queries='second reading')",
    "kvzip(keep=0.25, queries='context')",
)


def entries(cache, row=0):
    return [layer.held.count_entries()[row].tolist() for layer in cache.sketch_layers]


@pytest.mark.parametrize(
    ("family", "spec"),
    [*(("llama", spec) for spec in SPECS), *((name, SPECS[0]) for name in ("gemma2", "gpt_oss", "lfm2", "falcon_h1"))],
)
def test_however_a_prompt_is_given_the_same_is_held(family, spec, tmp_path):
    model, ids = zoo.build(family), zoo.tokens(1, 260)
    cache = read(model, spec, ids)
    assert difference(state_of(cache), state_of(read(model, spec, ids))) is None, "twice"
    assert entries(cache) == entries(read(model, spec, ids, chunk=100)), "in chunks"
    called = kvsketch.make_cache(model, spec)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=called)
    assert difference(state_of(cache), state_of(called)) is None, "in a call of the model"
    if "queries" not in spec:  # others are not what an exact cache notes
        noting = "window" if spec.startswith("snapkv") else "second reading"
        small = read(model, f"exact(noting={noting!r})", ids).compress(spec)
        assert difference(state_of(cache, asked=False), state_of(small, asked=False)) is None, "compressed"
    cache.save(tmp_path / "cache")
    loaded = kvsketch.load_cache(model, tmp_path / "cache")
    assert difference(state_of(cache), state_of(loaded)) is None
    new = zoo.tokens(1, 20, seed=1)
    answers = [
        model.generate(**one.new_tokens(new), past_key_values=one, max_new_tokens=30, do_sample=False)
        for one in (cache, loaded, called.fork())
    ]
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


@pytest.mark.parametrize(("spec", "noting"), [("tova(keep=0.25)", "last"), ("h2o(keep=90)", "context")])
def test_what_an_exact_cache_notes_is_what_the_method_would_have_gone_by(spec, noting, llama):
    ids, mask = zoo.tokens(2, 260), torch.ones(2, 260, dtype=torch.long)
    mask[1, :70] = 0
    read_itself, exact = (read(llama, one, ids, attention_mask=mask) for one in (spec, f"exact(noting={noting!r})"))
    assert difference(state_of(read_itself, asked=False), state_of(exact.compress(spec), asked=False)) is None


@pytest.mark.parametrize("behind", ["second reading", "questions"])
def test_one_reading_notes_what_several_go_by(behind, llama, tmp_path):
    """Each finds what it would have noted by itself, in a padded batch too, after steps, and in a file."""
    ids, mask = zoo.tokens(2, 260), torch.ones(2, 260, dtype=torch.long)
    mask[1, :70] = 0
    given = {"questions": [zoo.tokens(1, 9, seed=3)]} if behind == "questions" else {}
    names = ["context", "window", "last", behind]

    def noted(noting, asked):
        cache = kvsketch.make_cache(llama, f"exact(noting={noting!r})", questions=asked)
        kvsketch.prefill(llama, ids, cache, attention_mask=mask)
        kvsketch.prefill(llama, zoo.tokens(2, 1), cache)
        return cache

    several = noted(", ".join(names), given.get("questions", ()))
    several.save(tmp_path / "several")
    for cache in (several, kvsketch.load_cache(llama, tmp_path / "several")):
        for name in names:
            alone = noted(name, given.get("questions", ()) if name == behind else ())
            for layer, own in zip(cache.sketch_layers, alone.sketch_layers, strict=True):
                mine, other = layer.held.config.askings, own.held.config.askings
                assert torch.equal(mine.of(layer.held.window.noted, other), own.held.window.noted), name


def test_a_method_takes_its_own_notes_of_several(llama):
    ids = zoo.tokens(1, 260)
    several = read(llama, "exact(noting='window, context, last, second reading')", ids)
    for spec in ("snapkv(keep=0.25)", "h2o(keep=90)", "tova(keep=0.25)", "kvzip(keep=0.25)", "keydiff(keep=0.25)"):
        own = read(llama, spec, ids)
        assert difference(state_of(several.compress(spec), asked=False), state_of(own, asked=False)) is None, spec


def test_notes_go_from_one_exact_cache_to_another(llama):
    ids = zoo.tokens(1, 260)
    several = read(llama, "exact(noting='window, second reading')", ids)
    fewer = several.compress("exact(noting='second reading')")
    for cache in (several.compress(str(several.config)), fewer):
        assert (
            difference(state_of(cache.compress("kvzip"), asked=False), state_of(several.compress("kvzip"), asked=False))
            is None
        )
    with pytest.raises(ValueError, match=r"exact\(noting='second reading, window'\)"):
        fewer.compress("exact(noting='window')")
    with pytest.raises(ValueError, match=r"exact\(noting='window, questions'\)"):
        several.compress("kvzip(queries='questions')")
    for cache in (several, fewer):
        kvsketch.prefill(llama, zoo.tokens(1, 9), cache)
        with pytest.raises(ValueError, match="compress it before it reads on"):
            cache.compress("kvzip")
    own = read(llama, "exact(noting='window')", ids)
    kvsketch.prefill(llama, zoo.tokens(1, 9), own)
    assert (
        difference(state_of(several.compress("snapkv"), asked=False), state_of(own.compress("snapkv"), asked=False))
        is None
    )


@pytest.mark.parametrize("spec", SPECS)
def test_a_padded_row_is_the_row_alone_and_rows_move(spec, llama):
    ids, padding = zoo.tokens(3, 260), (0, 90, 31)
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    both = read(llama, spec, ids, attention_mask=mask)
    for row, count in enumerate(padding):
        alone = read(llama, spec, ids[row : row + 1, count:])
        assert entries(both, row) == entries(alone)
        for layer, own in zip(both.sketch_layers, alone.sketch_layers, strict=True):
            kept = [sorted(keys_of(one.held, at)) for one, at in ((layer, row), (own, 0))]
            assert kept[0] == pytest.approx(kept[1], abs=1e-4)
    both.batch_select_indices(torch.tensor([2, 0, 2]))
    assert entries(both, 0) == entries(both, 2) == entries(read(llama, spec, ids[2:, 31:]))
    out = llama.generate(**both.new_tokens(zoo.tokens(3, 5)), past_key_values=both, max_new_tokens=20, do_sample=False)
    assert out.shape == (3, 25)


def keys_of(held, row):
    """The first numbers of all entries of the past of a row."""
    return [
        float(x)
        for bundle in held.past.bundles
        for lane in range(bundle.lanes)
        if bundle.rows[lane // len(bundle.heads)] == row
        for x in bundle.holding.entries().keys[lane, :, 0]
    ]


def test_a_second_reading_leaves_the_cache_as_it_was(llama):
    ids = zoo.tokens(2, 150)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    plain, twice = (read(llama, spec, ids, attention_mask=mask) for spec in ("exact", "exact(noting='second reading')"))
    for left, right in zip(plain.sketch_layers, twice.sketch_layers, strict=True):
        held = [layer.held.window.columns for layer in (left, right)]
        for row in range(2):
            for name in ("keys", "values"):
                assert torch.equal(*(getattr(x, name)[row, :, x.ranks[row] >= 0] for x in held))
        assert left.held.lengths == right.held.lengths == [150, 110]
    new = zoo.tokens(2, 9, seed=4)
    answers = [llama.generate(**c.new_tokens(new), past_key_values=c, max_new_tokens=9) for c in (plain, twice)]
    assert torch.equal(*answers)


def test_a_text_is_read_again_piece_by_piece_where_it_does_not_fit_twice(llama):
    """Each behind the text, after the tokens that lead up to it; as a model does that is plainly given both."""
    ids, mask = zoo.tokens(2, 700), torch.ones(2, 700, dtype=torch.long)
    mask[1, :140] = 0
    heard = []
    cache = read(llama, "exact(noting='second reading')", ids, attention_mask=mask, progress=heard.append)
    assert heard == [700, 960, 1220, 1400], "three pieces"
    plain = zoo.build("llama", layers=3)
    plain.set_attn_implementation("eager")
    for row, count in enumerate((700, 560)):
        own, largest = ids[row : row + 1, -count:], [torch.zeros(2, count)] * 3
        for start in range(0, count, 1024 - 700 - rereading.LEAD):
            lead = min(start, rereading.LEAD)
            piece = own[:, start - lead : start + 1024 - 700 - rereading.LEAD]
            with torch.no_grad():
                found = plain(torch.cat([own, piece], 1), output_attentions=True).attentions
            asked = [one[0, :, count + lead :, :count].amax(1).unflatten(0, (2, -1)).amax(1) for one in found]
            largest = [torch.maximum(*both) for both in zip(largest, asked, strict=True)]
        for layer, expected in zip(cache.sketch_layers, largest, strict=True):
            columns = layer.held.window.columns
            noted = columns.notes[row, :, columns.ranks[row] >= 0].view(torch.float64)[..., 0]
            torch.testing.assert_close(noted.float(), expected, rtol=1e-3, atol=1e-6)


def test_what_is_held_at_most_while_a_prompt_is_read():
    """The full cache, one layer while layers forget, and of a second reading one piece."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=1220,
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config).eval(), zoo.tokens(1, 900)
    token = 2 * 4 * 64 * 4  # bytes of one layer
    caches = {spec: kvsketch.make_cache(model, spec) for spec in ("exact", "snapkv(heads='threshold')", "kvzip")}

    def peak_of(spec, chunk):
        return peak_bytes(lambda: kvsketch.prefill(model, ids, caches[spec], chunk=chunk), torch.device("cpu"))[0]

    exact, forgetting = (peak_of(spec, 300) for spec in ("exact", "snapkv(heads='threshold')"))
    assert forgetting <= exact + 900 * token
    assert caches["snapkv(heads='threshold')"].nbytes < 0.3 * caches["exact"].nbytes
    held = list[int]()
    kvsketch.prefill(model, ids, caches["kvzip"], chunk=300, progress=lambda _: held.append(caches["kvzip"].nbytes))
    assert 6 * 900 * token < max(held) <= 1.04 * 6 * 1220 * (token + 4 * 8)  # 8 bytes of notes a head


def test_who_has_no_room_for_the_whole_prompt_hears_of_it_before_it_is_read(llama, monkeypatch, tmp_path):
    monkeypatch.setattr(free_memory, "MEMORY", tmp_path / "meminfo")
    token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, bytes
    for spec, chunk, tokens in (("kvzip", 200, 400), ("kvzip", 50, 250), ("snapkv(heads='threshold')", 200, 200)):
        for free, short in ((tokens * token - 1024, True), (tokens * token + 1024, False)):
            (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {free // 1024} kB\n")
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                read(llama, spec, zoo.tokens(1, 200), chunk=chunk)
            assert any("are free. With heads=" in str(one.message) for one in heard) == short


def test_a_budget_is_enough(llama):
    cache = kvsketch.prefill(llama, zoo.tokens(1, 300), kvsketch.make_cache(llama, keep=0.25))
    assert str(cache.config) == "kvzip(keep=0.25, window=0.25)"
    report = cache.report()
    assert report.nbytes < 0.35 * report.full_nbytes
    assert all(layer.error is not None for layer in report.layers), "what forgetting did to the last queries is known"


def test_progress_hears_of_both_readings(llama):
    heard = []
    read(llama, "kvzip(keep=0.25)", zoo.tokens(1, 200), chunk=90, progress=heard.append)
    assert heard == [20, 110, 200, 400]


# -- what cannot be


def test_what_cannot_be_read_twice_is_refused_before_it_is_read(llama):
    cache = kvsketch.make_cache(llama, "kvzip")
    embeddings = llama.get_input_embeddings()(zoo.tokens(1, 30))
    with pytest.raises(ValueError, match="embeddings came instead of token ids"):
        llama(inputs_embeds=embeddings, past_key_values=cache)
    with pytest.raises(ValueError, match="a prompt and what is read again of it at a time have 1,120 tokens"):
        kvsketch.prefill(llama, zoo.tokens(1, 800), cache, chunk=100)
    llama.train()
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        llama(input_ids=zoo.tokens(1, 30), past_key_values=cache)
    llama.eval()
    assert cache.seen == 0
    kvsketch.prefill(llama, zoo.tokens(1, 100), cache)
    assert cache.seen == 100, "nothing is lost"


def test_a_call_that_fails_in_the_middle_of_a_prompt_loses_nothing(llama):
    ids, cache = zoo.tokens(1, 300), kvsketch.make_cache(llama, "kvzip(keep=0.25)")

    def stop(count):
        if count >= 180:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvsketch.prefill(llama, ids[:, :240], cache, chunk=60, progress=stop)
    assert cache.seen == 180
    kvsketch.prefill(llama, ids[:, 180:], cache)
    assert entries(cache) == entries(read(llama, "kvzip(keep=0.25)", ids))


@pytest.mark.parametrize("spec", ["kvzip(keep=0.25)", "snapkv(keep=0.25, queries='second reading')"])
def test_a_second_reading_that_was_interrupted_is_done_when_the_same_is_asked_for_again(spec, llama, monkeypatch):
    monkeypatch.setattr(rereading, "CHUNK", 70)
    ids, new, heard = zoo.tokens(2, 200), zoo.tokens(2, 20, seed=2), []
    expected = read(llama, spec, ids, chunk=90)

    def stop(count):
        if count > 300:
            raise KeyboardInterrupt

    cache = kvsketch.make_cache(llama, spec)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            kvsketch.prefill(llama, ids, cache, chunk=90, progress=stop)
        assert cache.seen == 200
    fork = cache.fork()
    kvsketch.prefill(llama, ids, cache, chunk=90, progress=heard.append)
    assert heard == [260, 330, 400]
    assert difference(state_of(cache, asked=False), state_of(expected, asked=False)) is None
    kvsketch.prefill(llama, new, cache)  # and other tokens, or a call of the model, are later text
    kvsketch.prefill(llama, new, expected)
    with torch.no_grad():
        llama(input_ids=new, past_key_values=fork)
    assert cache.seen == fork.seen == 220
    assert entries(cache) == entries(fork) == entries(expected)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("uniform(heads='threshold')", "uniform has none that can be compared: heads='profile'"),
        ("kvzip(prefill='streaming')", "forgets only when the whole prompt has been read"),
        ("snapkv(pooled=4)", "pooled must be odd"),
        ("kvzip(pooled=0)", "pooled must be a whole number of at least 1"),
        ("kvzip(window=0)", "window must be"),
        ("keydiff(window=0.6)", "a part of what heads may hold such as 0.25, at most 0.5, got 0.6"),
        ("snapkv(observed=0)", "observed must be"),
        ("kvzip(observed=8)", "queries='second reading' asks others: leave it out, or say queries='window'"),
        ("kvzip(queries='all')", "queries must be one of window, context, second reading, questions, got 'all'"),
        ("snapkv(queries='second reading', prefill='streaming')", "forgets only when the whole prompt has been read"),
        ("keydiff(weights='some')", "weights must be one of none, mass, spread"),
        ("keydiff(residual=1)", "residual must be a positive number below 1, got 1"),
        ("keydiff(weights='mass', residual=0.1)", "holds it in entries of their own: leave one of them out"),
        ("streaming_heads(residual=0.1)", "streaming_heads has no option 'residual'"),
        ("exact(noting='all')", "noting must be one of nothing, window, context, last, second reading, questions"),
        ("exact(noting='window, all')", "or several with commas, .*got 'all'"),
        ("exact(noting='last, last')", "noting must name each kind once"),
        ("exact(noting='last, nothing')", "'nothing' by itself"),
        ("exact(noting='second reading, questions')", "leave one of them out"),
    ],
)
def test_what_no_method_can_be_told(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_spec(spec)


def test_a_cache_without_notes_names_the_option_that_takes_them(llama):
    exact = read(llama, "exact", zoo.tokens(1, 90))
    for spec, noting in (("kvzip", "second reading"), ("snapkv", "window"), ("h2o", "context"), ("tova", "last")):
        with pytest.raises(ValueError, match=f"exact\\(noting='{noting}'\\)"):
            exact.compress(spec)
    with pytest.raises(ValueError, match="have a cache of this method read the text itself"):
        exact.compress("snapkv(observed=8)")
    noted = read(llama, "exact(noting='second reading')", zoo.tokens(1, 90))
    noted.fork().compress("kvzip")
    kvsketch.prefill(llama, zoo.tokens(1, 9), noted)
    with pytest.raises(
        ValueError, match="notes of 90 tokens, and the cache has read 99: compress it before it reads on"
    ):
        noted.compress("kvzip")


def test_one_call_more_is_no_part_of_the_prompt(llama):
    cache = read(llama, "kvzip(keep=0.25)", zoo.tokens(1, 300))
    with pytest.warns(
        UserWarning, match="took the first call for the whole prompt, so these 280 tokens count as later text"
    ):
        kvsketch.prefill(llama, zoo.tokens(1, 280), cache)
    with warnings.catch_warnings():  # what is refused is told of once
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"For another text, or this one anew, call cache\.reset"):
            llama(zoo.tokens(1, 300), **as_argument(llama.forward, cache), position_ids=torch.arange(300)[None])


def test_drafts_and_whatever_else_is_taken_back_are_refused(llama):
    cache = kvsketch.make_cache(llama, "snapkv")
    with pytest.raises(ValueError, match="goes by queries, including those of a draft"):
        llama.generate(zoo.tokens(1, 40), past_key_values=cache, prompt_lookup_num_tokens=3, max_new_tokens=8)
    for spec in ("exact(noting='window')", "exact(noting='second reading')", "h2o"):
        noted = read(llama, spec, zoo.tokens(1, 40))
        before = state_of(noted)
        with pytest.raises(ValueError, match=r"cannot take back tokens: .* what theirs look at has been noted"):
            noted.crop(-1)
        noted.crop(0)
        assert difference(state_of(noted), before) is None


# -- questions


def test_questions_say_what_matters(llama):
    """The largest weight from any of the questions' queries, each read by itself behind the prompt."""
    ids, questions = zoo.tokens(1, 200), [zoo.tokens(1, n, seed=n)[0] for n in (7, 12)]
    cache = kvsketch.prefill(llama, ids, kvsketch.make_cache(llama, "exact(noting='questions')", questions=questions))
    found = [layer.held.window.noted.view(torch.float64)[0, ..., 0] for layer in cache.sketch_layers]
    assert cache.seen == 200
    plain = zoo.build("llama", layers=3)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        each = [plain(torch.cat([ids, q[None]], 1), output_attentions=True).attentions for q in questions]
    for layer, noted in enumerate(found):
        largest = [one[layer][0, :, 200:, :200].amax(1).unflatten(0, (2, -1)).amax(1) for one in each]
        torch.testing.assert_close(noted.float(), torch.maximum(*largest), rtol=1e-4, atol=1e-6)
    spec = "kvzip(keep=0.25, queries='questions')"
    itself = kvsketch.prefill(llama, ids, kvsketch.make_cache(llama, spec, questions=questions))
    assert difference(state_of(itself, asked=False), state_of(cache.compress(spec), asked=False)) is None
    mask = torch.ones(2, 200, dtype=torch.long)
    mask[0, :30] = 0
    rows = kvsketch.make_cache(llama, spec, questions=questions)
    kvsketch.prefill(llama, ids.repeat(2, 1), rows, attention_mask=mask)
    assert entries(rows, 1) == entries(itself)


def test_questions_that_are_none_or_not_wanted(llama):
    ids = zoo.tokens(1, 9)
    with pytest.raises(ValueError, match=r"needs questions, and got none: kvsketch.make_cache\(model, method, q"):
        kvsketch.make_cache(llama, "kvzip(queries='questions')")
    with pytest.raises(ValueError, match="does not go by questions: leave them out"):
        kvsketch.make_cache(llama, "kvzip", questions=[ids])
    for wrong in (ids.float(), zoo.tokens(2, 9), ids[:, :0]):
        with pytest.raises(ValueError, match="a question is token ids, 1 × tokens, got torch"):
            kvsketch.make_cache(llama, "kvzip(queries='questions')", questions=[wrong])
    long = kvsketch.make_cache(llama, "kvzip(queries='questions')", questions=[zoo.tokens(1, 900)])
    with pytest.raises(ValueError, match="a prompt and the longest question have 1,100 tokens"):
        kvsketch.prefill(llama, zoo.tokens(1, 200), long)


# -- found by reading


@pytest.mark.parametrize("where", ["right", "middle", "left"])
@pytest.mark.parametrize("noting", ["second reading", "context", "window", "last"])
def test_notes_go_with_their_tokens_wherever_padding_is(noting, where, llama):
    spec = f"exact(noting={noting!r})"
    ids, mask = zoo.tokens(2, 120), torch.ones(2, 120, dtype=torch.long)
    gone = {"left": slice(0, 40), "middle": slice(50, 90), "right": slice(80, 120)}[where]
    mask[1, gone] = 0
    both, alone = read(llama, spec, ids, attention_mask=mask), read(llama, spec, ids[1:, mask[1].bool()])
    for layer, own in zip(both.sketch_layers, alone.sketch_layers, strict=True):
        columns = layer.held.window.columns
        noted = columns.notes[1, :, columns.ranks[1] >= 0].view(torch.float64)
        torch.testing.assert_close(noted, own.held.window.noted[0].view(torch.float64), rtol=1e-3, atol=1e-6)


def test_a_long_row_beside_a_short_one_padded_on_the_right():
    """The latest query of the short row asks long before the last one of the long row does."""
    query, keys, values = (
        normal(2, heads, 900, WIDTH, seed=i) for i, heads in enumerate((HEADS * GROUP, HEADS, HEADS))
    )
    valid = torch.ones(2, 900, dtype=torch.bool)
    valid[1, 200:] = False
    both, alone = LayerCache(parse_spec("tova(keep=0.25)"), 0), LayerCache(parse_spec("tova(keep=0.25)"), 0)
    both.read(query, NewTokens(keys, values, valid), SCALE)
    alone.read(query[1:, :, :200], NewTokens(keys[1:, :, :200], values[1:, :, :200]), SCALE)
    (own,) = (bundle for bundle in both.past.bundles if bundle.rows == [1])
    assert torch.equal(own.holding.entries().keys, entries_of(alone.past).keys[0])


@pytest.mark.parametrize("spec", ["h2o", "tova", "snapkv", "kvzip"])
def test_nothing_of_a_call_that_is_differentiated_stays(spec, llama):
    cache = read(llama, f"{spec}(keep=0.25)", zoo.tokens(1, 150))
    for step in zoo.tokens(1, 30, seed=3).split(1, 1):
        llama(input_ids=step, past_key_values=cache)
    llama(input_ids=zoo.tokens(1, 30, seed=4), past_key_values=cache)
    assert not any(x.requires_grad for x in state_of(cache).values() if isinstance(x, torch.Tensor))
    cache.fork()


@pytest.mark.parametrize("count", [1, 5, 30, 45])
@pytest.mark.parametrize("spec", ["snapkv(heads='threshold')", "kvzip", "h2o(heads='threshold')"])
def test_short_prompts_are_held_whole(spec, count, llama):
    cache = read(llama, spec, zoo.tokens(2, count))
    assert not cache.recording
    if count <= 5:
        assert entries(cache) == [[count] * 2] * 3


def test_layers_that_forget_together_or_not_at_all(llama, monkeypatch):
    cache, calls = kvsketch.make_cache(llama, "kvzip(keep=0.25)"), []

    def full(self, *given):
        calls.append(given)
        if len(calls) == 2:
            raise MemoryError
        return forget(self, *given)

    forget = Lanes.write
    with monkeypatch.context() as patch:
        patch.setattr(Lanes, "write", full)
        with pytest.raises(MemoryError):
            kvsketch.prefill(llama, zoo.tokens(1, 200), cache)
    with pytest.raises(ValueError, match="an earlier call failed half-way"):
        llama(input_ids=zoo.tokens(1, 3), past_key_values=cache)


def test_what_happens_to_a_cache_in_the_middle_of_a_prompt(llama):
    ids, forks = zoo.tokens(2, 200), []
    cache = kvsketch.make_cache(llama, "kvzip(keep=0.25)")

    def stop(count):
        forks.append(cache.fork())
        if count == 140:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvsketch.prefill(llama, ids, cache, chunk=60, progress=stop)
    new = zoo.tokens(2, 5, seed=2)
    for fork in forks:  # what follows is its prompt's last call
        llama.generate(**fork.new_tokens(new), past_key_values=fork, max_new_tokens=40, do_sample=False)
        assert max(map(max, entries(fork))) < fork.seen
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.seen == 140
    assert not cache.recording
    assert entries(cache) == entries(read(llama, "kvzip(keep=0.25)", ids[:, :140].flip(0)))


def test_learned_sinks_have_their_part_of_the_attention():
    model = zoo.build("gpt_oss")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.add_(3)
    ids = zoo.tokens(1, 90)
    cache = read(model, "exact(noting='context')", ids)
    kvsketch.detach(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    for layer in cache.sketch_layers:
        expected = weights[layer.held.layer][0, :, :, :90].sum(1).unflatten(0, (2, -1)).sum(1)
        noted = layer.held.window.noted.view(torch.float64)[0, ..., 0]
        torch.testing.assert_close(noted.float(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "gemma4", "gpt_oss", "lfm2", "qwen3_next", "falcon_h1"])
@pytest.mark.parametrize("noting", ["second reading", "questions"])
def test_a_padded_row_is_asked_as_if_alone_beside_layers_that_slide_or_sum_up(family, noting):
    model, ids, padding = zoo.build(family), zoo.tokens(3, 120), (0, 45, 111)
    mask, spec = torch.ones_like(ids), f"exact(noting={noting!r})"
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    given = {"questions": [zoo.tokens(1, 9, seed=5)]} if noting == "questions" else {}
    both = kvsketch.make_cache(model, spec, **given)
    kvsketch.prefill(model, ids, both, attention_mask=mask, chunk=70)
    for row, count in enumerate(padding):
        alone = kvsketch.prefill(model, ids[row : row + 1, count:], kvsketch.make_cache(model, spec, **given))
        for layer, own in zip(both.sketch_layers, alone.sketch_layers, strict=True):
            columns = layer.held.window.columns
            noted = columns.notes[row, :, columns.ranks[row] >= 0].view(torch.float64)
            torch.testing.assert_close(noted, own.held.window.noted[0].view(torch.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "falcon_h1"])
def test_padding_that_some_layers_would_see_is_refused_before_it_is_read(family):
    model, ids = zoo.build(family), zoo.tokens(2, 60)
    for hidden in (slice(40, 60), slice(10, 20)):
        mask = torch.ones_like(ids)
        mask[1, hidden] = 0
        cache = kvsketch.make_cache(model, "kvzip")
        with pytest.raises(ValueError, match="would see its padding: put all padding before the rows"):
            kvsketch.prefill(model, ids, cache, attention_mask=mask)
        assert cache.seen == 0
    kvsketch.prefill(model, ids, cache)
    assert not cache.recording


def test_shares_that_no_prompt_can_have_set_are_refused(llama, tmp_path):
    cache = read(llama, "kvzip(keep=0.25)", zoo.tokens(1, 200))
    for layer in cache.sketch_layers:
        layer.held.row_shares = [[2.0, 2.0]]
    cache.save(tmp_path / "cache")
    with pytest.raises(ValueError, match="whose mean cannot be above 1"):
        kvsketch.load_cache(llama, tmp_path / "cache")
    narrow, wide = [[["entries", 2.14]] * 2, [["entries", 0.71]] * 2]  # of 64 and 256 numbers: 1 in the mean of bytes
    with TensorFile(tmp_path / "cache") as file:
        _check_shares([narrow, wide], [64, 256], file)
        with pytest.raises(ValueError, match="whose mean cannot be above 1"):
            _check_shares([narrow, wide], [64, 64], file)


def test_an_exact_cache_has_no_error_to_measure(llama):
    for spec, said in (
        ("exact(noting='window')", False),
        ("exact(sinks=0)", False),
        ("uniform(prefill='streaming')", True),
    ):
        cache = read(llama, spec, zoo.tokens(1, 40))
        assert ("error not measured" in str(cache.report())) is said


def test_weights_are_left_in_strips(monkeypatch):
    keys, values = 1 + normal(1, HEADS, 500, WIDTH), normal(1, HEADS, 500, WIDTH, seed=1)
    found = []
    for at_once in (dropped.DISTANCES_AT_ONCE, 1000):
        monkeypatch.setattr(dropped, "DISTANCES_AT_ONCE", at_once)
        cache = LayerCache(parse_spec("keydiff(keep=0.25, weights='mass')"), 0)
        cache.hold(NewTokens(keys, values))
        found.append(entries_of(cache.past).log_mass)
    assert torch.equal(*found)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_many_queries_ask_in_strips(dtype, softcap, monkeypatch):
    monkeypatch.setattr(asking, "IN_CACHE", 1)  # of 16 queries; the last one has 8
    queries, keys = normal(2, HEADS * GROUP, 40, WIDTH).to(dtype), 3 * normal(2, HEADS, 50, WIDTH, seed=1).to(dtype)
    mass = normal(2, HEADS, 50, seed=2)
    mass[:, :, 7] = -torch.inf
    logits = queries.double().unflatten(1, (HEADS, GROUP)) @ keys.double()[:, :, None].mT * SCALE
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) + mass[:, :, None, None]
    lse, precise = logits.logsumexp(4), torch.promote_types(dtype, torch.float32)
    strips = asking.log_weights(Query(queries, SCALE, softcap), lse.flatten(1, 2).to(precise), keys, mass)
    found = [logs.unflatten(2, (GROUP, -1)).clone() for _, _, logs in strips]
    assert [logs.shape[3] for logs in found] == [16, 16, 8]
    tolerance = 1e-9 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(torch.cat(found, 3).double(), logits - lse[..., None], rtol=0, atol=tolerance)


@pytest.mark.parametrize("spec", ["h2o(keep=1.0)", "tova(keep=1.0)", "snapkv(keep=1.0)", "keydiff(keep=1.0)"])
def test_what_leaves_the_window_is_no_part_of_it_any_more(spec):
    """Not of its memory either, where a single head's numbers lie side by side: the window goes on to be written to."""
    cache = LayerCache(parse_spec(spec), 1)
    query, keys, values = normal(1, GROUP, 60, WIDTH), normal(1, 1, 60, WIDTH, seed=1), normal(1, 1, 60, WIDTH, seed=2)
    for n in range(60):
        here = slice(n, n + 1)
        cache.read(query[:, :, here], NewTokens(keys[:, :, here], values[:, :, here]), SCALE)
        places = [x.untyped_storage().data_ptr() for x in cache.state()[0].values() if x.numel()]
        assert len(places) == len(set(places)), n
    assert cache.past.counts == [cache.left[0]] != [0]
