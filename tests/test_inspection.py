"""What `kvsketch inspect` measures and draws, and what it reads it from."""

import html
import json
import re

import pytest
import torch

import kvsketch
import zoo
from browser import seen_in_chromium
from commands import refused
from commands import run as command
from kvsketch.algorithms.subgen import founders, no_clusters, update_softmax_normalizer
from kvsketch.attention import exact_attention
from kvsketch.evaluation.inspection import pictures
from kvsketch.evaluation.inspection.attended import attended
from kvsketch.evaluation.inspection.kept import HeldByLayer, held_tokens, write_kept_page
from kvsketch.evaluation.inspection.spread import (
    clusters_at_shares,
    clusters_over_time,
    inspect_layer,
    median_distance,
    radii,
    save_rows,
)
from kvsketch.evaluation.reading import readable_for
from kvsketch.evaluation.results.panels import save
from kvsketch.huggingface.capture import Captured, capture


def some_keys(count=300, width=4, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_was_captured_gives_the_answers_of_the_model(family):
    """Attention over captured queries, keys and values is what the output projection of every layer gets."""
    model = zoo.build(family)
    ids = zoo.tokens(1, 50)
    got = {}
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs, i=i: got.setdefault(i, inputs[0]))
        for i, layer in enumerate(model.model.layers)
    ]
    seen = capture(model, ids)
    for hook in hooks:
        hook.remove()
    visible = torch.ones(50, 50, dtype=torch.bool).tril()[None, None]
    assert [layer.layer for layer in seen] == list(range(len(model.model.layers)))
    for layer in seen:
        answer = exact_attention(
            layer.queries[None], layer.keys[None], layer.values[None], layer.scale, visible=visible
        ).out
        torch.testing.assert_close(answer.transpose(1, 2).flatten(2), got[layer.layer], rtol=1e-4, atol=1e-5)


def test_only_the_layers_asked_for_are_captured():
    seen = capture(zoo.build("llama"), zoo.tokens(1, 20), [3, 1, 3])
    assert [layer.layer for layer in seen] == [3, 1]


def test_what_bends_the_logits_is_noted():
    assert {layer.softcap for layer in capture(zoo.build("gemma2"), zoo.tokens(1, 20))} == {5.0}
    assert {layer.softcap for layer in capture(zoo.build("llama"), zoo.tokens(1, 20))} == {None}


@pytest.mark.parametrize(("at_most", "layers"), [(1, [0]), (2, [0, 3]), (3, [0, 2, 3]), (9, [0, 1, 2, 3])])
def test_a_few_layers_are_spread_evenly(at_most, layers):
    model = zoo.build("llama")
    assert len(model.model.layers) == 4, "choose other numbers"
    assert [layer.layer for layer in capture(model, zoo.tokens(1, 20), at_most=at_most)] == layers


def test_the_model_keeps_the_attention_it_had():
    model = zoo.build("llama")
    capture(model, zoo.tokens(1, 20))
    assert model.config._attn_implementation == "sdpa"
    kvsketch.attach(model)
    capture(model, zoo.tokens(1, 20))
    assert model.config._attn_implementation == "kvsketch"


def test_wrong_layers_and_texts_are_refused():
    model = zoo.build("llama")
    with pytest.raises(ValueError, match=r"layers \[7\] are no full-attention layers of this model; there are \[0, 1"):
        capture(model, zoo.tokens(1, 20), [7])
    with pytest.raises(ValueError, match=r"one text, ids of shape 1 × tokens, got shape \(2, 20\)"):
        capture(model, zoo.tokens(2, 20))
    with pytest.raises(ValueError, match="a text has 1,100 tokens, and the context of LlamaForCausalLM is 1,024"):
        capture(model, zoo.tokens(1, 1100))


@pytest.mark.parametrize("delta", [0.3, 1.0, 10.0])
def test_founders_are_the_representatives_of_the_algorithm(delta):
    keys = some_keys()
    clusters = no_clusters(1, keys[0])
    counts = []
    for key in keys:
        clusters = update_softmax_normalizer(clusters, delta, key, torch.ones(1))
        counts.append(len(clusters.sizes))
    assert torch.equal(keys[founders(keys, delta)], clusters.representatives)
    for at, count in clusters_over_time(keys, delta):
        assert count == counts[at - 1]


def captured(count=200, heads=2, group=3, layer=5):
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(heads * group, count, 8, generator=generator)
    keys, values = torch.randn(2, heads, count, 8, generator=generator)
    return Captured(layer, queries, keys, values, 0.5)


def test_rows_say_what_they_measured():
    seen = captured()
    rows = list(inspect_layer(seen, [0.5, 1.0]))
    assert [(row["layer"], row["head"]) for row in rows] == [(5, 0), (5, 1)]
    row = rows[1]
    assert row["queries"]["largest"] == pytest.approx(float(seen.queries[3:].norm(dim=2).max()))
    assert row["keys"]["mean"] == pytest.approx(float(seen.keys[1].norm(dim=1).mean()))
    centred = seen.keys[1] - seen.keys[1].mean(0)
    assert row["centred_keys"]["mean"] == pytest.approx(float(centred.norm(dim=1).mean()))
    assert row["median_distance"] == pytest.approx(float(torch.pdist(seen.keys[1]).median()))
    last = row["clusters"][-1]
    assert last["at"] == 200
    assert last["delta"] == pytest.approx(median_distance(seen.keys[1]))
    assert last["log_spread"] == pytest.approx(2 * last["delta"] * row["queries"]["largest"] * 0.5)
    assert row["value_clusters"][-1]["delta"] == pytest.approx(row["value_distance"])
    assert row["value_distance"] == pytest.approx(median_distance(seen.values[1]))


def test_vectors_in_clumps_have_few_clusters_and_a_small_radius():
    """Sixteen clumps, each a tenth as wide as they are apart; the same vectors without clumps beside them."""
    generator = torch.Generator().manual_seed(0)
    clumps = 10 * torch.randn(16, 8, generator=generator)
    noise = torch.randn(400, 8, generator=generator)
    clumped = clumps[torch.arange(400) % 16] + noise
    counts = [next(c["count"] for c in clusters_at_shares(x, [0.25]) if c["at"] == 400) for x in (clumped, noise)]
    assert counts[0] == 16
    assert counts[1] > 300
    (first, *_), (other, *_) = radii(clumped), radii(noise)
    assert first["centres"] == other["centres"] == 16
    assert first["share"] < 0.2 < 0.5 < other["share"]


def test_radii_do_not_depend_on_scale():
    vectors = captured().keys[0]
    for cell, scaled in zip(radii(vectors), radii(7 * vectors), strict=True):
        assert cell["share"] == pytest.approx(scaled["share"], rel=1e-4)
    assert [cell["share"] for cell in radii(vectors[:1].expand(5, -1))] == [0.0, 0.0, 0.0]


def test_pictures_are_functions_of_rows(tmp_path):
    seen = [captured(layer=0), captured(layer=3)]
    rows = [row for layer in seen for row in inspect_layer(layer, [0.5, 1.0])]
    figure = pictures.clusters_picture(rows)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["layer 0", "layer 3"]
    heads = [row for row in rows if row["layer"] == 3]
    curve = figure.axes[1].lines[1]  # after the diagonal: the smaller δ
    cells = [[cell["count"] for cell in head["clusters"] if cell["share"] == 0.5] for head in heads]
    assert list(curve.get_ydata()) == [sum(pair) / 2 for pair in zip(*cells, strict=True)]
    of_values = [[cell["count"] for cell in head["value_clusters"] if cell["share"] == 0.5] for head in heads]
    assert list(figure.axes[1].lines[2].get_ydata()) == [sum(pair) / 2 for pair in zip(*of_values, strict=True)]
    assert len(pictures.norms_picture(rows).axes[0].containers) == 4
    assert save(figure, tmp_path / "new" / "clusters.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.once
@pytest.mark.slow
def test_maps_have_a_panel_for_keys_and_values_of_every_layer_and_head():
    figure = pictures.maps_picture([captured(layer=0), captured(layer=3)], [0, 1])
    assert len(figure.axes) == 8
    for axes in figure.axes:
        points, centres = axes.collections
        assert len(points.get_offsets()) == 200
        assert len(centres.get_offsets()) == pictures.CENTRES


def test_rows_are_written_below_where_they_come_from(tmp_path):
    save_rows([{"layer": 1}], tmp_path / "a" / "rows.jsonl", {"model": "m"})
    lines = (tmp_path / "a" / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"model": "m"}, {"layer": 1}]


def run(*arguments):
    return command("inspect", *arguments)


def test_the_command_writes_rows_and_pictures(tmp_path):
    done = run("--out", tmp_path / "out", "--tokens", 300, "--layers", "0,2", "--shares", "0.5,1")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "inspect.jsonl",
        "clusters.png",
        "norms.png",
        "maps.png",
    }
    head, *rows = map(json.loads, (tmp_path / "out" / "inspect.jsonl").read_text().splitlines())
    assert head["model"] == "embedded"
    assert {row["layer"] for row in rows} == {0, 2}
    assert re.search(r"clusters of values, layer\s+δ = 0.5\s+δ = 1", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--maps", "4"], "--maps must be from 0 to 3 for this model, got [4]"),
        (["--layers", "9"], "layers [9] are no full-attention layers"),
        (["--layers", ""], "--layers must be numbers"),
        (["--maps", ""], "--maps must be numbers"),
        (["--shares", "-1"], "--shares must be positive numbers"),
        (["--heads", "--method", "saap"], "holds every token in every head"),
        (["--heads", "--method", "keydiff(prefill='streaming')"], "chooses while it reads"),
        (["--heads", "--method", "expected_attention"], "not take, and --heads shows what is chosen of a text that"),
        (["--method", "keydiff"], "--method needs --heads"),
        (["--prompt-file", "nowhere.txt"], "there is no file nowhere.txt"),
    ],
)
def test_wrong_options_end_in_a_line(tmp_path, arguments, message):
    refused(run("--out", tmp_path / "out", "--tokens", 100, *arguments), message)
    assert not (tmp_path / "out").exists()


def test_a_text_of_a_few_words_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("hi there")
    refused(run("--out", tmp_path / "out", "--prompt-file", tmp_path / "short.txt"), "at least 16 are needed")


def test_a_radius_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="delta must be 0 or more, got nan"):
        founders(some_keys(), float("nan"))


def test_who_gets_the_attention_is_seen_where_it_was_put():
    """Queries look away from most keys: at those that point the other way and at no others; their values are long."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(600, 16, generator=generator) / 4 + 2
    keys[200:300:4] = -2
    values = torch.randn(600, 16, generator=generator)
    values[200:300:4] *= 10
    found = attended(torch.full((2, 600, 16), -1.0), keys, values, 1.0)
    assert found["best"] > 0.99
    assert found["away"] > 0.99
    assert found["short values"] < 0.01
    assert found["k-center"] > 0.03, "one of them at least: they are all the same"
    assert found["cosine"] < -0.9
    even = attended(torch.zeros(2, 600, 16), keys, values, 1.0)
    assert all(even[name] == pytest.approx(75 / 300, rel=1e-5) for name in ("best", "away", "short keys", "k-center"))


def test_a_text_without_a_middle_has_no_attention_to_it():
    none = torch.zeros(0, 4)
    assert attended(torch.zeros(1, 0, 4), none, none, 1.0) is None


def kept_with(spec, tokens=160):
    """Exact and small caches of one text, and what each head holds."""
    model = zoo.build("llama")
    config = kvsketch.parse_spec(spec)
    whole = kvsketch.prefill(model, zoo.tokens(1, tokens), kvsketch.make_cache(model, readable_for(config)))
    small = whole.compress(config)
    return small, held_tokens(whole, small)


def test_of_the_latest_tokens_the_page_shows_the_latest():
    small, layers = kept_with("streaming_llm(keep=64)")
    for layer in layers:
        (stream,) = small.sketch_layers[layer.layer].held.streams.all
        assert layer.made == [0, 0]
        for head in layer.held:
            assert head.nonzero()[:, 0].tolist() == sorted(stream.window.columns.ranks[0].tolist())
        assert layer.held[0, :4].all(), "sinks"
        assert layer.held[0, -28:].all(), "the latest"


@pytest.mark.parametrize("spec", ["kvzip(keep=0.4)", "uniform(keep=0.5, window=16)", "clustergen(keep=0.6)"])
def test_every_entry_is_a_token_or_said_to_be_none(spec):
    small, layers = kept_with(spec)
    assert sum(sum(layer.made) for layer in layers) > 0 if "clustergen" in spec else True
    for layer in layers:
        entries = small.sketch_layers[layer.layer].held.count_entries()[0].tolist()
        assert [int(head.sum()) + made for head, made in zip(layer.held, layer.made, strict=True)] == entries
        if "clustergen" not in spec:
            assert layer.made == [0, 0]


def test_the_page_of_kept_tokens_shows_a_head_alone_and_runs_nothing_of_the_text(tmp_path):
    """In Chromium: a click shows a head's tokens, a pointer marks the heads of a token, and a script is text."""
    held = [torch.tensor([[1, 0, 1, 1, 0], [0, 0, 1, 0, 1]], dtype=torch.bool), torch.ones(2, 5, dtype=torch.bool)]
    layers = [HeldByLayer(2 * n, part, [0, 3]) for n, part in enumerate(held)]
    words = ["a", "</script><script>document.title = 'run'</script>", "&amp;", "", "z"]
    write_kept_page(tmp_path / "kept.html", layers, words, {"text": "<b>bold</b>"})
    page = (tmp_path / "kept.html").read_text()
    assert "<b>bold" not in page
    assert page.count("<script>") == 1
    assert not re.search("https?:|src=|<link|@import|url\\(", page), "nothing is fetched"
    spans = "document.querySelectorAll('#text span')"
    first = f"document.body.dataset.first = [...{spans}].map(span => span.className)"
    point = f"{spans}[1].dispatchEvent(new MouseEvent('mouseenter'))"
    click = f"<script>{first}; {point}; document.getElementById('h1').click();</script></body>"
    (tmp_path / "clicked.html").write_text(page.replace("</body>", click))
    seen = seen_in_chromium(tmp_path / "clicked.html", tmp_path / "browser")
    assert "<title>kvsketch: which tokens are kept</title>" in seen
    assert 'data-first="s7,s5,s9,s7,s7"' in seen  # before the click: held by 3, 2, 4, 3 and 3 of four heads
    assert re.findall(r'<span class="(s\d)" title', seen) == ["s0", "s0", "s9", "s0", "s9"]
    assert re.search(r'id="about"[^>]*>layer 0, KV head 1: 40.0 % of the tokens', seen)
    assert re.findall(r'id="h(\d)" class="s\d on"', seen) == ["2", "3"]  # both heads of layer 2 hold the second token


def test_a_page_of_kept_tokens_is_written(tmp_path):
    done = run("--out", tmp_path / "out", "--tokens", 200, "--heads", "--method", "keydiff(keep=0.5)")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out" / "kept.html").read_text()
    assert "keydiff(keep=0.5)" in page
    text = "".join(re.findall(r'heads">([^<]*)</span>', page))
    assert html.unescape(text).startswith("A record of lines:\nline ")
