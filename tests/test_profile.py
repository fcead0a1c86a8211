"""Profiles: a second reading's scores are largest attention weights, parts add up, and budgets follow them."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import kvsketch
import zoo
from commands import refused
from commands import run as command
from kvsketch.caches.core import profile
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.profile import read_profile, write_profile
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.fitting.profiling import SINKS, WINDOW, mean_parts, parts_of
from kvsketch.huggingface.second_reading import second_reading
from uneven import made_profile


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("chunk", [149, 1000])
def test_scores_are_the_largest_weights_while_the_text_is_read_again(family, chunk):
    """Against transformers' own attention weights, which a second copy of the text gets behind the first."""
    model, ids = zoo.build(family), zoo.tokens(1, 150)
    found = second_reading(model, ids, chunk=chunk)
    kvsketch.detach(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.cat([ids, ids], 1), output_attentions=True).attentions
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(weights)
    assert sorted(found) == [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    for layer, scores in found.items():
        group = weights[layer].shape[1] // scores.shape[0]
        expected = weights[layer][0, :, 150:, :150].amax(1).unflatten(0, (-1, group)).amax(1)
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)


def test_parts_are_those_of_one_threshold_over_all_heads():
    generator = torch.Generator().manual_seed(0)
    scores = {layer: torch.rand(3, 120, generator=generator) ** (layer + 1) for layer in (0, 2)}
    keeps = (0.5, 0.25)
    found = parts_of(scores, keeps)
    for place, keep in enumerate(keeps):
        parts = [found[layer][head][place] for layer in (0, 2) for head in range(3)]
        held = [part * (120 - SINKS - WINDOW) + SINKS + WINDOW for part in parts]
        assert sum(held) == pytest.approx(keep * 120 * 6, abs=0.51)
        middle = [scores[layer][head, SINKS:-WINDOW] for layer in (0, 2) for head in range(3)]
        worst_kept = min(
            float(own.sort(descending=True).values[round(part * len(own)) - 1])
            for own, part in zip(middle, parts, strict=True)
            if part
        )
        best_dropped = max(
            float(own.sort(descending=True).values[round(part * len(own))])
            for own, part in zip(middle, parts, strict=True)
            if part < 1
        )
        assert worst_kept >= best_dropped
    assert mean_parts([found, found]) == found


def test_of_equal_scores_the_lower_layer_head_and_earlier_token_come_first():
    scores = {layer: torch.full((2, 60), 0.3) for layer in range(2)}
    scores[1] = scores[1] * (1 + 1e-6)  # no more than sums of float32 differ by
    assert parts_of(scores, (35 / 60,)) == {0: [[1.0], [0.5]], 1: [[0.0], [0.0]]}


def test_budgets_follow_the_profile_between_the_keeps_measured(tmp_path):
    model = zoo.build("llama")
    profile = read_profile(made_profile(tmp_path / "p.json", model, keeps=(0.4, 0.1)))
    for keep in (0.4, 0.2, 0.1, 0.8):
        shares = [share for heads in profile.shares(Budget(keep, None, 52)).values() for share in heads]
        assert sum(shares) == pytest.approx(len(shares))
        assert max(shares) <= 1 / keep + 1e-9
    between, *measured = (profile.shares(Budget(keep, None, 52))[3][0] for keep in (0.2, 0.4, 0.1))
    halfway = (0.4 * measured[0] + 0.1 * measured[1]) / (0.4 + 0.1)
    assert between == pytest.approx(halfway, rel=1e-6), "by the logarithm"
    assert profile.shares(Budget(None, 80, 52)) == profile.shares(Budget(0.25, None, 52)), "of whatever length"
    assert set(profile.shares(Budget(1.0, None, 52))[0]) == {1.0}


@pytest.mark.parametrize(
    ("spec", "most"),
    [("keydiff(keep=0.25", 0.26), ("streaming_llm(keep=0.25", 0.3), ("balancekv(keep=0.25, window=16", 0.29)],
)
@pytest.mark.parametrize("heads", ["pyramid", "profile"])
def test_all_heads_together_hold_the_budget_physically(spec, most, heads, tmp_path):
    model, ids = zoo.build("llama"), zoo.tokens(1, 1000)
    profile = made_profile(tmp_path / "p.json", model, tokens=1000)
    exact = kvsketch.prefill(model, ids, kvsketch.make_cache(model))
    cache = kvsketch.prefill(model, ids, kvsketch.make_cache(model, f"{spec}, heads={profile!r})"))
    if heads == "pyramid":
        cache = kvsketch.prefill(model, ids, kvsketch.make_cache(model, f"{spec}, heads='pyramid')"))
    assert 0.2 * exact.nbytes < cache.nbytes <= most * exact.nbytes
    entries = torch.tensor([layer.entries for layer in cache.report().layers], dtype=torch.float64)
    means = entries.mean(1).tolist()
    assert means == sorted(means, reverse=heads == "pyramid")
    assert means[0] != pytest.approx(means[-1], rel=0.5)


def test_a_profile_of_other_layers_is_refused(tmp_path):
    """Of too few, or of some that have no share: what those would leave is nobody's, and the budget is not kept."""
    model, path = zoo.build("gemma3"), tmp_path / "p.json"
    made_profile(path, model)
    layers = json.loads(path.read_text())["layers"]
    last = max(layers, key=int)
    for parts, message in (
        ({layer: own for layer, own in layers.items() if layer != last}, f"lacks the 2 KV heads of layer {last}"),
        (layers | {"0": layers[last]}, r"also has layers that share no budget: \[0\]"),
    ):
        spec = changed(path, tmp_path / "other.json", layers=parts)
        with pytest.raises(ValueError, match=message):
            kvsketch.prefill(model, zoo.tokens(1, 300), kvsketch.make_cache(model, spec))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A profile of the embedded model, from two short documents."""
    path = tmp_path_factory.mktemp("profile") / "own.json"
    done = command("profile", "--tasks", "lines,kv", "--tokens", 300, "--windows", 1, "--keep", "0.5,0.2", "-o", path)
    assert done.returncode == 0, done.stderr
    return path, done


def test_the_command_measures_the_same_again_and_draws(measured, tmp_path):
    path, done = measured
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["layer", "0", "1", "2", "3"]
    assert f"heads={str(path)!r}" in done.said
    assert path.with_suffix(".png").stat().st_size > 5000
    again = tmp_path / "again.json"
    command("profile", "--tasks", "lines,kv", "--tokens", 300, "--windows", 1, "--keep", "0.2,0.5", "-o", again)
    assert again.read_bytes() == path.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again.json", "again.png"]


def test_a_run_that_was_stopped_goes_on(measured, tmp_path, monkeypatch):
    path, _ = measured
    given = ("profile", "--tasks", "lines,kv", "--tokens", 300, "--windows", 1, "--keep", "0.5,0.2")
    out, read = tmp_path / "p.json", []

    def stopped(model, ids, **options):
        if read:
            raise KeyboardInterrupt
        read.append(ids)
        return second_reading(model, ids, **options)

    with monkeypatch.context() as patch:
        patch.setattr("kvsketch.huggingface.second_reading.second_reading", stopped)
        assert command(*given, "-o", out).returncode == 130
    assert not out.exists()
    work = tmp_path / "p.work.jsonl"
    stopped_at = work.read_bytes()
    assert command(*given, "-o", out).returncode == 0
    assert out.read_bytes() == path.read_bytes()
    assert not work.exists(), "nothing stays behind"
    work.write_bytes(stopped_at)
    others = (*given[:-1], "0.9,0.5", "-o")
    assert command(*others, out).returncode == 0
    assert command(*others, tmp_path / "clean.json").returncode == 0
    assert out.read_bytes() == (tmp_path / "clean.json").read_bytes(), "rows of other fractions are not mixed up"


def test_the_embedded_model_finds_its_own(tmp_path, monkeypatch):
    """Inside the package; where that is missing or damaged, what mends it is said, and other models have theirs."""
    monkeypatch.setenv("KVSKETCH_CACHE", str(tmp_path / "cache"))
    done = command(
        "generate", "--prompt-file", "-", "--method", "uniform(keep=0.5, heads='profile')",
        "--max-new-tokens", 2, text="The secret number is 12345. " * 30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (model, _), shipped = load_embedded(), profile.SHIPPED
    monkeypatch.setattr(profile, "SHIPPED", tmp_path / "profiles")
    mended = "for the model inside the package kvsketch profile. It is found by itself"
    with pytest.raises(ValueError, match=f"there is none.* {mended}"):
        kvsketch.make_cache(model, "uniform(heads='profile')")
    shutil.copytree(shipped, tmp_path / "profiles")
    (tmp_path / "profiles" / "embedded-first.json").write_text("{")
    kvsketch.make_cache(model, "uniform(heads='profile')")
    (tmp_path / "profiles" / "embedded.json").write_text("{")
    with pytest.raises(ValueError, match=mended):
        kvsketch.make_cache(model, "uniform(heads='profile')")


def changed(path, target, **what):
    known = json.loads(path.read_text())
    write_profile(target, {**{k: v for k, v in known.items() if k not in ("checksum", "format", "kind")}, **what})
    return f"uniform(heads={str(target)!r})"


def test_what_is_no_profile_of_the_model_is_refused(measured, tmp_path):
    path, _ = measured
    model, _ = load_embedded()
    known = json.loads(path.read_text())
    other = tmp_path / "other.json"
    with pytest.raises(ValueError, match=r"measured on another model: its layers are 4, those of this model 2"):
        kvsketch.make_cache(zoo.build("llama", layers=2), f"uniform(heads={str(path)!r})")
    with pytest.raises(ValueError, match="there is none, neither in kvsketch nor at"):
        kvsketch.make_cache(zoo.build("llama", layers=2), "uniform(heads='profile')")
    with pytest.raises(ValueError, match=r"down to keep=0.2, and does not cover keep=0.1"):
        kvsketch.make_cache(model, f"uniform(keep=0.1, heads={str(path)!r})")
    exact = kvsketch.prefill(model, torch.randint(90, (1, 200)), kvsketch.make_cache(model))
    with pytest.raises(ValueError, match=r"down to keep=0.2, and does not cover keep=0.1"):
        exact.compress(f"uniform(keep=0.1, heads={str(path)!r})")
    with pytest.raises(ValueError, match="there is no profile"):
        kvsketch.make_cache(model, "uniform(heads='nowhere.json')")
    for what in ({"keeps": [0.2, 0.5]}, {"tokens": 0}, {"layers": {}}, {"layers": {"0": [[1.5, 0.1]] * 4}}):
        with pytest.raises(ValueError, match="is not the description of a profile"):
            kvsketch.make_cache(model, changed(path, other, **what))
    other.write_text(path.read_text().replace(str(known["layers"]["1"][0][0]), "NaN", 1))
    with pytest.raises(ValueError, match=r"cannot be read as what kvsketch wrote.* Put back .* kvsketch profile MODEL"):
        kvsketch.make_cache(model, f"uniform(heads={str(other)!r})")
    with pytest.raises(ValueError, match="heads must be equal, pyramid, profile, threshold, or a file"):
        kvsketch.make_cache(model, "uniform(heads='best')")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--out", "p.txt"), "must name a file that ends in .json"),
        (("--keep", "1.5"), "must be fractions between 0 and 1"),
        (("smollm2",), "name texts like those that the model is to read"),
        (("--tasks", "lines", "--texts", "x.txt"), "give one or other"),
        (("--tasks", "poems"), "unknown task 'poems'"),
        (("--tasks", ","), "--tasks must name tasks"),
        (("--tasks", "lines", "--tokens", "300"), "--keep 0.03125 of a piece of"),
    ],
)
def test_bad_input_to_the_command_is_one_sentence(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(command("profile", *options), message)


def test_a_picture_of_something_else_is_not_written_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("holiday.png").write_bytes(b"snow")
    refused(command("profile", "--out", "holiday.json"), "would overwrite holiday.png too")
    assert Path("holiday.png").read_bytes() == b"snow"


def test_a_text_whose_second_reading_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="a prompt and what is read again of it at a time have 1,120 tokens"):
        second_reading(zoo.build("llama"), zoo.tokens(1, 800))
