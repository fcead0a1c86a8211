"""`kvsketch fit`, as a user runs it."""

import json

import pytest
import torch

import kvsketch
from commands import refused, run
from fitted import TOKENIZER, tiny_model, write_corpus
from kvsketch.caches.lookup.key_index import own_index, read_index
from kvsketch.caches.registry import parse_spec
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.huggingface.identity import describe_model

WITHOUT_TOKENS = ("--buckets", 8, "--hidden", 10, "--apart", 24, "--away", 12, "--pool", 100, "--held-out", 0.3)
SMALL = (*WITHOUT_TOKENS, "--tokens", 120)


@pytest.fixture
def saved(tmp_path):
    """A tiny model in a folder, as any other checkpoint."""
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def test_a_model_is_fitted_and_what_was_found_is_shown(saved, tmp_path):
    out = tmp_path / "an owner's index"
    done = run("fit", saved, "--corpus", write_corpus(tmp_path), "-o", out, *SMALL, "--steps", 20, "--layers", "1,2")
    assert done.returncode == 0, done.stderr
    index = read_index(out)
    assert index.layers == [1, 2]
    index.check_model(describe_model(tiny_model()))
    assert index.description["model"]["id"] == str(saved)
    assert index.description["made_with"]["torch"] == torch.__version__
    spec = f"saap(index={str(out)!r}, probes=2, visit=0.1, estimate=True, prefer='density', window=24)"
    assert f"use it: {spec}" in done.stderr
    assert parse_spec(spec).folder == out
    measured = next(row for row in index.description["layers"]["1"]["held_out"]["classifier"] if row["probes"] == 2)
    assert f"{measured['recall']:.3f} / {measured['selectivity']:.3f}" in done.stdout
    again = run(
        "fit",
        saved,
        "--corpus",
        tmp_path / "corpus.jsonl",
        "-o",
        out,
        *WITHOUT_TOKENS,
        "--steps",
        21,
        "--layers",
        "1,2",
    )
    assert again.returncode == 2
    assert "settings.recipe.steps 20, now 21" in again.stderr
    assert "settings.tokens 120, now 1024" in again.stderr, "pieces are as long as the context, if nobody says"


def test_the_embedded_model_is_fitted_to_its_own_tasks(tmp_path):
    """Documents with many questions; a classifier finds more of what they look for than chance would."""
    corpus = tmp_path / "lines.jsonl"
    made = run("sample", "lines", "--tokens", 700, "--jsonl", "--count", 6, "--wording", "compact")
    assert made.returncode == 0, made.stderr
    texts = [json.loads(line)["text"] for line in made.stdout.splitlines()]
    assert len(set(texts)) == 6
    assert all(600 < len(TOKENIZER(text)["input_ids"]) <= 700 and text.count("?") == 24 for text in texts)
    corpus.write_text(made.stdout)
    out = tmp_path / "index"
    options = ("--apart", 63, "--away", 32, "--buckets", 64, "--hidden", 64, "--steps", 100, "--pool", 2000)
    done = run("fit", "--corpus", corpus, "-o", out, *options)
    assert done.returncode == 0, done.stderr
    assert "layer 0: KV heads [0, 1, 2] learn from queries that look near" in done.said
    index = read_index(out)
    index.check_model(describe_model(load_embedded()[0]))
    assert index.layers == [0, 1, 2, 3]
    at_16 = next(row for row in index.description["layers"]["1"]["held_out"]["classifier"] if row["probes"] == 16)
    assert at_16["recall"] > 1.5 * at_16["selectivity"]


def test_without_a_corpus_the_embedded_model_reads_its_own_tasks(tmp_path, monkeypatch):
    """With settings of their own, but for what is said; the index is left where caches find it."""
    monkeypatch.setenv("KVSKETCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("kvsketch.evaluation.embedded.corpus.TEXTS", 1)
    monkeypatch.setattr("kvsketch.evaluation.embedded.corpus.TOKENS", 700)
    monkeypatch.setattr(
        "kvsketch.evaluation.embedded.corpus.FIT", {"apart": 63, "away": 32, "buckets": 64, "hidden": 9}
    )
    done = run("fit", "--steps", 3, "--hidden", 10, "--pool", 300)
    assert done.returncode == 0, done.stderr
    model, _ = load_embedded()
    learnt = kvsketch.make_cache(model, "saap").config.learnt
    assert learnt.folder == own_index(describe_model(model)).absolute()
    assert learnt.buckets == 64
    assert learnt.layer(1).second.shape[1] == 10
    files = {file["file"]: file["texts"] for file in learnt.description["corpus"]}
    assert files == {f"{task}.jsonl": 2 for task in ("lines", "passkey", "kv", "niah_single", "niah_multikey")}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--recipe", "quick"), "--recipe must be one of fast, paper, got 'quick'"),
        (("--layers", "a"), "--layers must be numbers with commas between them, got 'a'"),
        (("--tokens", 30, "--apart", 40), "texts of 30 tokens are too short"),
        (("--ray", "--ray-address", "127.0.0.1:1"), "there is no Ray cluster at '127.0.0.1:1'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(options, error, tmp_path):
    path = write_corpus(tmp_path)
    refused(run("fit", "--corpus", path, "-o", tmp_path / "index", *options), error)
    assert not (tmp_path / "index").exists()


def test_samples_are_refused_that_make_no_sense():
    refused(run("sample", "lines", "--count", 3), "--count 3 is for --jsonl")
