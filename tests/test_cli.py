"""The command line, run as a user runs it."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

import kvsketch
import zoo
from kvsketch.caches.base import BudgetedConfig
from kvsketch.caches.registry import METHODS
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.evaluation.tasks import TASKS, Setting
from kvsketch.evaluation.training.tokenizer import build_tokenizer

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 20


def run(*arguments, text=None):
    return subprocess.run(
        [sys.executable, "-m", "kvsketch", *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )


def count(text):
    return len(build_tokenizer()(text, add_special_tokens=False)["input_ids"])


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return path


def test_version_and_methods():
    assert run("--version").stdout == f"kvsketch {kvsketch.__version__}\n"
    listed = run("methods").stdout
    assert all(name in listed for name in kvsketch.methods())


@pytest.mark.slow
def test_text_then_question_then_the_same_from_a_saved_cache(book, tmp_path):
    saved = tmp_path / "book.safetensors"
    options = ("--question", "Which month?", "--max-new-tokens", 12)
    first = run("generate", "--prompt-file", book, "--save-cache", saved, "--report", *options)
    assert first.returncode == 0, first.stderr
    assert "inside the package" in first.stderr  # it must say so
    for line in ("tokens seen", f"{count(TEXT) + 1:,} tokens", "tokens/s", "attention error", "entries per KV head"):
        assert line in first.stderr
    share = float(re.search(r"KiB of .*\((\d+\.\d)%\)", first.stderr)[1])
    assert 25 < share < 50
    with safe_open(saved, "pt") as file:
        assert json.loads(file.metadata()["kvsketch"])["method"] == "uniform"
    again = run("generate", "--load-cache", saved, *options)
    assert again.stdout == first.stdout
    assert run("generate", "--prompt-file", "-", *options, text=TEXT).stdout == first.stdout


@pytest.mark.slow
def test_text_alone_is_continued(book):
    done = run("generate", "--prompt-file", book, "--max-new-tokens", 12, "--method", "exact")
    assert done.returncode == 0, done.stderr
    model, tokenizer = load_embedded()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert done.stdout.strip("\n") == tokenizer.decode(expected, skip_special_tokens=True).strip("\n")


@pytest.mark.slow
def test_a_model_in_a_folder_with_a_chat_template(book, tmp_path):
    model, tokenizer = zoo.build("llama"), build_tokenizer()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = ["generate", tmp_path / "model", "--prompt-file", book, "--question", "Which month?"]
    arguments += ["--max-new-tokens", 6, "--chunk", 100, "--method", "uniform(keep=0.5, prefill='streaming')"]
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert f"{count('<user>' + TEXT):,} tokens" in done.stderr
    assert f"{count(TEXT) + 1:,} tokens" in run(*arguments, "--raw").stderr  # and the one for the beginning


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a text with --prompt-file, or a saved cache"),
        (["--prompt-file", "{book}", "--load-cache", "x", "--question", "?"], "and not both"),
        (["--load-cache", "x"], "--load-cache needs a --question"),
        (["--load-cache", "x", "--question", "?"], "there is no file x"),
        (["--load-cache", "x", "--question", "?", "--save-cache", "y"], "--save-cache keeps the cache of a text"),
        (["--load-cache", "x", "--question", "?", "--method", "exact"], "keeps the one it was made with"),
        (["--prompt-file", "nowhere"], "there is no file nowhere"),
        (["--prompt-file", "[/x]"], "there is no file [/x]"),
        (["--prompt-file", "{empty}"], "is empty"),
        (["--prompt-file", "{book}", "--method", "unifrm"], "did you mean uniform?"),
        (["--prompt-file", "{book}", "--method", "uniform(keep='12 parsecs')"], "'12 parsecs' is not a size"),
        (["--prompt-file", "{book}", "--save-cache", "no/such/folder/c"], "there is no folder"),
        (["--prompt-file", "{book}", "--dtype", "int3"], "--dtype must be auto or one of"),
        (["--prompt-file", "{book}", "--device", "abacus"], "--device 'abacus' is not there"),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(arguments, message, book, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    places = {"book": book, "empty": tmp_path / "empty.txt"}
    done = run("generate", *[argument.format(**places) if "{" in argument else argument for argument in arguments])
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_the_demo_shows_answers_side_by_side_and_writes_a_report(tmp_path):
    done = run("demo", "--tokens", 1000, "--out", tmp_path / "report", "--samples", 2)
    assert done.returncode == 0, done.stderr
    for name, config in METHODS.items():
        assert (name in done.stdout) == (name == "exact" or issubclass(config, BudgetedConfig)), name
    shares = [float(share) for share in re.findall(r"(\d+\.\d)%", done.stdout)]
    assert shares[0] > 99 > 50 > max(shares[1:])
    assert "6 of 6" in done.stdout  # exact knows every line
    assert (tmp_path / "report" / "report.html").is_file()
    assert "report.html" in "".join(done.stderr.split())


@pytest.mark.slow
def test_the_demo_without_a_folder_writes_nothing(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(kvsketch.__file__).parent.parent)}
    command = [sys.executable, "-m", "kvsketch", "demo", "--tokens", "500"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["words"], "unknown suite 'words'; there are lines, needle, ruler, infinite, error"),
        (["ruler", "--tasks", "niah"], "the suite ruler has no task 'niah'; it has niah_single"),
        (["lines", "--asked", "never"], "--asked must be before, after or both, got 'never'"),
        (["lines", "--wording", "loud"], "--wording must be one of official, compact, got 'loud'"),
        (["lines", "--lengths", "many"], "--lengths must be numbers with commas between them, got 'many'"),
        (["needle", "--cases", "{book}"], "--cases are LongEval's lines, which the suite 'needle' has none of"),
        (["lines", "--cases", "{book}"], "line 1: not a LongEval lines case"),
        (["needle", "--haystack", "nowhere"], "there is no file nowhere"),
        (["needle", "--depths", "2"], "a depth is a share of the document from 0 to 1, got 2.0"),
        (["lines", "--methods", ";"], "name at least one method"),
        (["lines", "--methods", "unifrm"], "did you mean uniform?"),
        (["lines", "--lengths", "20"], "lines: 20 tokens are too few for one sample"),
    ],
)
def test_a_benchmark_that_cannot_be_ends_with_one_line(arguments, message, book, tmp_path):
    filled = [argument.format(book=book) if "{" in argument else argument for argument in arguments]
    done = run("bench", *filled, "--out", tmp_path / "out", "--samples", 1)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_benchmarks_are_listed_with_a_line_each():
    listed = run("bench", "--help").stdout
    for name in ("lines", "needle", "ruler", "infinite", "error"):
        assert re.search(rf"│ {name} +[A-Z].*\.", listed), name


@pytest.mark.slow
def test_a_benchmark_on_a_users_model_and_longevals_cases(tmp_path):
    model, tokenizer = zoo.build("llama"), build_tokenizer()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    sample = TASKS["lines"].make(random.Random(0), Setting(size=20))
    case = {"random_idx": ["x", 3], "num_lines": 20, "expected_number": int(sample.questions[0].answers[0])}
    (tmp_path / "20_lines.jsonl").write_text(json.dumps(case | {"prompt": sample.context + sample.questions[0].text}))
    options = ["--cases", tmp_path / "20_lines.jsonl", "--out", tmp_path / "out", "--max-new-tokens", 3]
    done = run("bench", "lines", tmp_path / "model", "--methods", "exact", *options)
    assert done.returncode == 0, done.stderr
    assert "lines: 20_lines" in done.stdout
    rows = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
    assert len(rows) == 3  # the run, and one case both ways
    assert json.loads(rows[1])["length"] == json.loads(rows[1])["tokens"]


@pytest.mark.slow
def test_training_from_the_command_line(tmp_path):
    done = run("train-demo", tmp_path / "run", "--tokens", 9000, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    again = run("train-demo", tmp_path / "run", "--tokens", 10000)
    assert again.returncode == 2
    assert "holds a run with another recipe" in " ".join(again.stderr.split())
