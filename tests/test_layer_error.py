"""The study of layers: what it holds and asks, that it goes on, and what it says of its rows."""

import dataclasses
import io
import math
import statistics

import pytest
import torch
from rich.console import Console

import zoo
from commands import refused
from commands import run as command
from kvsketch.attention import exact_attention, weighted_attention
from kvsketch.caches.core.layer import LayerCache
from kvsketch.cli.bench_error_tables import tables
from kvsketch.evaluation.layers import pictures
from kvsketch.evaluation.layers.error import NORMS_KEY, cut, measure, norms_row, run
from kvsketch.evaluation.layers.plan import KEY, Prompt, Study, middle_of
from kvsketch.evaluation.layers.summary import compare, pool_norms, rate_name, summarise
from kvsketch.evaluation.results.rows import RowsFile, key_of, read_rows
from kvsketch.huggingface.capture import Captured, capture
from lanes import entries_of

METHODS = ("balancekv", "uniform", "uniform(weights='none')", "streaming_llm", "clustergen", "subgen")
# SubGen's entries have a key or a value less: it counts them by their bytes. BalanceKV's levels may leave a few free.
ENTRIES_ALONE = METHODS[1:-1]
EXACT = 32
TOKENS = 2 * EXACT + 1 + 256 + 7  # 256 in the middle, and 7 too many
TINY = {"model": "tiny", "fingerprint": "1", "dtype": "float32", "kvsketch": "0.1.0"}
HEADS, GROUP, WIDTH = 2, 3, 8


def captured(tokens=TOKENS, layer=0, seed=0, softcap=None):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(HEADS * GROUP, tokens, WIDTH, generator=generator)
    keys, values = torch.randn(2, HEADS, tokens, WIDTH, generator=generator)
    return Captured(layer, queries, keys, values, 0.5, softcap)


def study(**changes):
    given = {"methods": METHODS, "rates": (0.5, 0.25), "blocks": (32, 64), "seeds": 2, "exact": EXACT}
    return Study(**(given | changes))


def one(spec, rate):
    """The only trial of a study of one method."""
    (trial,) = study(methods=(spec,), rates=(rate,), blocks=(64,), seeds=1).trials
    return trial


def held_by(case, trial):
    cache = LayerCache(trial.with_budget(case.middle, case.exact), case.layer)
    cache.hold(case.context)
    return cache


# -- what is measured


@pytest.mark.parametrize("rate", [0.5, 0.25, 0.125])
@pytest.mark.parametrize("spec", METHODS)
def test_all_methods_hold_what_the_rate_says(spec, rate):
    case = cut(captured(), EXACT)
    assert case.middle == 256
    cache = held_by(case, one(spec, rate))
    allowed = EXACT + 1 + rate * 256
    entries = measure(case, one(spec, rate))["entries"]
    assert entries == int(cache.count_entries().max())
    if spec in ENTRIES_ALONE:
        assert entries == allowed
    else:
        assert 0.8 * allowed < entries <= allowed
    ranks = cache.window.columns.ranks[0].tolist()
    if spec != "streaming_llm":  # its window is what it holds
        assert ranks == [*range(EXACT), EXACT + 256]


@pytest.mark.parametrize("tokens", [2 * EXACT + 64, 2 * EXACT + 65, 400, 431, 432])
def test_the_middle_is_all_but_a_block_of_what_lies_between(tokens):
    seen = captured(tokens, layer=3)
    case = cut(seen, EXACT)
    assert case.layer == 3
    assert case.middle == middle_of(tokens, EXACT)
    assert 0 <= tokens - 2 * EXACT - 1 - case.middle < 32
    assert torch.equal(case.context.keys[0, :, :EXACT], seen.keys[:, :EXACT])
    assert torch.equal(case.context.keys[0, :, EXACT:], seen.keys[:, -EXACT - 1 - case.middle : -EXACT])
    assert torch.equal(case.last.values[0], seen.values[:, -EXACT:])
    assert torch.equal(case.queries[0], seen.queries[:, -EXACT:])


@pytest.mark.parametrize("spec", METHODS)
def test_with_everything_kept_nothing_is_wrong(spec):
    case = cut(captured(), EXACT)
    row = measure(case, one(spec, 1.0))
    assert row["entries"] == 2 * EXACT + 1 + 256 - EXACT
    assert row["error"] < 1e-5
    assert measure(case, one(spec, 0.25))["error"] > 1e-3


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_exact_answers_are_those_of_the_definition(softcap):
    """All tokens but those left out, each query seeing those up to itself."""
    seen = captured(softcap=softcap)
    case = cut(seen, EXACT)
    used = [*range(EXACT), *range(TOKENS - EXACT - 1 - 256, TOKENS)]
    at = torch.tensor(used)
    visible = (torch.arange(TOKENS - EXACT, TOKENS)[:, None] >= at)[None, None]
    expected = exact_attention(
        case.queries, seen.keys[None, :, at], seen.values[None, :, at], seen.scale, visible=visible, softcap=softcap
    )
    torch.testing.assert_close(case.answers, expected.out[0])


def test_the_error_is_that_of_the_entries_by_hand():
    """Weighted entries and the last tokens in one sum, and the norms of what differs."""
    case, trial = cut(captured(), EXACT), one("uniform", 0.25)
    past = entries_of(held_by(case, trial).past)
    sinks_and_one = [*range(EXACT), EXACT + 256]
    keys = torch.cat([past.keys, case.context.keys[:, :, sinks_and_one], case.last.keys], 2)
    values = torch.cat([past.values, case.context.values[:, :, sinks_and_one], case.last.values], 2)
    before = past.count + EXACT + 1
    weights = torch.cat([past.log_mass, torch.zeros(1, HEADS, 2 * EXACT + 1)], 2)
    order = torch.arange(before + EXACT)
    visible = (order <= before + torch.arange(EXACT)[:, None])[None, None]
    tokens = dataclasses.replace(past, keys=keys, values=values, log_mass=weights)
    wrong = weighted_attention(case.queries, tokens, 0.5, visible=visible).out[0] - case.answers
    row = measure(case, trial)
    assert row["error"] == pytest.approx(float(wrong.norm() / case.answers.norm()), rel=1e-4)
    heads = [float(w.norm() / a.norm()) for w, a in zip(wrong, case.answers, strict=True)]
    assert row["head_errors"] == pytest.approx(heads, rel=1e-4)
    assert len(heads) == HEADS * GROUP
    assert row["nbytes"] == held_by(case, trial).nbytes


@pytest.mark.parametrize("spec", METHODS)
def test_queries_do_not_see_what_comes_after_them(spec):
    seen = captured()
    values = seen.values.clone()
    values[:, -1] += 100
    answers = []
    for case in (cut(seen, EXACT), cut(dataclasses.replace(seen, values=values), EXACT)):
        cache = held_by(case, one(spec, 0.25))
        cache.recording = True
        answers.append((case.answers, cache.read(case.queries, case.last, case.scale).out[0]))
    for before, after in zip(*answers, strict=True):
        assert torch.equal(before[:, :-1], after[:, :-1])
        assert not torch.allclose(before[:, -1], after[:, -1])


def test_a_seed_and_a_block_make_another_error_and_the_same_ones_do_not():
    case = cut(captured(), EXACT)
    errors = {
        (trial.block, trial.seed): measure(case, trial)["error"]
        for trial in study(methods=("balancekv",), rates=(0.25,)).trials
    }
    assert list(errors) == [(32, 0), (32, 1), (64, 0), (64, 1)]
    assert len(set(errors.values())) == 4
    again = study(methods=("balancekv(block=32)",), rates=(0.25,)).trials
    assert [measure(case, trial)["error"] for trial in again] == [errors[32, 0], errors[32, 1]]


def test_what_is_swept_and_what_is_not():
    trials = study(methods=(*METHODS, "uniform(seed=7)"), rates=(0.5,)).trials
    found = [(trial.method, trial.block, trial.seed) for trial in trials]
    assert found == [
        *(("balancekv", block, seed) for block in (32, 64) for seed in (0, 1)),
        *(("uniform", None, seed) for seed in (0, 1)),
        *(("uniform(weights='none')", None, seed) for seed in (0, 1)),
        ("streaming_llm", None, None),
        ("clustergen", None, None),
        *(("subgen", None, seed) for seed in (0, 1)),
        *(("uniform", None, seed) for seed in (7, 8)),
    ]


def test_norms_are_those_of_all_heads_and_tokens():
    seen = [captured(layer=0), captured(layer=1, seed=1)]
    prompt = Prompt("a", torch.zeros(1, TOKENS, dtype=torch.long))
    pooled = pool_norms([norms_row(prompt, layer) for layer in seen])
    queries = torch.cat([layer.queries.norm(dim=2).flatten() for layer in seen])
    keys = torch.cat([(layer.keys - layer.keys.mean(1, keepdim=True)).norm(dim=2).flatten() for layer in seen])
    for name, norms in (("queries", queries), ("keys", keys)):
        assert pooled[name].mean == pytest.approx(float(norms.mean()), rel=1e-5)
        half = 1.96 * float(norms.std(correction=0)) / math.sqrt(len(norms))
        assert pooled[name].half_width == pytest.approx(half, rel=1e-4)


# -- going on


def tiny_run(folder, model, layers=(0, 2), **changes):
    prompts = [Prompt(f"p{seed}", zoo.tokens(1, 200, seed)) for seed in (1, 2)]
    errors = RowsFile(folder / "error.jsonl", TINY, KEY)
    norms = RowsFile(folder / "norms.jsonl", TINY, NORMS_KEY)
    given = {"methods": METHODS[:3], "rates": (0.5,), "blocks": (32,)}
    return run(model, prompts, layers, study(**(given | changes)), errors, norms)


def rows_in(folder):
    """Without what differs from run to run."""
    _, rows = read_rows(folder / "error.jsonl", KEY)
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.mark.parametrize("stop", [1, 2, 8, 9, 15])
def test_a_study_goes_on_where_it_stopped(stop, tmp_path):
    model = zoo.build("llama")
    total = sum(settled for _, settled in tiny_run(tmp_path / "whole", model))
    assert total == 2 * 2 * 6 == len(rows_in(tmp_path / "whole"))
    for number, _ in enumerate(tiny_run(tmp_path / "parts", model)):
        if number == stop:
            break
    made = len(rows_in(tmp_path / "parts"))
    assert 0 < made < total
    assert sum(settled for _, settled in tiny_run(tmp_path / "parts", model)) == total
    assert rows_in(tmp_path / "parts") == rows_in(tmp_path / "whole")
    _, norms = read_rows(tmp_path / "parts" / "norms.jsonl", NORMS_KEY)
    assert [(row["prompt"], row["layer"]) for row in norms] == [("p1", 0), ("p1", 2), ("p2", 0), ("p2", 2)]


def test_rows_are_those_of_the_layers_captured(tmp_path):
    model = zoo.build("llama")
    assert sum(settled for _, settled in tiny_run(tmp_path, model, methods=("uniform",))) == 8
    seen = {layer.layer: layer for layer in capture(model, zoo.tokens(1, 200, 1))}
    (trial, _) = study(methods=("uniform",), rates=(0.5,)).trials
    expected = measure(cut(seen[2], EXACT), trial)["error"]
    labels = study().labels(Prompt("p1", zoo.tokens(1, 200, 1)), 2, trial)
    assert [row["error"] for row in rows_in(tmp_path) if key_of(row, KEY) == key_of(labels, KEY)] == [expected]


# -- what rows say


def row(error, method="uniform", **changes):
    made = {"prompt": "a", "tokens": 500, "layer": 0, "method": method, "rate": 0.5, "block": None, "seed": 0}
    return made | {"exact": EXACT, "error": error, "seconds": 0.5} | changes


def test_deviations_are_over_seeds_of_means_over_prompts():
    rows = [row(0.1 * seed + shift, seed=seed, prompt=str(shift)) for seed in (1, 2, 4) for shift in (0.0, 0.02)]
    (errors,) = summarise(rows).values()
    assert errors.mean == pytest.approx(statistics.fmean(r["error"] for r in rows))
    assert errors.deviation == pytest.approx(statistics.stdev([0.11, 0.21, 0.41]))
    (alone,) = summarise([row(0.1, seed=None), row(0.3, seed=None, prompt="b")]).values()
    assert (alone.mean, alone.deviation, str(alone)) == (pytest.approx(0.2), None, "0.200")


def test_ratios_are_over_pairs():
    """Prompts may be ten times as hard as others: the ratio is the same, and its interval narrow."""
    hard = {"a": 0.01, "b": 0.1, "c": 1.0}
    rows = [row(error, prompt=name) for name, error in hard.items()]
    rows += [row(0.8 * error, "balancekv", block=64, prompt=name) for name, error in hard.items()]
    rows += [row(0.5, "balancekv", block=64, prompt="alone"), row(1e-7, rate=1.0), row(0.0, "balancekv", rate=1.0)]
    ((place, ratio),) = compare(rows, "balancekv", "uniform").items()
    assert place == (0, ("balancekv", 64), 0.5)
    assert (ratio.mean, ratio.low, ratio.high) == (pytest.approx(0.8), pytest.approx(0.8), pytest.approx(0.8))
    assert ratio.pairs == 3
    two = [row(0.1), row(0.1, seed=1), row(0.05, "balancekv"), row(0.2, "balancekv", seed=1)]
    (even,) = compare(two, "balancekv", "uniform").values()
    assert even.mean == pytest.approx(1.0)
    assert math.log(even.high) == pytest.approx(1.96 * statistics.stdev([-math.log(2), math.log(2)]) / math.sqrt(2))
    assert even.low == pytest.approx(1 / even.high)
    (single,) = compare(two[::2], "balancekv", "uniform").values()
    assert str(single) == "0.500"


def test_rates_are_written_as_people_do():
    assert [rate_name(rate) for rate in (0.5, 0.0625, 1.0, 0.3)] == ["1/2", "1/16", "1", "0.3"]


def some_rows():
    rates, layers = (0.25, 0.5), (0, 3)
    rows = [row(0.1 + layer / 10 + rate, layer=layer, rate=rate) for layer in layers for rate in rates]
    for block in (64, 128):
        rows += [
            row(rate / block, "balancekv", layer=layer, rate=rate, block=block, seed=seed, seconds=block / 1000)
            for layer in layers
            for rate in rates
            for seed in (0, 1)
        ]
    return rows


def test_the_picture_of_errors_has_a_panel_for_each_layer_and_a_curve_for_each_method():
    figure = pictures.errors_picture(some_rows())
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["layer 0", "layer 3"]
    uniform, balanced = (container.lines[0] for container in figure.axes[1].containers)
    assert list(uniform.get_ydata()) == pytest.approx([0.9, 0.65])
    assert list(balanced.get_ydata()) == pytest.approx([0.5 / 128, 0.25 / 128])  # the largest block
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["1/2", "1/4"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["uniform", "balancekv, block 128"]


def test_estimates_that_explode_are_told_and_do_not_hide_the_rest():
    rows = [row(error, "subgen", seed=seed) for seed, error in enumerate((math.inf, 1e12))]
    rows += [row(0.2, seed=seed) for seed in (0, 1)]
    assert [str(errors) for errors in summarise(rows).values()] == ["inf ± nan", "0.200 ± 0.000"]
    assert str(next(iter(summarise(rows[1:2]).values()))) == "1.0e+12"
    (ratio,) = compare(rows, "subgen", "uniform").values()
    assert str(ratio) == "inf [nan, nan]"
    figure = pictures.errors_picture(rows)
    assert figure.axes[0].get_ylim()[1] <= pictures.HIGHEST


def test_the_picture_of_blocks_has_times_and_errors_with_numbers():
    figure = pictures.blocks_picture(some_rows())
    assert len(figure.axes) == 4
    times, errors = figure.axes[:2]
    assert [text.get_text() for text in times.texts] == ["64", "64", "128", "128"]
    assert [text.get_text() for text in errors.texts] == [f"{rate / b:.3g}" for b in (64, 128) for rate in (0.5, 0.25)]
    assert [label.get_text() for label in errors.get_yticklabels()] == ["64", "128"]


def test_tables_show_errors_times_ratios_and_norms():
    prompt = Prompt("a#123", torch.zeros(1, TOKENS, dtype=torch.long))
    console = Console(width=80, file=io.StringIO())
    for table in tables(some_rows(), [norms_row(prompt, captured())]):
        console.print(table)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]
    errors = lines.index("layer 3: relative error ± standard deviation over seeds")
    assert lines[errors + 1].split() == ["method", "1/2", "1/4"]
    assert lines[errors + 2].split() == ["uniform", "0.900", "0.650"]
    assert lines[errors + 3] == "balancekv, block 64  0.008 ± 0.000 0.004 ± 0.000"
    times = lines.index("layer 3: milliseconds to compress, median")
    assert lines[times + 4].split() == ["balancekv,", "block", "128", "128.0", "128.0"]
    ratios = lines.index("layer 3: error of balancekv / of uniform [95 % interval¹]")
    assert lines[ratios + 1] == "rate block 64 block 128"
    assert lines[ratios + 2].split() == ["1/2", f"{0.5 / 64 / 0.9:.3f}", f"{0.5 / 128 / 0.9:.3f}"]
    assert lines[-1].startswith("a, 328 tokens")


# -- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rates": (0.5, 1.5)}, "a rate is the share of tokens that is kept, above 0 and up to 1, got 1.5"),
        ({"rates": (0.0,)}, "a rate is the share .* got 0"),
        ({"rates": (math.nan,)}, "a rate is the share .* got nan"),
        ({"rates": ()}, "the study has no rates: name at least one"),
        ({"methods": ()}, "the study has no methods"),
        ({"methods": ("unifrm",)}, "did you mean uniform"),
        (
            {"methods": ("uniform(keep=0.25)",)},
            r"the study sets keep itself, .* leave it out of 'uniform\(keep=0.25\)'",
        ),
        ({"methods": ("balancekv(sinks=4, window=8)",)}, "the study sets sinks, window itself"),
        ({"methods": ("exact",)}, "exact keeps every token: its errors would be 0. Methods that drop: streaming_llm"),
        ({"methods": ("snapkv",)}, "snapkv goes by queries, and the study gives a cache keys and values alone"),
        ({"methods": ("uniform", "uniform(seed=1)")}, "uniform at rate 0.5 is named twice"),
        ({"methods": ("balancekv", "balancekv(block=64)")}, "balancekv at rate 0.5 is named twice"),
        ({"blocks": (100,)}, "block must be a power of two, got 100"),
        ({"blocks": (8,)}, "block must be a whole number of at least 32, got 8"),
        ({"blocks": ()}, "balancekv halves blocks: name at least one size"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"exact": 0}, "exact must be at least 1, got 0"),
    ],
)
def test_studies_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        study(**changes)


def test_texts_that_are_too_short_are_refused():
    small = study(rates=(0.25,))
    small.check_text("book", 2 * EXACT + 1 + 128)
    with pytest.raises(
        ValueError, match="book has 127 tokens; the study keeps 32 at either end and needs at least 128"
    ):
        small.check_text("book", 127)
    with pytest.raises(
        ValueError, match=r"rate 0\.25 of the 32 tokens .* is 0 entries, but balancekv needs at least 32"
    ):
        small.check_text("book", 128)
    samples = study(methods=("subgen(s=64)",), rates=(0.25,))
    with pytest.raises(ValueError, match=r"is 64 entries, but subgen\(s=64\) needs at least 96: give a longer text"):
        samples.check_text("book", TOKENS)
    samples.check_text("book", 2 * EXACT + 1 + 384)


# -- the command


def called(*arguments):
    return command("bench", "error", *arguments)


def test_the_command_prints_tables_and_draws(tmp_path):
    (tmp_path / "book.txt").write_text("It was a bright cold day in April, and the clocks were striking. " * 40)
    options = ["--exact", 64, "--rates", "0.5,0.25", "--seeds", 2, "--blocks", "32,64", "--layers", "1,2"]
    done = called("--prompt-file", tmp_path / "book.txt", "--tokens", 400, "--out", tmp_path / "out", *options)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "error.jsonl",
        "norms.jsonl",
        "error.png",
        "blocks.png",
    }
    for line in (
        "layer 2: relative error",
        "balancekv, block 64",
        "layer 1: error of balancekv / of uniform",
        "book.txt",
    ):
        assert line in done.stdout
    runs, rows = read_rows(tmp_path / "out" / "error.jsonl", KEY)
    assert runs[0]["model"] == "embedded"
    assert len(rows) == 2 * 2 * (4 + 4 + 2 + 2 + 1 + 1 + 2)
    assert {row["tokens"] for row in rows} == {400}
    assert {row["prompt"].split("#")[0] for row in rows} == {"book.txt"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", ""], "--rates must be numbers with commas between them, got ''"),
        (["--rates", "2"], "a rate is the share of tokens that is kept, above 0 and up to 1, got 2"),
        (["--rates", "1/0"], "--rates must be numbers with commas between them, got '1/0'"),
        (["--rates", "5/4"], "a rate is the share of tokens that is kept, above 0 and up to 1, got 1.25"),
        (["--task", "lines", "--prompt-file", "a.txt"], "--task and --prompts make documents, and --prompt-file names"),
        (["--task", "words"], "unknown task 'words'; there are lines"),
        (["--layers", "9"], "layers [9] are no full-attention layers of this model; there are [0, 1, 2, 3]"),
        (["--methods", "uniform(keep=0.5)"], "the study sets keep itself"),
        (["--methods", ";"], "the study has no methods"),
        (["--seeds", "0"], "seeds must be at least 1, got 0"),
        (["--blocks", "100"], "block must be a power of two, got 100"),
        (["--tokens", "500"], "the study keeps 256 at either end and needs at least 576"),
        (["--tokens", "700"], "needs at least 32: give a longer text, a larger rate, or fewer exact tokens"),
        (["--prompt-file", "nowhere.txt"], "there is no file nowhere.txt"),
    ],
)
def test_a_study_that_cannot_be_ends_with_one_line(arguments, message, tmp_path):
    refused(called("--out", tmp_path / "out", *arguments), message)
    assert not (tmp_path / "out").exists()
