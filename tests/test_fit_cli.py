"""`kvsketch fit`, run as a user runs it, and killed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from fitted import TOKENIZER, result_of, same, tiny_model, write_corpus
from kvsketch.caches.key_index import read_index
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.huggingface.facts import facts

SMALL = ("--buckets", 8, "--hidden", 10, "--apart", 24, "--away", 12, "--tokens", 120, "--pool", 100, "--held-out", 0.3)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(*arguments):
    return [sys.executable, "-m", "kvsketch", *map(str, arguments)]


def run(*arguments):
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, env=ENVIRONMENT)


def run_until(found, *arguments):
    """Start the command, and kill it as soon as something is there."""
    process = subprocess.Popen(command(*arguments), stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    try:
        while not found():
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL


@pytest.fixture
def saved(tmp_path):
    """A tiny model in a folder, as any other checkpoint."""
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_model_is_fitted_and_what_was_found_is_shown(saved, tmp_path):
    out = tmp_path / "index"
    done = run("fit", saved, "--corpus", write_corpus(tmp_path), "-o", out, *SMALL, "--steps", 20, "--layers", "1,2")
    assert done.returncode == 0, done.stderr
    index = read_index(out)
    assert index.layers == [1, 2]
    index.check_model(facts(tiny_model()))
    assert index.description["model"]["id"] == str(saved)
    assert index.description["made_with"]["torch"] == torch.__version__
    assert f"use it: saap(index='{out}', probes=2, window=24)" in done.stderr
    measured = next(row for row in index.description["layers"]["1"]["held_out"]["classifier"] if row["probes"] == 2)
    assert f"{measured['recall']:.3f} / {measured['selectivity']:.3f}" in done.stdout
    again = run(
        "fit", saved, "--corpus", tmp_path / "corpus.jsonl", "-o", out, *SMALL, "--steps", 21, "--layers", "1,2"
    )
    assert again.returncode == 2
    assert "settings.recipe.steps 20, now 21" in again.stderr


@pytest.mark.slow
def test_a_killed_fit_ends_as_if_it_had_not_been(saved, tmp_path):
    """kill -9 while texts are read, and while a layer is trained."""
    corpus, out = write_corpus(tmp_path, texts=40), tmp_path / "killed"
    options = ("fit", saved, "--corpus", corpus, *SMALL, "--steps", 600, "--batch", 16)
    whole = run(*options, "-o", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    shards, work = out / "work" / "shards", out / "work"
    run_until(lambda: len(list(shards.glob("*.safetensors"))) > 2, *options, "-o", out)
    assert len(list(shards.glob("*.safetensors"))) < 40
    training = work / "layer-01.training.safetensors"
    run_until(training.is_file, *options, "-o", out, "--save-every", 0)
    assert (out / "layer-00.safetensors").is_file()
    assert not (out / "layer-01.safetensors").is_file()
    last = run(*options, "-o", out)
    assert last.returncode == 0, last.stderr
    assert same(result_of(tmp_path / "whole"), result_of(out))
    assert not work.exists()


@pytest.mark.slow
def test_the_embedded_model_is_fitted_to_its_own_tasks(tmp_path):
    """Documents with many questions; a classifier finds more of what they look for than chance would."""
    corpus = tmp_path / "lines.jsonl"
    made = run("sample", "lines", "--tokens", 600, "--jsonl", "--count", 6, "--wording", "compact")
    assert made.returncode == 0, made.stderr
    texts = [json.loads(line)["text"] for line in made.stdout.splitlines()]
    assert len(set(texts)) == 6
    assert all(500 < len(TOKENIZER(text)["input_ids"]) <= 600 and text.count("?") == 24 for text in texts)
    corpus.write_text(made.stdout)
    out = tmp_path / "index"
    options = ("--apart", 63, "--away", 32, "--buckets", 64, "--hidden", 64, "--steps", 100, "--pool", 2000)
    done = run("fit", "--corpus", corpus, "-o", out, *options)
    assert done.returncode == 0, done.stderr
    assert "layers [0] has its best key more than 32 tokens away: they are left out" in done.stderr.replace("\n", " ")
    index = read_index(out)
    index.check_model(facts(load_embedded()[0]))
    assert index.layers == [1, 2, 3]
    at_16 = next(row for row in index.description["layers"]["1"]["held_out"]["classifier"] if row["probes"] == 16)
    assert at_16["recall"] > 1.5 * at_16["selectivity"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--recipe", "quick"), "--recipe must be one of fast, paper, got 'quick'"),
        (("--layers", "a"), "--layers must be numbers with commas between them, got 'a'"),
        (("--tokens", 30, "--apart", 40), "texts of 30 tokens are too short"),
        (("--ray", "--ray-address", "127.0.0.1:1"), "there is no Ray cluster at '127.0.0.1:1'"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_is_refused_in_a_line(options, error, tmp_path):
    path = write_corpus(tmp_path)
    done = run("fit", "--corpus", path, "-o", tmp_path / "index", *options)
    assert done.returncode == 2
    assert error in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "index").exists()


@pytest.mark.slow
def test_samples_are_refused_that_make_no_sense():
    done = run("sample", "lines", "--count", 3)
    assert done.returncode == 2
    assert "--count 3 is for --jsonl" in done.stderr
