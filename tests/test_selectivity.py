"""The study of selectivity: what methods read and how far off they are, that it goes on, what it says of its rows."""

import dataclasses
import io
import json
import math

import pytest
import torch
from benchmarks.selectivity import pictures as pictures
from benchmarks.selectivity.__main__ import main
from benchmarks.selectivity.attention_span import Cut, span
from benchmarks.selectivity.lookups import case_of, filled, measure
from benchmarks.selectivity.plan import KEY, WINDOW_ALONE, Study, Trial, index_name
from benchmarks.selectivity.random_tokens import RandomTokens
from benchmarks.selectivity.study import KEYS, Asked, Files, run
from benchmarks.selectivity.summary import at_read, label, summarise, with_first_index
from benchmarks.selectivity.tables import tables
from rich.console import Console

import zoo
from commands import refused
from commands import run as command
from kvsketch.algorithms import lsh, saap
from kvsketch.attention import exact_attention
from kvsketch.caches.lookup.key_index import read_index
from kvsketch.caches.registry import parse_spec
from kvsketch.evaluation.results.rows import key_of, read_rows
from made_index import make_index
from test_selectivity_keys import GROUP, HEADS, TOKENS, WIDTH, captured, text

CUT = Cut(sinks=2, window=40, asking=10)
BUCKETS = 8
METHODS = (
    "saap",
    "kmeans",
    "kmeans(rope=True)",
    "lsh(kind='kdeformer')",
    "lsh(kind='reformer')",
    "lsh(kind='magicpig')",
    "random_buckets",
    "random_tokens",
    "retrieval",
)
ALL_WITH = {"saap": "probes=8", "kmeans": "probes=8", "kmeans(rope=True)": "probes=8", "retrieval": "top=1000"}
TINY = {"model": "tiny", "fingerprint": "1", "dtype": "float32", "kvsketch": "0.1.0"}


@pytest.fixture
def folder(tmp_path):
    return make_index(tmp_path / "index", heads=HEADS, width=WIDTH, buckets=BUCKETS)


def study(folder, **changes):
    given = {"methods": METHODS, "indexes": [read_index(folder)], "cut": CUT, "seeds": 2}
    return Study(**(given | changes))


def measured(seen, config, case=None):
    return measure(case or case_of(seen, CUT), Trial("this", 1, config))


def by_hand(seen, visible, past):
    """Errors of attention that sees these tokens of the past, [h, q, n], and everything else up to itself."""
    places = torch.arange(TOKENS)
    asking = torch.arange(TOKENS - CUT.asking, TOKENS)
    allowed = (places <= asking[:, None]).expand(HEADS, -1, -1).clone()
    exact = exact_attention(
        seen.queries[None, :, asking], seen.keys[None], seen.values[None], 0.5, visible=allowed[None]
    )
    allowed[:, :, past] &= visible
    given = exact_attention(
        seen.queries[None, :, asking], seen.keys[None], seen.values[None], 0.5, visible=allowed[None]
    )
    wrong = (given.out - exact.out)[0]
    attention = torch.softmax((seen.queries[:, asking] @ seen.keys.repeat_interleave(GROUP, 0).mT)[..., past] * 0.5, 2)
    recall = (attention * visible.repeat_interleave(GROUP, 0)).sum(2).mean(1)
    return wrong, exact.out[0], recall


# -- what is measured


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_case_is_exact_attention_in_two_parts(softcap):
    seen = captured(softcap=softcap)
    case = case_of(seen, CUT)
    past = CUT.past(TOKENS)
    assert torch.equal(case.keys[0], seen.keys[:, past])
    assert torch.equal(case.unrotated[0], seen.keys_before[:, past])
    assert torch.equal(case.query.unrotated[0], seen.queries_before[:, -10:])
    visible = (torch.arange(TOKENS - 10, TOKENS)[:, None] >= torch.arange(TOKENS))[None, None]
    expected = exact_attention(
        seen.queries[None, :, -10:], seen.keys[None], seen.values[None], 0.5, visible=visible, softcap=softcap
    )
    row = measure(case, Trial(WINDOW_ALONE))
    assert (row["read"], row["recall"]) == (0, 0)
    alone = exact_attention(
        seen.queries[None, :, -10:],
        seen.keys[None],
        seen.values[None],
        0.5,
        visible=visible & ~torch.isin(torch.arange(TOKENS), torch.arange(past.start, past.stop)),
        softcap=softcap,
    )
    assert row["mse"] == pytest.approx(float((alone.out - expected.out).square().mean()), rel=1e-4)
    assert row["error"] == pytest.approx(float((alone.out - expected.out).norm() / expected.out.norm()), rel=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        "saap(index={}, probes=8)",
        "kmeans(index={}, probes=8)",
        "kmeans(index={}, rope=True, probes=8)",
        "lsh(kind='kdeformer', bins=1)",
        "lsh(kind='reformer', bins=1)",
        "lsh(kind='magicpig', bits=1, tables=60)",
        "random_buckets(buckets=5, probes=5)",
        "retrieval(top=1000)",
    ],
)
def test_with_everything_read_nothing_is_wrong(config, folder):
    row = measured(captured(), parse_spec(config.format(repr(folder))))
    assert row["read"] == pytest.approx(1)
    assert row["recall"] == pytest.approx(1, abs=1e-5)
    assert row["error"] < 1e-5


def test_exact_top_k_finds_what_the_span_says():
    """One query head for each KV head, so that no query chooses for another."""
    seen = captured()
    seen = dataclasses.replace(seen, queries=seen.queries[::GROUP], queries_before=seen.queries_before[::GROUP])
    row = measured(seen, parse_spec("retrieval(top=20)"))
    assert row["head_recalls"] == pytest.approx(span(seen, CUT, 20)["top_shares"], rel=1e-5)
    assert row["read"] == pytest.approx(20 / row["past"])


@pytest.mark.parametrize("rope", [None, False, True])
@pytest.mark.parametrize("probes", [1, 3])
def test_reading_buckets_by_hand_gives_the_same_numbers(rope, probes, folder):
    """Head by head with `algorithms.saap`: the classifier where rope is None, centroids of both kinds otherwise."""
    seen, past = captured(), CUT.past(TOKENS)
    learnt = read_index(folder).layer(0)
    visible = torch.zeros(HEADS, 10, past.stop - past.start, dtype=torch.bool)
    for head in range(HEADS):
        keys, queries = (seen.keys, seen.queries) if rope else (seen.keys_before, seen.queries_before)
        centroids = (learnt.rotated_centroids if rope else learnt.centroids)[head]
        buckets = saap.assign(keys[head, past], centroids)
        first = None if rope is not None else learnt.first[head].T
        classifier = saap.QueryClassifier(
            first, learnt.first_bias[head, 0], learnt.second[head].T, learnt.second_bias[head, 0]
        )
        for query in range(10):
            group = queries[head * GROUP : (head + 1) * GROUP, TOKENS - 10 + query]
            scores = classifier.log_probabilities(group).exp() if rope is None else group @ centroids.T
            visible[head, query] = torch.isin(buckets, saap.visited(scores, probes))
    spec = f"saap(index={folder!r}, probes={probes})"
    if rope is not None:
        spec = f"kmeans(index={folder!r}, probes={probes}, rope={rope})"
    row = measured(seen, parse_spec(spec))
    wrong, exact, recall = by_hand(seen, visible, past)
    assert row["read"] == pytest.approx(float(visible.double().mean()))
    assert row["kv_head_reads"] == pytest.approx(visible.double().mean((1, 2)).tolist())
    assert row["mse"] == pytest.approx(float(wrong.square().mean()), rel=1e-4)
    assert row["error"] == pytest.approx(float(wrong.norm() / exact.norm()), rel=1e-4)
    assert row["head_mses"] == pytest.approx(wrong.square().mean((1, 2)).tolist(), rel=1e-4)
    assert row["head_errors"] == pytest.approx((wrong.norm(dim=(1, 2)) / exact.norm(dim=(1, 2))).tolist(), rel=1e-4)
    assert row["head_recalls"] == pytest.approx(recall.tolist(), rel=1e-4)


@pytest.mark.parametrize("kind", ["kdeformer", "reformer", "magicpig"])
def test_hashing_by_hand_gives_the_same_numbers(kind):
    seen, past = captured(), CUT.past(TOKENS)
    config = parse_spec(f"lsh(kind={kind!r}, bits=4, bins=6, tables=8)")
    case = case_of(seen, CUT)
    directions = filled(case, config).method.directions.drawn
    visible = torch.zeros(HEADS, 10, past.stop - past.start, dtype=torch.bool)
    for head in range(HEADS):
        for query_head in range(head * GROUP, (head + 1) * GROUP):  # a group reads what any of its queries finds
            asked = (seen.queries[query_head, -10:], seen.keys[head, past])
            drawn = directions[head].unflatten(0, (8, 4)) if kind == "magicpig" else directions[head]
            visible[head] |= lsh.magicpig(*asked, drawn) if kind == "magicpig" else getattr(lsh, kind)(*asked, drawn, 6)
    row = measured(seen, config, case)
    wrong, _, recall = by_hand(seen, visible, past)
    assert row["read"] == pytest.approx(float(visible.double().mean()))
    assert row["mse"] == pytest.approx(float(wrong.square().mean()), rel=1e-4)
    assert row["head_recalls"] == pytest.approx(recall.tolist(), rel=1e-4)


def seen_at_random(case, seed):
    """Which tokens [h, q, n] the queries read."""
    lanes = filled(case, RandomTokens(top=20, seed=seed))
    (store,) = (bundle.holding for bundle in lanes.bundles)
    return store.index.visible(store, lanes.method.ask(case.query, HEADS)[0])


def test_random_tokens_are_as_many_as_asked_for_and_others_for_every_query_head_and_seed():
    case = case_of(captured(), CUT)
    visible = seen_at_random(case, 0)
    assert visible.shape == (HEADS, 10, case.count)
    assert torch.equal(visible.sum(2), torch.full((HEADS, 10), 20))
    assert len({tuple(line.tolist()) for line in visible.flatten(0, 1)}) == HEADS * 10
    assert not torch.equal(visible, seen_at_random(case, 1))
    # Every token is as likely: over 200 seeds, within four standard errors.
    rates = torch.stack([seen_at_random(case, seed) for seed in range(200)]).double().mean((0, 1, 2))
    share = 20 / case.count
    assert float((rates - share).abs().max()) < 4.5 * math.sqrt(share * (1 - share) / (200 * HEADS * 10))


def test_errors_fall_and_recall_grows_with_what_is_read(folder):
    """Keys in clusters, before rotation as after it; queries near them, and an index of their centres."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(BUCKETS, WIDTH, generator=generator), dim=1) * 4
    of_keys = torch.randint(0, BUCKETS, (HEADS, TOKENS), generator=generator)
    of_queries = torch.randint(0, BUCKETS, (HEADS, 1, TOKENS), generator=generator).expand(-1, GROUP, -1).flatten(0, 1)
    keys = centres[of_keys] + 0.3 * torch.randn(HEADS, TOKENS, WIDTH, generator=generator)
    queries = centres[of_queries] + 0.3 * torch.randn(HEADS * GROUP, TOKENS, WIDTH, generator=generator)
    seen = dataclasses.replace(captured(), keys=keys, keys_before=keys, queries=queries, queries_before=queries)
    learnt = read_index(folder).layer(0)
    centroids = torch.nn.functional.normalize(centres, dim=1).expand(HEADS, -1, -1)
    learnt.centroids.copy_(centroids)
    found = dict[int, dict]()
    for probes in (1, 2, 4, 8):
        config = parse_spec(f"kmeans(index={folder!r}, probes={probes})")
        config.__dict__["learnt"] = index_with(folder, learnt)
        found[probes] = measured(seen, config)
    for fewer, more in ((1, 2), (2, 4), (4, 8)):
        assert found[fewer]["read"] < found[more]["read"]
        assert found[fewer]["recall"] < found[more]["recall"]
        assert found[fewer]["mse"] > found[more]["mse"]
    assert found[1]["recall"] > 0.9  # its own cluster is nearly all a query looks at
    assert found[1]["read"] < 0.25


def index_with(folder, learnt):
    index = read_index(folder)
    index._layers[0, "cpu", torch.float32] = learnt
    return index


def test_numbers_of_half_precision_are_computed_in_full():
    seen = captured()
    half = {
        name: getattr(seen, name).bfloat16() for name in ("queries", "keys", "values", "keys_before", "queries_before")
    }
    row = measured(dataclasses.replace(seen, **half), parse_spec("retrieval(top=1000)"))
    assert row["error"] < 1e-6


# -- what is asked for


def test_every_method_has_its_knob_at_every_rate(folder):
    trials = study(folder, rates=(0.5, 0.25, 0.01), tables=(3, 5)).trials(past=160)
    knobs = {method: [(t.knob, t.aim, t.seed) for t in trials if t.method == method] for method in METHODS}
    assert trials[0] == Trial(WINDOW_ALONE)
    assert knobs["saap"] == knobs["kmeans"] == [(4, 0.5, None), (2, 0.25, None), (1, 0.01, None)]
    assert knobs["lsh(kind='reformer')"] == [
        (bins, aim, seed) for bins, aim in ((2, 0.5), (4, 0.25), (100, 0.01)) for seed in (0, 1)
    ]
    assert knobs["lsh(kind='magicpig')"] == [(tables, None, seed) for tables in (3, 5) for seed in (0, 1)]
    assert knobs["random_buckets"] == [
        (probes, aim, seed) for probes, aim in ((4, 0.5), (2, 0.25), (1, 0.01)) for seed in (0, 1)
    ]
    assert knobs["retrieval"] == [(80, 0.5, None), (40, 0.25, None), (2, 0.01, None)]
    assert {t.buckets for t in trials if t.method in ("saap", "kmeans", "random_buckets")} == {BUCKETS}
    assert all(t.config.probes == t.knob for t in trials if t.method == "saap")


def test_settings_that_come_to_the_same_are_measured_once(folder):
    trials = study(folder, methods=["kmeans"], rates=(0.1, 0.05, 0.01)).trials(past=160)
    assert [trial.knob for trial in trials] == [0, 1]


def test_a_method_is_measured_with_every_index(folder, tmp_path):
    other = make_index(tmp_path / "fine", heads=HEADS, width=WIDTH, buckets=16)
    indexes = [read_index(folder), read_index(other)]
    trials = study(folder, indexes=indexes, methods=["kmeans", "random_buckets"], rates=(0.5,), seeds=1).trials(160)
    assert [(t.method, t.index, t.knob) for t in trials[1:]] == [
        ("kmeans", index_name(indexes[0]), 4),
        ("kmeans", index_name(indexes[1]), 8),
        ("random_buckets", index_name(indexes[0]), 4),  # as many as the first index has
    ]


def test_names_say_what_makes_another_method(folder):
    methods = ("saap(estimate=True)", "lsh(bits=12)", "random_buckets(buckets=5)")
    trials = study(folder, methods=methods, rates=(0.5,), seeds=1).trials(160)
    assert [t.method for t in trials[1:]] == [
        "saap(estimate=True)",
        "lsh(kind='kdeformer', bits=12)",
        "random_buckets(buckets=5)",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ()}, "the study has no methods: name at least one"),
        ({"rates": (1.5,)}, "a rate is the share of the past that is read, above 0 and up to 1, got 1.5"),
        ({"rates": (math.nan,)}, "a rate is the share .* got nan"),
        ({"tables": (0,)}, "tables must be a whole number of at least 1, got 0"),
        ({"seeds": 0}, "seeds must be a whole number of at least 1, got 0"),
        ({"methods": ("uniform",)}, "uniform looks nothing up. Methods that do: saap, kmeans, lsh, .*, random_tokens"),
        ({"methods": ("kmens",)}, "did you mean kmeans"),
        ({"methods": ("kmeans(probes=3)",)}, r"the study sets probes itself: leave it out of 'kmeans\(probes=3\)'"),
        ({"methods": ("saap(window=3, sinks=1)",)}, "the study sets window, sinks itself"),
        ({"methods": ("kmeans", "kmeans(rope=False)")}, "kmeans is named twice: give each method once"),
    ],
)
def test_studies_that_cannot_be_are_refused(changes, message, folder):
    with pytest.raises(ValueError, match=message):
        study(folder, **changes)


# -- the study of a model


def asked_of(folder, **changes):
    given = {
        "study": study(folder, methods=("kmeans", "retrieval"), rates=(0.5, 0.25)),
        "prompts": [text(150), text(140, 1)],
        "training": [text(130, 2), text(130, 3)],
        "layers": [1, 2],
        "heads": [(2, 5)],
        "top": 7,
    }
    return Asked(**(given | changes))


@pytest.fixture
def of_model(tmp_path):
    model = zoo.build("llama")
    return model, make_index(tmp_path / "index", model, buckets=BUCKETS)


def test_the_study_settles_all_it_announces_and_its_rows_can_be_read(of_model, tmp_path):
    model, folder = of_model
    asked, files = asked_of(folder), Files(tmp_path, TINY)
    steps = list(run(model, asked, files))
    assert sum(settled for _, settled in steps) == asked.total == 2 * 2 * (1 + 2 + 2) + 2 * 2 * 2 + 1
    rows = files.rows(asked)
    counts = {"lookups": 20, "spans": 4, "spreads": 1, "separations": 4, "sizes": 4}
    assert {part: len(found) for part, found in rows.items()} == counts
    assert {row["rotated"] for row in rows["sizes"]} == {False, True}
    assert (rows["spreads"][0]["layer"], rows["spreads"][0]["head"]) == (2, 5)
    for part, found in rows.items():
        assert all(name in row for row in found for name in KEYS[part])
        json.dumps(found, allow_nan=False)


def test_a_second_run_measures_nothing_and_a_larger_one_only_what_is_new(of_model, tmp_path):
    model, folder = of_model
    asked = asked_of(folder)
    list(run(model, asked, Files(tmp_path, TINY)))
    written = {part: (tmp_path / f"{part}.jsonl").read_bytes() for part in KEYS}
    assert [step for step in run(model, asked, Files(tmp_path, TINY)) if step[0] != "reading"] == []
    assert written == {part: (tmp_path / f"{part}.jsonl").read_bytes() for part in KEYS}
    more = asked_of(folder, study=study(folder, methods=("kmeans", "retrieval"), rates=(0.5, 0.25, 0.125)))
    files = Files(tmp_path, TINY)
    assert len([step for step in run(model, more, files) if step[0] != "reading"]) == 2 * 2 * 2
    assert len(files.rows(asked)["lookups"]) == 20
    assert len(files.rows(more)["lookups"]) == 28


def test_without_training_texts_there_are_no_sizes(of_model, tmp_path):
    model, folder = of_model
    asked, files = asked_of(folder, training=[]), Files(tmp_path, TINY)
    list(run(model, asked, files))
    assert files.rows(asked)["sizes"] == []


def test_rows_of_a_run_are_those_of_one_layer_by_itself(of_model, tmp_path):
    """The study adds nothing to `measure`: a row is that of the captured layer."""
    from kvsketch.huggingface.capture import capture

    model, folder = of_model
    asked, files = asked_of(folder), Files(tmp_path, TINY)
    list(run(model, asked, files))
    (seen,) = capture(model, asked.prompts[1].ids, [2], before_rotation=True)
    for trial in asked.study.trials(asked.study.past(asked.prompts[1])):
        labels = asked.study.labels(asked.prompts[1], 2, trial)
        (row,) = [row for row in files.rows(asked)["lookups"] if key_of(row, KEY) == key_of(labels, KEY)]
        assert row == json.loads(json.dumps(labels | measure(case_of(seen, CUT), trial)))


# -- what is said of the rows


def a_row(method="kmeans", aim=0.5, read=0.5, error=0.1, **changes):
    row = {"layer": 0, "method": method, "index": "a#1", "knob": 4, "aim": aim, "read": read, "mse": error**2}
    return row | {"error": error, "recall": 1 - error, "buckets": 8} | changes


def test_points_are_means_over_texts_and_seeds_of_one_aim():
    rows = [
        a_row(method="retrieval", index=None, knob=knob, read=read, error=error)
        for knob, read, error in ((80, 0.5, 0.1), (90, 0.52, 0.3))
    ]
    rows += [a_row(aim=0.1, read=0.08), a_row(aim=0.5, read=0.6), a_row(aim=0.5, read=0.5, index="b#2", buckets=16)]
    curves = summarise(rows)
    (point,) = curves[0, "retrieval", None]
    assert dataclasses.astuple(point) == pytest.approx((0.51, 0.05, 0.2, 0.8, 80, 8))
    assert [point.read for point in curves[0, "kmeans", "a#1"]] == [0.08, 0.6]
    assert set(with_first_index(curves, ["a#1", "b#2"])) == {(0, "retrieval", None), (0, "kmeans", "a#1")}


def test_between_two_settings_numbers_lie_on_a_line_over_the_logarithm():
    points = summarise([a_row(aim=a, read=a, error=e) for a, e in ((0.1, 0.4), (0.4, 0.2))])[0, "kmeans", "a#1"]
    assert at_read(points, 0.1, "error") == pytest.approx(0.4)
    assert at_read(points, 0.2, "error") == pytest.approx(0.3)
    assert at_read(points, 0.4, "recall") == pytest.approx(0.8)
    assert at_read(points, 0.05, "error") is None
    assert at_read(points, 0.5, "error") is None


def test_tables_and_pictures_show_every_method(of_model, tmp_path):
    model, folder = of_model
    fine = make_index(tmp_path / "fine", model, buckets=16)
    both = [read_index(folder), read_index(fine)]
    asked = asked_of(
        folder, study=study(folder, methods=METHODS, indexes=both, rates=(0.5, 0.1), tables=(20,), seeds=1)
    )
    files = Files(tmp_path, TINY)
    list(run(model, asked, files))
    rows, names = files.rows(asked), [index_name(index) for index in both]
    console = Console(file=io.StringIO(), width=120)
    for table in tables(rows, names):
        console.print(table)
    said = console.file.getvalue()
    for line in (
        "layer 1: relative error where",
        "layer 2: recall of the attention",
        "top 7",
        "1, 16, before",
        "2, 8, after",
    ):
        assert line in said
    assert all(label(method) in said for method in (*METHODS, WINDOW_ALONE))
    panels = pictures.lookups_picture(rows["lookups"], names).axes
    assert [axes.get_title(loc="left") for axes in panels] == ["layer 1", "layer 2"]
    drawn = {line.get_label() for line in panels[0].lines}
    assert drawn == {label(method) for method in (*METHODS, WINDOW_ALONE)}
    kmeans = next(line for line in panels[1].lines if line.get_label() == label("kmeans"))
    points = summarise(rows["lookups"])[2, "kmeans", names[0]]
    assert kmeans.get_xdata() == pytest.approx([point.read for point in points])
    assert kmeans.get_ydata() == pytest.approx([point.mse for point in points])
    panels = pictures.buckets_picture(rows["lookups"]).axes
    assert [axes.get_title(loc="left") for axes in panels[:2]] == ["layer 1, Saap", "layer 2, Saap"]
    assert {line.get_label() for line in panels[0].lines} == {"8 buckets", "16 buckets"}


def test_a_layer_without_errors_says_so():
    rows = [a_row(error=0.0), a_row(aim=0.1, read=0.1, error=0.0), a_row(layer=1)]
    exact, other = pictures.lookups_picture(rows, ["a#1"]).axes
    assert "no error" in exact.texts[0].get_text()
    assert other.get_yscale() == "log"
    assert not other.texts


# -- the command


def called(*arguments):
    return command(*arguments, main=main)


SHORT = ("--tokens", 500, "--window", 100, "--layers", "1,2", "--rates", "0.5,0.1")


def test_the_command_makes_its_own_buckets_prints_tables_and_draws(tmp_path):
    options = ["--prompts", 2, "--buckets", "16,32", "--seeds", 1, "--tables", "2,20", "--heads", "1:3,2:0"]
    done = called(*SHORT, *options, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "saap is left out" in done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    pictures = {
        "selectivity.png",
        "recall.png",
        "buckets.png",
        "spans.png",
        "spreads.png",
        "separations.png",
        "sizes.png",
    }
    assert names == {f"{part}.jsonl" for part in KEYS} | pictures | {"kmeans-16", "kmeans-32"}
    for line in (
        "k-means before rotation",
        "MagicPIG",
        "layer 2: recall",
        "top 256",
        "told apart, after",
        "1, 32, after",
    ):
        assert line in done.stdout
    runs, rows = read_rows(tmp_path / "out" / "lookups.jsonl", KEY)
    assert runs[0]["model"] == "embedded"
    # window alone, two k-means with two indexes, two LSH, magicpig, random buckets and tokens, top-k: two settings each
    assert len(rows) == 2 * 2 * (1 + 2 * 2 * 2 + 2 * 2 + 2 + 2 + 2 + 2)
    assert {row["window"] for row in rows} == {100}
    assert len(read_rows(tmp_path / "out" / "spreads.jsonl", KEYS["spreads"])[1]) == 2


def test_the_command_takes_indexes_and_files(tmp_path):
    from kvsketch.evaluation.embedded import load_embedded

    model, _ = load_embedded()
    index = make_index(tmp_path / "index", model, heads=4, width=64, buckets=16)
    book = tmp_path / "book.txt"
    book.write_text("It was a bright cold day in April, and the clocks were striking. " * 40)
    options = ["--prompt-file", book, "--methods", "saap; kmeans", "--index", index, "--out", tmp_path / "out"]
    done = called(*SHORT, *options)
    assert done.returncode == 0, done.stderr
    assert "no deviations of bucket sizes: they need the texts of the index (--train-file)" in done.stderr
    assert "Saap" in done.stdout
    assert not (tmp_path / "out" / "sizes.png").exists()
    again = called(*SHORT, *options, "--train-file", book)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "out" / "sizes.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", "2"], "a rate is the share of the past that is read"),
        (["--buckets", 0], "buckets must be a whole number of at least 1, got 0"),
        (["--tables", 10**9], "tables must be at most 65,536"),
        (["--heads", "2"], "--heads must be such as 2:0, a layer and one of its query"),
        (["--heads", "9:0"], "--heads 9:0 is not there: layers [0, 1, 2, 3] are read"),
        (["--methods", "saap"], "saap looks things up by an index: give one with --index"),
        (["--index", "nowhere"], "nowhere is no index: it has no index.json"),
        (["--index", "x", "--buckets", "8"], "give --index or --buckets"),
        (["--window", 9000], "the study needs at least 9,097: 1 first ones, a window of"),
        (["--prompt-file", "{book}"], "buckets are made of other texts: name some with"),
        ([*SHORT, "--buckets", "90000"], "90000 buckets need as many keys, the texts have"),
    ],
)
def test_a_study_that_cannot_be_ends_with_one_line(arguments, message, tmp_path):
    (tmp_path / "book.txt").write_text("It was a bright cold day in April, and the clocks were striking. " * 40)
    filled = [str(argument).format(book=tmp_path / "book.txt") for argument in arguments]
    refused(called("--out", tmp_path / "out", *filled), message)
    assert not (tmp_path / "out").exists()
