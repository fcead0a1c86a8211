"""Protected tokens are never dropped, by no method and in no head; what others hold has to do without their bytes."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch

import calls
import kvsketch
import zoo
from drawn import normal
from kvsketch.attention import exact_attention
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.config import BLOCK
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.spans import Spans, read_spans
from kvsketch.caches.core.tokens import NewTokens
from kvsketch.caches.registry import parse_spec
from kvsketch.files import TensorFile, write_tensors
from states import difference, state_of
from uneven import made_profile

HEADS, GROUP, WIDTH, SCALE = 2, 2, 8, 0.35
SPANS = [Spans(((183, 190),)), Spans(((0, 9), (60, 75), (110, 131)))]
SPECS = [
    "streaming_llm(keep=0.3)",
    "uniform(keep=0.3, window=16)",
    "uniform(keep=180)",
    "clustergen(keep=0.3)",
    "balancekv(keep=0.3, window=16)",
    "balancekv(keep=180, mode='faithful')",
    "subgen(keep=0.4, window=16)",
    "keydiff(keep=0.3)",
    "h2o(keep=0.3)",
    "tova(keep=0.3)",
    "snapkv(keep=0.3)",
    "pyramidkv(keep=120, prefill='streaming', chunk=50)",
    "kvzip(keep=0.3)",
    "kvzip(keep=0.4, window=0.3)",
    "streaming_heads(keep=0.3)",
    "lsh(window=20, bins=6, full_layers=0)",
]
fed = partial(calls.fed, scale=SCALE)


def stream(rows, count):
    """Queries, keys and values."""
    heads = (HEADS * GROUP, HEADS, HEADS)
    return [normal(rows, n, count, WIDTH, seed=seed) for seed, n in enumerate(heads)]


def exactly_held(held, row, head):
    """Keys and values side by side that a layer holds of a KV head as they came, each with the weight one."""
    stream, place = next(
        (s, heads.index(head)) for heads, s in zip(held.streams.heads, held.streams.all, strict=True) if head in heads
    )
    window, there = stream.window, stream.window.ranks.view[row] >= 0
    found = [torch.cat([x.view[row, place][there] for x in (window.keys, window.values)], 1)]
    for bundle in stream.kept.bundles:
        if row in bundle.rows and bundle.count:
            own, lane = bundle.holding, bundle.rows.index(row) * len(bundle.heads) + bundle.heads.index(place)
            assert own.weighted.log_mass is None
            found.append(torch.cat([own.weighted.keys[0, lane], own.weighted.values[0, lane]], 1))
    return torch.cat(found)


def times_held(held, row, head, tokens):
    """How often each of these tokens [n, d + e] is held exactly."""
    return (tokens[:, None] == exactly_held(held, row, head)[None]).all(2).sum(1)


def ranks_of(spans):
    return [rank for start, stop in spans.each for rank in range(start, stop)]


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("spec", SPECS)
def test_they_are_held_whatever_the_method_and_a_row_is_as_if_alone(spec):
    """A padded batch whose rows protect other tokens, fed in long, short and single calls; then moved, and restored."""
    config, padding, sizes = parse_spec(spec), 32, [210, 1, 1, 1, 20]  # a block is due in the middle
    count = sum(sizes)
    (query, keys, values), valid = stream(2, count), torch.ones(2, count, dtype=torch.bool)
    valid[1, :padding] = False
    cache = LayerCache(config, 1, spans_of=lambda rows: SPANS)
    got = fed(cache, query, keys, values, sizes, valid)
    for row, skip in ((0, 0), (1, padding)):
        own = [x[row : row + 1, :, skip:] for x in (query, keys, values)]
        wanted = torch.cat([own[1], own[2]], 3)[0, :, ranks_of(SPANS[row])]
        assert all((times_held(cache, row, head, wanted[head]) == 1).all() for head in range(HEADS))
    alone = LayerCache(config, 1, spans_of=lambda rows: SPANS[1:])
    expected = fed(alone, *own, [sizes[0] - padding, *sizes[1:]])
    torch.testing.assert_close(got[1:, :, padding:], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(cache.count_entries()[1], alone.count_entries()[0])
    if config.budget_given != 1:
        keep = config.budget_given if isinstance(config.budget_given, int) else config.budget_given * count
        entry = 2 * HEADS * WIDTH * keys.element_size() + 12
        assert cache.nbytes <= 2 * (1.05 * keep + 128) * entry
        assert cache.count_entries().max() <= max(keep, config.floor() + 41) + BLOCK
    tensors, numbers = cache.state()
    rows = [1, 0, 1]
    before = cache.attend(query[:, :, -1:], SCALE).out[rows]
    twin = LayerCache(config, 1)
    twin.restore({name: x.clone() for name, x in tensors.items()}, copy.deepcopy(numbers))
    for one in (cache, twin):
        one.map_rows(rows)
        torch.testing.assert_close(one.attend(query[rows, :, -1:], SCALE).out, before)
    assert torch.equal(*(fed(one, *stream(3, 20), [1, 19]) for one in (cache, twin)))


@pytest.mark.parametrize(
    "spec", ["streaming_llm(keep=300)", "uniform(keep=1.0)", "clustergen(keep=300)", "h2o(keep=1.0)"]
)
def test_where_there_is_room_for_all_every_token_is_held_once(spec):
    query, keys, values = stream(2, 240)
    cache = LayerCache(parse_spec(spec), 1, spans_of=lambda rows: SPANS)
    got = fed(cache, query, keys, values, [200, 1, 39])
    visible = torch.ones(240, 240, dtype=torch.bool).tril()[None, None]
    expected = exact_attention(query, keys, values, SCALE, visible=visible).out
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert cache.count_entries().tolist() == [[240] * HEADS] * 2
    assert cache.nbytes >= 2 * keys.nbytes


@pytest.mark.parametrize("spec", ["streaming_llm(keep=0.3)", "clustergen(keep=0.5)", "keydiff(keep=0.5, window=0.5)"])
def test_rows_whose_windows_are_unequal_are_as_if_alone(spec):
    """What is protected leaves the window less where that follows from the budget: in rows of equal lengths too."""
    config, parts = parse_spec(spec), [1, 199, 1, 1, 60, 90]
    given, spans = stream(2, sum(parts)), [Spans(((10, 70),)), Spans()]
    cache = LayerCache(config, 1, spans_of=lambda rows: spans)
    fed(cache, *(x[:, :, :200] for x in given), parts[:2])
    tensors, numbers = cache.state()
    with pytest.raises(ValueError, match="rows whose windows have unequal lengths"):
        LayerCache(config, 1).restore(tensors, numbers | {"ragged": False})
    cache.map_rows([1, 0])
    got = fed(cache, *(x[[1, 0], :, 200:] for x in given), parts[2:])
    for row, own in enumerate(spans):
        alone = LayerCache(config, 1, spans_of=lambda rows, own=own: [own])
        expected = fed(alone, *(x[row : row + 1] for x in given), parts)[:, :, 200:]
        torch.testing.assert_close(got[1 - row, None], expected, rtol=1e-4, atol=1e-5)
        assert cache.left[1 - row] == alone.left[0]
    assert cache.left[0] != cache.left[1]


def test_windows_are_unequal_from_the_first_token_on():
    cache = LayerCache(parse_spec("streaming_llm(keep=0.3)"), 1, spans_of=lambda rows: [Spans(((5, 20),)), Spans()])
    fed(cache, *stream(2, 41), [1] * 41)
    assert cache.left == [BLOCK, 0]


def test_the_latest_tokens_get_what_protected_ones_leave():
    keys = normal(1, HEADS, 400, WIDTH)
    cache = LayerCache(parse_spec("streaming_llm(keep=0.5)"), 0, spans_of=lambda rows: [Spans(((10, 110),))])
    cache.hold(NewTokens(keys, keys))
    assert cache.left == [(400 - 4 - (200 - 100 - 4)) // BLOCK * BLOCK]
    assert cache.nbytes >= cache.count_entries().sum() * 2 * WIDTH * keys.element_size()


def test_protected_tokens_are_taken_back_as_others_are():
    keys = normal(1, HEADS, 230, WIDTH)
    cache, plain = (LayerCache(parse_spec("keydiff(keep=0.4)"), 0, spans_of=given) for given in (spans_of_both, None))
    for one in (cache, plain):
        one.hold(NewTokens(keys[:, :, :200], keys[:, :, :200]))
        one.crop(15)
        assert one.lengths == [185]
        with pytest.raises(ValueError, match="only the last"):
            one.crop(30)
        one.hold(NewTokens(keys[:, :, 185:], keys[:, :, 185:]))
    again = torch.cat([keys, keys], 3)[0, :, [*range(100, 104), *range(180, 190)]]
    assert all((times_held(cache, 0, head, again[head]) == 1).all() for head in range(HEADS))


def spans_of_both(rows):
    return [Spans(((100, 104), (180, 190)))] * rows


def test_what_a_budget_leaves_is_the_rest_of_it():
    """Of a number of entries, and of a fraction of all tokens, those that are held beside among them."""
    assert Budget(None, 500, 100, beside=80).entries(3000) == 420
    assert Budget(0.25, None, 68, beside=80).entries(3000) == 0.25 * 3080 - 80
    assert Budget(0.25, None, 68, beside=80).entries(200) == 68
    assert Budget(0.25, None, 68, 2.0, 80).entries(3000) == 68 + 2 * (0.25 * 3080 - 80 - 68)


# -- with a model


@pytest.fixture(scope="module")
def llama():
    return zoo.build("llama", layers=2)


def read(model, spec, ids, *, protect=(), **given):
    return kvsketch.prefill(model, ids, kvsketch.make_cache(model, spec, protect=protect), **given)


def assert_held(cache, exact, spans):
    """Every token of each row's spans is in every layer and head."""
    for layer, whole in zip(cache.sketch_layers, exact.sketch_layers, strict=True):
        window = whole.held.window
        for row, own in enumerate(spans):
            place = {int(rank): i for i, rank in enumerate(window.ranks.view[row])}
            wanted = [place[rank] for rank in ranks_of(read_spans(own).rows[0])]
            tokens = torch.cat([window.keys.view, window.values.view], 3)[row, :, wanted]
            assert all((times_held(layer.held, row, head, each) == 1).all() for head, each in enumerate(tokens))


EACH = [[(0, 12), (90, 110)], [(60, 90)]]


@pytest.mark.parametrize(
    "spec",
    ["kvzip(keep=0.4)", "snapkv(keep=0.4, heads='threshold')", "keydiff(keep=0.4, heads={!r})",
     "streaming_heads(keep=0.6, heads={!r})"],
)  # fmt: skip
def test_of_every_row_in_all_heads_however_they_share_the_budget(spec, llama, tmp_path):
    spec = spec.format(made_profile(tmp_path / "profile.json", llama))
    ids, mask = zoo.tokens(2, 240), torch.ones(2, 240, dtype=torch.long)
    mask[1, :40] = 0
    cache = read(llama, spec, ids, protect=EACH, attention_mask=mask)
    assert_held(cache, read(llama, "exact", ids, attention_mask=mask), EACH)
    plain = read(llama, spec, ids, attention_mask=mask)
    entries = [sum(sum(layer.entries) for layer in one.report().layers) for one in (cache, plain)]
    assert 0.8 * entries[1] < entries[0] < 1.02 * entries[1] or "streaming_heads" in spec
    noting = "second reading" if "kvzip" in spec else "window" if "snapkv" in spec else "nothing"
    exact = read(llama, f"exact(noting={noting!r})", ids, protect=EACH, attention_mask=mask)
    assert difference(state_of(cache, asked=False), state_of(exact.compress(spec), asked=False)) is None, "compressed"
    cache.save(tmp_path / "cache")
    loaded = kvsketch.load_cache(llama, tmp_path / "cache")
    assert difference(state_of(loaded), state_of(cache)) is None
    if "streaming_heads" in spec:
        return  # all rows have the same full heads
    alone = read(llama, spec, ids[1:, 40:], protect=EACH[1])
    new = zoo.tokens(2, 25, seed=5)
    both, single = (
        llama.generate(**one.new_tokens(ids), past_key_values=one, max_new_tokens=4, do_sample=False)
        for one, ids in ((loaded, new), (alone, new[1:]))
    )
    assert torch.equal(both[1], single[0])
    assert [layer.held.count_entries()[1].tolist() for layer in loaded.sketch_layers] == [
        layer.held.count_entries()[0].tolist() for layer in alone.sketch_layers
    ]


def test_beams_and_forks_keep_them_and_the_report_counts_them(llama):
    ids = zoo.tokens(2, 150)
    cache = kvsketch.prefill(llama, ids, kvsketch.make_cache(llama, "keydiff(keep=0.4)"), protect=EACH)
    assert cache.report().protected == (32, 30)
    assert "30-32 tokens of a row are protected" in str(cache.report())
    exact = read(llama, "exact", ids)
    cache.batch_repeat_interleave(2)
    assert cache.report().protected == (32, 32, 30, 30)
    new = zoo.tokens(2, 4).repeat_interleave(2, 0)
    beams = cache.fork()
    llama.generate(**beams.new_tokens(new[::2].repeat_interleave(2, 0)), past_key_values=beams, max_new_tokens=12)
    for one in (cache, beams):
        exact_rows = exact.fork()
        exact_rows.batch_repeat_interleave(2)
        assert_held(one, exact_rows, [each for each in EACH for _ in range(2)])
    generated = kvsketch.make_cache(llama, "uniform(keep=0.5, window=16)", protect=EACH[0])
    llama.generate(ids, past_key_values=generated, num_beams=2, max_new_tokens=4, do_sample=False)
    assert generated.report().protected == (32,) * 4


def test_an_exact_cache_hands_on_what_is_protected(llama):
    exact = read(llama, "exact", zoo.tokens(3, 150), protect=[[(0, 9)], [(50, 60), (149, 150)], [(2, 4)]])
    exact.batch_select_indices(torch.tensor([1, 0]))
    assert exact.compress("keydiff(keep=0.5)").report().protected == (11, 9)
    with pytest.raises(ValueError, match="11 tokens of row 0 are protected, and of its 150"):
        exact.compress("streaming_llm(keep=0.05)")
    exact.crop(-1)
    assert exact.compress("keydiff(keep=0.5)").report().protected == (10, 9)
    empty = kvsketch.make_cache(llama, "exact", protect=[(0, 6)]).compress("keydiff")
    assert kvsketch.prefill(llama, zoo.tokens(1, 90), empty).report().protected == (6,)


def test_the_heads_of_streaming_heads_are_as_many_as_fit_beside_them(llama, tmp_path):
    spec = f"streaming_heads(keep=0.51, heads={made_profile(tmp_path / 'profile.json', llama)!r})"
    for protect, whole in (([], 2), ([(0, 100)], 1), ([(100, 200)], 1)):
        cache = read(llama, spec, zoo.tokens(1, 240), protect=protect)
        assert sum(entries == 240 for layer in cache.report().layers for entries in layer.entries) == whole
    shares = cache.sketch_layers[0].held.shares
    assert shares.length == 240
    found = [replace(shares, length=8000, found={})(layer, 2, Budget(0.51, None, 20, beside=96)) for layer in range(2)]
    assert sum(share > 0 for heads in found for share in heads) == 2, "in a longer text there is room for another one"
    config = parse_spec("streaming_heads(keep=0.25, heads='profile')")
    shares = {layer: [layer + head / 100 for head in range(100)] for layer in range(2)}

    def full(beside, length=2048):
        found = config.divided(shares, beside, length)
        return sum(share > 0 for heads in found.values() for share in heads)

    assert full(0) == 200 * (512 - 20) // (2048 - 20)
    for beside, length in ((0, 2048), (100, 2048), (100, 9000), (2000, 9000)):
        heads = full(beside, length)
        assert heads * length + (200 - heads) * (20 + beside) <= 200 * 0.25 * length
        assert (heads + 1) * length + (199 - heads) * (20 + beside) > 200 * 0.25 * length
    assert full(600) == 0


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("protect", "message"),
    [
        ("0:20", r"protect is \(start, stop\) pairs of whole numbers for all rows"),
        ([(0, 5, 9)], "protect is"),
        ([(0.0, 5)], "protect is"),
        ([(False, True)], "protect is"),
        ([(0, 5), [(0, 5)]], "protect is"),
        ([(5, 5)], r"is \(start, stop\), the first token and the one after the last, counted from 0, got \(5, 5\)"),
        ([(9, 5)], r"got \(9, 5\)"),
        ([[(0, 2)], [(-3, 5)]], r"got \(-3, 5\)"),
        ([(3, 1 << 50)], "got"),
    ],
)  # fmt: skip
def test_spans_that_are_none(protect, message, llama):
    with pytest.raises(ValueError, match=message):
        kvsketch.make_cache(llama, "uniform", protect=protect)


def test_spans_that_overlap_are_one():
    assert read_spans([(5, 9), [0, 3], (3, 4), (6, 12)]).of(2) == [Spans(((0, 4), (5, 12)))] * 2
    assert read_spans([[(5, 9)], []]).of(2) == [Spans(((5, 9),)), Spans()]
    assert not read_spans([])
    assert not read_spans([[], []])


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("spec", "protect", "message"),
    [
        ("uniform(keep=0.5)", [(190, 201)], "goes up to token 201 of row 0, and its prompt has 200"),
        ("uniform(keep=0.5)", [[(0, 9)], [(150, 151)]], "goes up to token 151 of row 1, and its prompt has 150"),
        ("exact", [[(0, 9)], [(150, 151)]], "goes up to token 151 of row 1"),
        ("uniform(keep=0.5)", [[(0, 9)]] * 3, "has spans for 3 rows, and the batch has 2: give one list for all rows"),
        ("uniform(keep=0.5)", [(0, 5), (40, 150)], "111 tokens of row 0 are protected, and of its 200 .* hold 100"),
        ("uniform(keep=150)", [(50, 101)], "leaves 150 entries.*but 51 tokens of a row are protected, and unif.*least"),
        ("uniform(keep='120KB')", [(20, 60)], "but 40 tokens of a row are protected"),
    ],
)  # fmt: skip
def test_what_cannot_be_protected_is_refused_and_nothing_read(spec, protect, message, llama):
    ids, mask = zoo.tokens(2, 200), torch.ones(2, 200, dtype=torch.long)
    mask[1, :50] = 0
    cache = kvsketch.make_cache(llama, spec)
    calls = [partial(kvsketch.prefill, llama, ids, cache, attention_mask=mask, chunk=80, protect=protect)]
    if "150 entries" in message:  # known at once
        calls.append(partial(kvsketch.make_cache, llama, spec, protect=protect))
    else:
        made = kvsketch.make_cache(llama, spec, protect=protect)
        calls.append(partial(llama, ids, attention_mask=mask, past_key_values=made))
        calls.append(partial(kvsketch.prefill, llama, ids, made, attention_mask=mask))
    for call in calls:
        with pytest.raises(ValueError, match=message), torch.no_grad():
            call()
    assert cache.seen == 0
    kvsketch.prefill(llama, ids, cache, attention_mask=mask, protect=[(0, 6)])
    assert cache.report().protected == (6, 6)


def test_spans_that_come_late_or_twice(llama):
    ids = zoo.tokens(1, 100)
    cache = read(llama, "uniform(keep=0.5)", ids, protect=[(0, 6)])
    before = state_of(cache)
    with pytest.raises(ValueError, match="has read before, and some of that may be gone"):
        kvsketch.prefill(llama, ids, cache, protect=[(100, 110)])
    assert difference(before, state_of(cache)) is None
    emptied = read(llama, "uniform(keep=0.5)", ids[:, :20])
    emptied.crop(-20)
    with pytest.raises(ValueError, match="has read before"):
        kvsketch.prefill(llama, ids, emptied, protect=[(0, 6)])
    cache.reset()
    with pytest.raises(ValueError, match="made with protect=, and prefill is told to protect too: leave one of them"):
        kvsketch.prefill(llama, ids, cache, protect=[(0, 6)])
    assert kvsketch.prefill(llama, ids, cache).report().protected == (6,), "what a cache is made with stays"


def test_files_that_protect_what_no_cache_has(llama, tmp_path):
    path = tmp_path / "cache"
    read(llama, "streaming_llm(keep=120)", zoo.tokens(1, 200), protect=[(20, 30), (195, 200)]).save(path)
    kvsketch.load_cache(llama, path)
    with TensorFile(path) as file:
        tensors, about = file.read(), file.about

    def kept(layer):
        return layer["state"]["streams"][0]["kept"][0]

    def fewer(layer):
        for name in ("keys", "values"):
            changed[f"1.0.kept.0.{name}"] = changed[f"1.0.kept.0.{name}"][:, :9]

    def fewer_throughout(layer):
        fewer(layer)
        kept(layer).update(count=9)

    def spans(written):
        return lambda layer: layer["state"].update(protected=written)

    for change in (
        spans([[[20, 31]]]), spans([[[20, 25], [25, 30], [195, 200]]]), spans([[20, 30], [195, 200]]), spans([[]]),
        spans([[[20, 30], [195, 200]]] * 2), spans([[["a", 30]]]), spans([[[20, 30]]]),
        spans(7), fewer, fewer_throughout,
        lambda layer: layer["state"].pop("protected"),
        lambda layer: kept(layer).update(count=9), lambda layer: kept(layer).update(rows=[1]),
        lambda layer: layer["state"]["streams"][0].pop("kept"),
    ):  # fmt: skip
        layers, changed = copy.deepcopy(about["layers"]), dict(tensors)
        change(layers[1])
        write_tensors(path, changed, about | {"layers": layers})
        with pytest.raises(ValueError, match="holds a state of layer 1 that"):
            kvsketch.load_cache(llama, path)
    layers = copy.deepcopy(about["layers"])
    for layer in layers:
        spans([[[20, 30], [195, 20000]]])(layer)
    write_tensors(path, tensors, about | {"layers": layers})
    with pytest.raises(ValueError, match=r"layer 0 that .*protected tokens"):
        kvsketch.load_cache(llama, path)
