"""`kvsketch bench text`: divergences are what their definition says, pairs are pairs, and a run can go on."""

import math
import re

import pytest
import torch

import kvsketch
import zoo
from commands import refused
from commands import run as command
from kvsketch.evaluation.layers.plan import Prompt
from kvsketch.evaluation.results.rows import RowsFile, read_rows
from kvsketch.evaluation.texts.measure import run
from kvsketch.evaluation.texts.pictures import divergence_picture
from kvsketch.evaluation.texts.plan import KEY, Plan
from kvsketch.evaluation.texts.summary import compare, summarise

ABOUT = {"model": "small", "fingerprint": "0", "dtype": "float32", "kvsketch": "0"}
TEXT = Prompt("a.txt#0", zoo.tokens(1, 700, seed=5))


def measured(plan, folder, texts=(TEXT,), model=None):
    rows = RowsFile(folder / "text.jsonl", ABOUT, KEY)
    steps = list(run(model or zoo.build("llama"), texts, plan, rows))
    return {(row["method"], row["start"]): row for row in read_rows(folder / "text.jsonl", KEY)[1]}, steps


def test_a_divergence_is_that_of_the_predictions_that_a_user_would_get(tmp_path):
    """Made anew with nothing of what measures it: one cache that reads, another for the exact predictions."""
    spec = "streaming_llm(keep=0.25)"
    found, _ = measured(Plan(methods=[spec], tokens=400, next=40, call=7, windows=2), tmp_path)
    model, start = zoo.build("llama"), 260
    ids = TEXT.ids[:, start : start + 440]

    @torch.no_grad()
    def predictions(spec):
        cache = kvsketch.make_cache(model, spec)
        parts = [ids[:, :399], *ids[:, 399:439].split(7, 1)]
        given = [model(part, past_key_values=cache).logits[0] for part in parts]
        return torch.cat(given[1:]).double().softmax(1)

    p, q = predictions("exact"), predictions(spec)
    row = found[spec, start]
    assert row["kl"] == pytest.approx(float((p * (p / q).log()).sum(1).mean()), rel=1e-6)
    assert row["kl"] > 1e-3
    assert row["agree"] == float((p.argmax(1) == q.argmax(1)).double().mean())
    assert row["nll"] == pytest.approx(-float(q[torch.arange(40), ids[0, 400:]].log().mean()), rel=1e-6)
    assert row["nll_exact"] == pytest.approx(-float(p[torch.arange(40), ids[0, 400:]].log().mean()), rel=1e-6)


def test_with_nothing_forgotten_nothing_moves(tmp_path):
    methods = ["uniform(keep=1.0)", "retrieval(window=32, top=1.0)", "retrieval(window=32)", "uniform"]
    found, _ = measured(Plan(methods=methods, keeps=[0.25], tokens=400, next=24, windows=2), tmp_path)
    for (method, _), row in found.items():
        if method in ("uniform(keep=0.25)", methods[2]):
            assert row["kl"] > 1e-4
        else:
            assert abs(row["kl"]) < 1e-4
            assert row["nll"] == pytest.approx(row["nll_exact"], abs=1e-3)
    assert found[methods[1], 0]["looked_up"] == pytest.approx(1.0)


def test_a_run_goes_on_and_measures_nothing_twice(tmp_path):
    plan = Plan(methods=["uniform"], keeps=[0.5, 0.25], tokens=400, next=16, windows=2)
    whole, _ = measured(plan, tmp_path / "whole")
    rows = RowsFile(tmp_path / "text.jsonl", ABOUT, KEY)
    steps = run(zoo.build("llama"), [TEXT], plan, rows)
    for _ in range(3):
        next(steps)  # reading, and both methods of the first window
    again, seen = measured(plan, tmp_path)
    assert {place: row["kl"] for place, row in again.items()} == {place: row["kl"] for place, row in whole.items()}
    assert sum(settled for _, settled in seen) == 4
    assert [label for label, _ in seen].count("a.txt, window 1, uniform(keep=0.5)") == 0


@pytest.mark.parametrize("spec", ["uniform", "kvzip", "snapkv", "retrieval(window=32, top=0.1)"])
def test_windows_together_are_windows_alone(spec, tmp_path):
    """Also where some were done before, so that fewer are left to be read together."""
    alone, together = (Plan(methods=[spec], keeps=[0.25], tokens=300, next=16, windows=5, batch=n) for n in (1, 3))
    found, _ = measured(alone, tmp_path / "alone")
    rows = RowsFile(tmp_path / "together" / "text.jsonl", ABOUT, KEY)
    first = next(row for row in read_rows(tmp_path / "alone" / "text.jsonl", KEY)[1] if row["start"] == 96)
    rows.add([first])
    again, steps = measured(together, tmp_path / "together")
    assert [label.split(", ")[1] for label, _ in steps] == [
        part for part in ("window 1", "window 2", "windows 3 to 5") for _ in range(1 + (part != "window 2"))
    ]
    assert sum(settled for _, settled in steps) == 5
    assert found.keys() == again.keys()
    for place, row in found.items():
        for name in ("kl", "kl_first", "nll", "nll_exact"):
            assert again[place][name] == pytest.approx(row[name], rel=1e-3, abs=1e-5), (place, name)
        assert again[place]["agree"] == row["agree"]
        assert again[place]["nbytes"] == pytest.approx(row["nbytes"], rel=0.01)


def rows_of(method, divergences, text="a"):
    row = {
        "text": text,
        "tokens": 9,
        "next": 4,
        "call": 1,
        "method": method,
        "agree": 1.0,
        "nll": 2.0,
        "nll_exact": 1.0,
    }
    row |= {"nbytes": 10, "full_nbytes": 40, "looked_up": None, "seconds": 0.1}
    return [row | {"start": start, "kl": kl} for start, kl in enumerate(divergences)]


def test_ratios_are_of_pairs_of_windows():
    """Twice as large in every window is a ratio of 2 whose interval is a point, however windows differ."""
    rows = rows_of("x", [0.2, 0.02, 2.0]) + rows_of("y", [0.1, 0.01, 1.0, 7.0]) + rows_of("x", [0.4], text="b")
    ratio = compare(rows, "x", "y")
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert ratio.pairs == 3
    assert compare(rows, "y", "x").mean == pytest.approx(0.5)
    assert compare(rows, "x", "z") is None
    mean = summarise(rows)[1]
    assert mean.kl == pytest.approx(2.0275)
    spread = (sum((kl - 2.0275) ** 2 for kl in (0.1, 0.01, 1.0, 7.0)) / 3) ** 0.5
    assert mean.error == pytest.approx(spread / 2)
    assert (mean.share, mean.perplexity) == (0.25, pytest.approx(math.e**2))


def test_a_picture_names_those_that_are_not_behind_the_others():
    methods = [f"{name}(keep={keep})" for name in ("uniform", "tova", "h2o") for keep in (0.25, 0.5)]
    means = summarise([row for method in methods for row in rows_of(method, [0.1, 0.2])])
    picture = divergence_picture(means, "a title", behind=["h2o", "tova"])
    (axes,) = picture.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["2 others", "uniform"]
    assert [line.get_color() for line in axes.lines[:2]] == ["0.8", "0.8"]
    with pytest.raises(ValueError, match="of kvzip there is nothing to draw, but of uniform, tova, h2o"):
        divergence_picture(means, "a title", behind=["kvzip"])


def test_the_command_measures_and_draws(tmp_path):
    (tmp_path / "book.txt").write_text("line ancient-falcon: 48213. " * 120)
    options = ("--texts", tmp_path / "book.txt", "--tokens", 300, "--next", 8, "--windows", 2, "--dtype", "float32")
    done = command(
        "bench", "text", *options, "-m", "uniform; streaming_llm", "--keep", "0.5,0.25", "-o", tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    assert "8 tokens after 300, n = 2; the full cache has a perplexity of" in done.stdout
    assert re.search(r"uniform\(keep=0\.5\) .*\[.*\] +\d+\.\d% +\d+\.\d", done.stdout), "the last column is shown"
    assert max(map(len, done.stdout.splitlines())) <= 80
    for spec in ("uniform(keep=0.5)", "uniform(keep=0.25)", "streaming_llm(keep=0.5"):
        assert spec in done.stdout
    assert (tmp_path / "out" / "text.png").stat().st_size > 10_000
    assert len(read_rows(tmp_path / "out" / "text.jsonl", KEY)[1]) == 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-m", "exact"), "exact is what all others are compared with"),
        (("-m", "uniform; uniform(keep=0.5)"), "uniform(keep=0.5) is named twice"),
        (("--keep", ""), "uniform names no budget"),
        (("--keep", "2.5"), "keep must be a fraction in (0, 1]"),
        (("--keep", "1MB", "--batch", "2"), "batch=2 windows would share a budget in bytes"),
        (("--tokens", "3000"), "a window needs 3,128: give a longer text, or fewer tokens of each"),
        (
            ("--tokens", "40000"),
            "a window and what follows it have 40,128 tokens, and the context of LlamaForCausalLM is 32,768",
        ),
        (("--tokens", "600", "--windows", "5000"), "too few for 5000 different windows"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(options, said, tmp_path, as_users_run_it):
    (tmp_path / "book.txt").write_text("line ancient-falcon: 48213. " * 120)
    given = {"-m": "uniform", "--keep": "0.5", **dict(zip(options[::2], options[1::2], strict=True))}
    flat = [part for pair in given.items() for part in pair]
    done = command("bench", "text", "--texts", tmp_path / "book.txt", "-o", tmp_path / "out", *flat)
    refused(done, said)
    assert not (tmp_path / "out").exists()
