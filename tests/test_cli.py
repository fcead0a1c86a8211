"""The command line, run as a user runs it."""

import json
import re
import subprocess
import sys

import pytest
from safetensors import safe_open

import kvsketch
import zoo
from kvsketch.evaluation.stand_in import byte_tokenizer, stand_in_model

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 20


def run(*arguments, text=None):
    return subprocess.run(
        [sys.executable, "-m", "kvsketch", *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )


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
    assert len(first.stdout.strip("\n")) > 0
    assert "random weights" in first.stderr  # it must say so
    for line in ("tokens seen", f"{len(TEXT):,} tokens", "tokens/s", "attention error", "entries per KV head"):
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
    tokenizer, model = byte_tokenizer(), stand_in_model()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert done.stdout.strip("\n") == tokenizer.decode(expected).strip("\n")


@pytest.mark.slow
def test_a_model_in_a_folder_with_a_chat_template(book, tmp_path):
    model, tokenizer = zoo.build("llama"), byte_tokenizer()
    model.resize_token_embeddings(257)
    model.save_pretrained(tmp_path / "model")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = ["generate", tmp_path / "model", "--prompt-file", book, "--question", "Which month?"]
    arguments += ["--max-new-tokens", 6, "--chunk", 100, "--method", "uniform(keep=0.5, prefill='streaming')"]
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    templated = len("<user>") + len(TEXT)
    assert f"{templated:,} tokens" in done.stderr
    assert f"{len(TEXT):,} tokens" in run(*arguments, "--raw").stderr


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
def test_the_demo_compares_methods_and_says_that_its_model_is_random():
    done = run("demo", "--tokens", 800)
    assert done.returncode == 0, done.stderr
    assert "random weights" in done.stdout
    for name in ("exact", "streaming_llm", "uniform"):
        assert name in done.stdout
    shares = [float(share) for share in re.findall(r"(\d+\.\d)%", done.stdout)]
    assert len(shares) == 4
    assert shares[0] > 99 > 50 > max(shares[1:])
    assert "48 of 48" in done.stdout  # exact agrees with itself
