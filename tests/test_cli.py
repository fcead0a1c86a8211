"""The command line, as a user sees it."""

import html
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from safetensors import safe_open

import kvsketch
import zoo
from commands import SOURCE, finished, process, refused, run
from kvsketch.cli.ending import ending, stop_at_once, stop_in_order
from kvsketch.editions import EDITIONS, EMBEDDED
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.evaluation.embedded.training.tokenizer import build_tokenizer
from kvsketch.evaluation.results.rows import RowsFile, read_rows
from kvsketch.evaluation.tasks import TASKS, Setting
from kvsketch.kernels import native

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 20
LATIN = "caf\u00e9 ".encode("latin-1") * 40
BOOK = "{book}"
ASSETS = Path(kvsketch.__file__).parent / "assets"


def count(text):
    return len(build_tokenizer()(text, add_special_tokens=False)["input_ids"])


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def small_model(tmp_path):
    """A model's folder: its tokenizer is that of the embedded one."""
    model, tokenizer = zoo.build("llama"), build_tokenizer()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_version_and_methods():
    assert run("--version").stdout == f"kvsketch {kvsketch.__version__}\n"
    listed = run("methods").stdout
    assert all(name in listed for name in kvsketch.methods())


def test_text_then_question_then_the_same_from_a_saved_cache(book, tmp_path):
    saved = tmp_path / "book.safetensors"
    options = ("--question", "Which month?", "--max-new-tokens", 12)
    first = run("generate", "--prompt-file", book, "--save-cache", saved, "--report", "--protect", "0:4", *options)
    assert first.returncode == 0, first.stderr
    assert "inside the package" in first.stderr  # it must say so
    for line in (
        "tokens seen", f"{count(TEXT) + 1:,} tokens", "tokens/s", "attention error", "entries per KV head",
        "4 tokens of a row are protected",
    ):  # fmt: skip
        assert line in first.stderr
    assert re.search(rf"^kernels +{re.escape(native.name())}", first.stderr, re.MULTILINE)
    share = float(re.search(r"KiB of .*\((\d+\.\d)%\)", first.stderr)[1])
    assert 25 < share < 50
    with safe_open(saved, "pt") as file:
        assert json.loads(file.metadata()["kvsketch"])["method"] == "kvzip"
    again = run("generate", "--load-cache", saved, *options)
    assert again.stdout == first.stdout
    assert run("generate", "--prompt-file", "-", *options, text=TEXT).stdout == first.stdout


def test_how_the_cache_is_kept_small_if_nothing_is_said(book):
    for more in (["--question", "Which month?"], []):
        done = run("generate", "--prompt-file", book, "--max-new-tokens", 2, *more)
        assert re.search(r"method +kvzip\(keep=0\.25, window=0\.25\) *\n", done.stderr), done.stderr


def test_a_text_that_leaves_no_room_to_read_it_again(small_model, tmp_path):
    """By profile, where there is one: the embedded model has one, whatever its context is said to be."""
    known = shutil.copytree(ASSETS / EDITIONS[EMBEDDED], tmp_path / "known")
    config = json.loads((known / "config.json").read_text())
    (known / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    for folder, method in ((known, "keydiff(keep=0.25, heads='profile')"), (small_model, "keydiff(keep=0.25)")):
        done = run("generate", folder, "--prompt-file", "-", "--question", "?", "--max-new-tokens", 2, text=2 * TEXT)
        assert re.search(rf"again, as kvzip.* does: {re.escape(method)} instead", " ".join(done.stderr.split())), (
            done.stderr
        )
    too_long = run("generate", small_model, "--prompt-file", "-", "--question", "?", text=8 * TEXT)
    refused(too_long, "the text and the question have")
    assert "instead" not in too_long.stderr


def test_text_alone_is_continued(book):
    done = run("generate", "--prompt-file", book, "--max-new-tokens", 12, "--method", "exact", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    model, tokenizer = load_embedded("float32")  # what the model makes of prose is near a tie
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert done.stdout.strip("\n") == tokenizer.decode(expected, skip_special_tokens=True).strip("\n")


def test_a_model_in_a_folder_with_a_chat_template(book, small_model):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    tokenizer.save_pretrained(small_model)
    arguments = ["generate", small_model, "--prompt-file", book, "--question", "Which month?"]
    arguments += ["--max-new-tokens", 6, "--chunk", 100, "--method", "uniform(keep=0.5, prefill='streaming')"]
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert f"{count('<user>' + TEXT):,} tokens" in done.stderr
    assert f"{count(TEXT) + 1:,} tokens" in run(*arguments, "--raw").stderr  # and the one for the beginning


# -- what is wrong ends with one line and code 2

MISTAKES = [
    ([], "give a text with --prompt-file, or a saved cache"),
    (["--prompt-file", BOOK, "--load-cache", "x", "--question", "?"], "and not both"),
    (["--load-cache", "x"], "--load-cache needs a --question"),
    (["--load-cache", "x", "--question", "?"], "there is no file x"),
    (["--load-cache", BOOK, "--question", "?"], "is damaged: it is cut off, or no file of tensors"),
    (["--load-cache", "x", "--question", "?", "--save-cache", "y"], "--save-cache keeps the cache of a text"),
    (["--load-cache", "x", "--question", "?", "--method", "exact"], "keeps the one it was made with"),
    (["--load-cache", "x", "--question", "?", "--protect", "0:4"], "--protect does not go with --load-cache"),
    (["--prompt-file", BOOK, "--protect", "4"], "--protect is START:STOP in tokens of the text, as in 0:20, got '4'"),
    (["--prompt-file", "nowhere"], "there is no file nowhere"),
    (["--prompt-file", "[/x]"], "there is no file [/x]"),
    (["--prompt-file", "."], ". is a folder: name a file"),
    (["--prompt-file", "{empty}"], "is empty"),
    (["--prompt-file", "{latin}"], "is no text in UTF-8: byte 3 is 0xe9. Convert it first"),
    (["--prompt-file", BOOK, "--question", "caf\udce9"], r"the argument 'caf\udce9' is no text in UTF-8"),
    (["--prompt-file", BOOK, "--method", "unifrm"], "did you mean uniform?"),
    (["--prompt-file", BOOK, "--method", "uniform(keep='12 parsecs')"], "'12 parsecs' is not a size"),
    (["--prompt-file", BOOK, "--method", f"uniform(keep='{'9' * 400}MB')"], "is more memory than there is"),
    (["--prompt-file", BOOK, "--method", f"uniform(keep={10**20})"], "keep must be at most"),
    (["--prompt-file", BOOK, "--method", f"lsh(bins={10**20})"], "bins must be at most 65,536"),
    (["--prompt-file", BOOK, "--method", f"uniform(seed={10**30})"], "seed must be a whole number from 0 to"),
    (["--prompt-file", BOOK, "--method", "uniform(keep=0.1, keep=0.9)"], "keep is given 2 times: leave one out"),
    (["--prompt-file", BOOK, "--method", "uniform(keep=1e999)"], "keep must be a fraction"),
    (["--prompt-file", BOOK, "--temperature", "1e-320"], "--temperature must be 0, or a number from 0.0001 on"),
    (["--prompt-file", BOOK, "--temperature", "inf"], "--temperature must be 0, or a number from 0.0001 on"),
    (["--prompt-file", BOOK, "--max-new-tokens", 10**20], "--max-new-tokens': Input should be less than"),
    (["--prompt-file", BOOK, "--chunk", 0], "--chunk': Input should be greater than"),
    (["--prompt-file", BOOK, "--save-cache", "no/such/folder/c"], "there is no folder"),
    (["--prompt-file", BOOK, "--save-cache", "/dev/null"], "/dev/null is no regular file"),
    (["--prompt-file", BOOK, "--save-cache", BOOK], "book.txt, which is an input: name another file"),
    (["--prompt-file", BOOK, "--save-cache", "{latin}"], "latin.txt, which is no saved cache: name another file, or"),
    (["--load-cache", ".", "--question", "x"], ". is a folder: name a file"),
    (["--prompt-file", BOOK, "--protect", "5:2"], "--protect is START:STOP with STOP after START"),
    (["--prompt-file", BOOK, "--seed", 3], "for a --temperature that is not 0, got 3"),
    (["--prompt-file", BOOK, "--dtype", "int3"], "--dtype must be auto or one of"),
    (["--prompt-file", BOOK, "--device", "meta"], "--device 'meta' is not there"),
    (["--prompt-file", BOOK, "--temperature=-1"], "greater than or equal to 0, got '-1'. See kvsketch generate --help"),
    (["--prompt-file", BOOK, "--method", "(" * 5000], "cannot read the spec"),
    (["--prompt-file", BOOK, "--method", "[/]"], "cannot read the spec '[/]'"),
    (["--prompt-file", BOOK, "--[bold]"], "No such option: --[bold]. See kvsketch generate --help"),
    (["~/nowhere", "--prompt-file", BOOK], "there is no folder ~/nowhere: name a model's folder"),
    (["[/]", "--prompt-file", BOOK], "[/] cannot be loaded as a model with its tokenizer"),
    (
        ["smolm2", "--prompt-file", BOOK],
        "There is no folder of this name; those of ours are embedded, embedded-first, smollm2",
    ),
    (["caf\udce9", "--prompt-file", BOOK], r"the argument 'caf\udce9' is no text in UTF-8"),
    (["--prompt-file", BOOK, "--device", "abacus"], "--device 'abacus' is not there"),
    (["{broken}", "--prompt-file", BOOK], "cannot be loaded as a model with its tokenizer (SafetensorError"),
    (["{other}", "--prompt-file", BOOK], "the model has tokens 0 to 96: is this another model's tokenizer?"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_of_generate(arguments, message, book, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(LATIN)
    named = [str(argument) for argument in arguments]
    places = {"book": book, "empty": tmp_path / "empty.txt", "latin": tmp_path / "latin.txt"}
    for folder in ("broken", "other"):
        places[folder] = tmp_path / folder
        if f"{{{folder}}}" in named:
            zoo.build("llama").save_pretrained(tmp_path / folder)
            build_tokenizer().save_pretrained(tmp_path / folder)
    if "{broken}" in named:
        (tmp_path / "broken" / "model.safetensors").write_text("x")
    before = sorted(tmp_path.iterdir())
    filled = [argument.format(**places) if argument.startswith("{") else argument for argument in named]
    refused(run("generate", *filled), message)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("text", "message"), [(LATIN, "standard input is no text in UTF-8"), ("", "input is empty")])
def test_mistakes_of_standard_input(text, message):
    refused(run("generate", "--prompt-file", "-", text=text), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["words"], "unknown suite 'words'; there are lines, needle, ruler, infinite, all, error"),
        (["ruler", "--tasks", "niah"], "the suite ruler has no task 'niah'; it has niah_single"),
        (["lines", "--asked", "never"], "--asked must be before, after or both, got 'never'"),
        (["lines", "--wording", "loud"], "--wording must be one of official, compact, got 'loud'"),
        (["lines", "--lengths", "many"], "--lengths must be numbers with commas between them, got 'many'"),
        (["lines", "--lengths", 10**20], "--lengths must be numbers up to 1,000,000,000"),
        (["lines", "--samples", 10**20], "--samples': Input should be less than"),
        (["needle", "--cases", BOOK], "--cases are LongEval's lines: they need the suite lines, got 'needle'"),
        (["lines", "--cases", BOOK], "line 1: not a LongEval lines case"),
        (["lines", "--cases", "."], ". is a folder: name a file"),
        (["lines", "--cases", "{latin}"], "is no text in UTF-8: byte 3"),
        (["lines", "--tasks", "caf\udce9"], r"the argument 'caf\udce9' is no text in UTF-8"),
        (["lines", "--out", BOOK], "--out must name a folder, a new one or one that is there"),
        (["error", "--seeds", 10**9], "--seeds': Input should be less than"),
        (["error", "--methods", "exact"], "subgen, balancekv, keydiff; the study takes no others"),
        (["error", "--methods", "streaming_heads"], "streaming_heads holds everything in some heads and a window in"),
        (["needle", "--haystack", "nowhere"], "there is no file nowhere"),
        (["lines", "--haystack", BOOK], "none of lines hides anything in a text: leave out --haystack"),
        (["lines", "--methods", "exact; saap(index='no;where')"], "no;where is no index: it has no index.json"),
        (["needle", "--haystack", "{latin}"], "is no text in UTF-8"),
        (["needle", "--depths", "2"], "a depth is a share of the document from 0 to 1, got 2.0"),
        (["needle", "--depths", "nan"], "--depths must be numbers up to"),
        (["needle", "--able", "nan"], "--able must be a score from 0 to 1, got nan"),
        (["needle", "--haystack", BOOK, "--haystack", BOOK], "a haystack is named twice in book.txt, book.txt"),
        (["lines", "--methods", ";"], "name at least one method"),
        (["lines", "--methods", "unifrm"], "did you mean uniform?"),
        (["lines", "--lengths", "20"], "lines: 20 tokens are too few for one sample"),
    ],
)
def test_mistakes_of_bench(arguments, message, book, tmp_path):
    (tmp_path / "latin.txt").write_bytes(LATIN)
    places = {"book": book, "latin": tmp_path / "latin.txt"}
    filled = [str(argument).format(**places) for argument in arguments]
    samples = [] if "--samples" in filled or filled[0] == "error" else ["--samples", 1]
    out = [] if "--out" in filled else ["--out", tmp_path / "out"]
    refused(run("bench", *filled, *out, *samples), message)
    assert not (tmp_path / "out").exists()


def test_methods_are_measured_only_where_the_model_is_able(tmp_path):
    """What is left out is said, and found again in the rows when the same command goes on."""
    method = "streaming_llm(keep=0.25)"
    arguments = ["bench", "infinite", "--tasks", "passkey,math_find", "--lengths", 300, "--asked", "after"]
    arguments += ["--able", 0.8, "--methods", method, "--samples", 4, "-o", tmp_path]
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    said = re.search(r"left out, as the model scores less than 0\.8 .* held: (.*)", done.stderr)
    assert re.fullmatch(r"math_find at 300 tokens, after \(0\.\d\d, n = 4\)", said.group(1))
    rows = read_rows(tmp_path / "rows.jsonl")[1]
    measured = Counter((row["task"], row["method"]) for row in rows)
    assert measured == {("passkey", "exact"): 4, ("math_find", "exact"): 4, ("passkey", method): 4}
    first, _, second = done.stdout.partition("passkey, 300 tokens")
    assert "With everything held: what counts is 0.8 or more" in first
    assert re.search(r"passkey +300 +after +4 +1\.000 \[0\.51, 1\.00\] +yes", first)
    assert re.search(r"math_find +300 +after +4 +0\..* no", first)
    assert method in second
    assert "math_find" not in second
    again = run(*arguments)
    assert again.stdout == done.stdout
    assert read_rows(tmp_path / "rows.jsonl")[1] == rows
    assert run("bench", "report", tmp_path, "--able", 0.8).stdout == done.stdout
    assert "math_find, 300 tokens" in run("bench", "report", tmp_path).stdout


def test_a_mistake_is_told_in_one_line():
    for arguments in (["generate", "--chunk", 0], ["nope"], ["bench", "lines"], ["generate", "--method", "x" * 10_000]):
        done = run(*arguments)
        refused(done, "error: ")
        assert done.stderr.count("\n") == 1
        assert len(done.stderr) < 1100
    shown = run("bench")  # which says nothing of what to do: help is what is wanted
    assert (shown.returncode, shown.stderr) == (2, "")
    assert "Usage: kvsketch bench" in shown.stdout


ODD = "[/] [red]$x_1^{$ \\frac :smile:"  # rich's markup, and matplotlib's mathematics


def test_names_are_shown_as_they_are(tmp_path):
    """In the table, in the pictures and on the page."""
    row = {"task": "lines", "wording": "official", "haystack": "noise", "cases": f"{ODD}#12", "template": False}
    row |= {"asked": "after", "length": 900, "depth": None, "new_tokens": 9, "tokens": 900, "sample": 0, "score": 1.0}
    row |= {"nbytes": 5, "full_nbytes": 9, "seconds": 0.1, "looked_up": None, "method": f"saap(index='{ODD}')"}
    RowsFile(tmp_path / "rows.jsonl", {"model": ODD, "fingerprint": "1", "kvsketch": "0"}).add(
        [row, row | {"length": 500}]
    )
    done = run("bench", "report", tmp_path, columns=120)
    assert done.returncode == 0, done.stderr
    assert f"saap(index='{ODD}')" in done.stdout
    assert f"lines: {ODD}, 900 tokens" in done.stdout
    assert html.escape(ODD) in (tmp_path / "report.html").read_text()
    assert (tmp_path / "length-after.png").is_file()


# -- the world around the command

LOADED = """
import sys
sys.argv = {argv}
try:
    {start}
except SystemExit as stop:
    assert not stop.code, stop.code
heavy = {{name.split(".")[0] for name in sys.modules}} & {{
    "torch", "transformers", "scipy", "matplotlib", "numpy", "sklearn", "jinja2", "tokenizers", "safetensors", "triton"
}}
assert not heavy, heavy
"""


@pytest.mark.once
@pytest.mark.parametrize("argument", [None, "--version", "--help", "bench --help", "bench error --help"])
def test_what_needs_no_model_loads_nothing_heavy(argument):
    start = "import kvsketch" if argument is None else "from kvsketch.cli import main; main()"
    script = LOADED.format(argv=["kvsketch", *(argument or "").split()], start=start)
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert argument is None or done.stdout


@pytest.mark.once
@pytest.mark.parametrize(
    "sign",
    [
        "torch.storage",  # in the middle of torch's import
        pytest.param("inside the package", marks=pytest.mark.slow),
        pytest.param("Loading weights", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_is_quiet_while_things_are_loaded(sign, book):
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONPROFILEIMPORTTIME": "1"}  # imports are told
    command = [sys.executable, "-m", "kvsketch", "generate", "--prompt-file", book, "--max-new-tokens", "500"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        assert any(sign in line for line in child.stderr)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert out == ""
    said = [line for line in err.splitlines() if not line.startswith(("import time", "Loading weights"))]
    assert not [line for line in said if "Traceback" in line or "rror" in line or "Interrupt" in line], err


def test_ctrl_c_that_a_library_takes_for_something_else_is_still_ctrl_c(capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *handler: None)  # this process is not a command
    monkeypatch.setattr(sys, "argv", ["kvsketch"])

    def load():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ValueError("the model cannot be read") from error

    with pytest.raises(SystemExit) as stop, ending():
        load()
    assert stop.value.code == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("command", "said"), [("fit", "stopped; the same command goes on from here\n"), ("demo", "")])
def test_where_a_command_goes_on_it_says_so_when_it_is_stopped(command, said, capsys, monkeypatch):
    """Typer makes an exit code of Ctrl-C."""
    monkeypatch.setattr(signal, "signal", lambda *handler: None)  # this process is not a command
    monkeypatch.setattr(sys, "argv", ["kvsketch", command])
    with pytest.raises(SystemExit) as stop, ending():
        sys.exit(130)
    assert stop.value.code == 130
    assert capsys.readouterr() == ("", said)


def test_ctrl_c_stays_what_somebody_chose():
    """As nohup and a script's & choose that it does nothing."""
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop_at_once()
        stop_in_order()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop_at_once()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        stop_in_order()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.once
@pytest.mark.parametrize("option", ["--version", "--help"])
def test_a_full_disk_behind_the_output(option):
    with open("/dev/full", "w") as full:
        running = process(option, stdout=full, stderr=subprocess.PIPE)
        _, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (2, b"error: [Errno 28] No space left on device\n")


@pytest.mark.once
def test_nobody_reads_the_help():
    read, write = os.pipe()
    os.close(read)
    running = process("--help", stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    _, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (1, b"")


@pytest.mark.once
def test_a_cache_that_cannot_be_saved_does_not_cost_the_answer(book, tmp_path):
    """Here the file may not be as large as that; a full disk ends the same way."""
    resource = pytest.importorskip("resource")
    options = ["--prompt-file", str(book), "--question", "Which month?", "--max-new-tokens", "5"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        done = run("generate", *options, "--save-cache", tmp_path / "c.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert re.search(r"error: .*File too large, and nothing was written: '.*c\.\s*safetensors'", done.said)
    assert done.stdout == run("generate", *options).stdout != ""
    assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]


def test_a_text_comes_through_a_pipe(book):
    """As the shell's <(command) gives it."""
    read, write = os.pipe()
    os.write(write, TEXT.encode())
    os.close(write)
    done = run("generate", "--prompt-file", f"/dev/fd/{read}", "--max-new-tokens", 3)
    os.close(read)
    assert done.returncode == 0, done.stderr
    assert done.stdout == run("generate", "--prompt-file", book, "--max-new-tokens", 3).stdout


@pytest.mark.once
@pytest.mark.slow
def test_closed_streams(book):
    command = f"{sys.executable} -m kvsketch generate --prompt-file {book} --max-new-tokens 2 >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 0
    nothing = f"{sys.executable} -m kvsketch generate --prompt-file - <&-"
    done = subprocess.run(["bash", "-c", nothing], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "standard input is empty" in done.stderr


@pytest.mark.once
@pytest.mark.slow
def test_nobody_listens_any_more():
    reader = process("sample", "lines", "--tokens", 30000, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    reader.stdout.close()
    with reader.stderr:
        said = reader.stderr.read().decode()
    assert reader.wait(timeout=60) != 0
    assert "Traceback" not in said
    assert "Broken" not in said


@pytest.mark.once
@pytest.mark.slow
def test_a_run_that_is_stopped_reports_what_it_has(tmp_path):
    """Ctrl-C; and after a kill, when nobody could report, a command does."""
    rows = tmp_path / "rows.jsonl"
    options = ["bench", "lines", "--lengths", "500", "--samples", "5000", "--batch", "1", "--asked", "after"]
    running = process(*options, "--methods", "exact", "-o", tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not rows.exists() or rows.read_bytes().count(b"\n") < 4:
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert b"Traceback" not in err
    assert b"stopped: what follows is from the rows measured so far" in err
    assert b"Run the same command again to go on" in err
    count = len(read_rows(rows)[1])
    assert re.search(rf"exact +{count} ", out.decode())
    page = tmp_path / "report.html"
    assert f"n = {count}" in page.read_text()
    page.unlink()
    assert run("bench", "report", tmp_path).stdout == out.decode()
    assert page.is_file()


def test_a_report_of_nothing(tmp_path):
    refused(run("bench", "report", tmp_path), "has no rows.jsonl")


# -- the rest of it


def test_the_demo_shows_answers_side_by_side_and_draws_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvsketch.evaluation.answers.demo.QUESTIONS", 2)
    done = run("demo", "--tokens", 1500, "--out", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(\w+) +(\d+)% +(\d+)% .*?(\d) of (\d)", done.stdout)
    assert [row[0] for row in found] == 2 * ["exact", "streaming_llm", "kvzip", "kvzip", "kvzip", "saap"]
    assert [row[3:] for row in found if row[0] == "exact"] == [("2", "2"), ("2", "2")]
    held = [int(row[1]) for row in found[:6]]
    assert held[0] >= 100 > held[1] >= held[2] > held[3] > held[4]
    assert int(found[5][2]) <= 20 < 100 <= held[5], "everything is held, and little is read: in all layers, and latest"
    right = [int(row[3]) for row in found]
    assert min(right[2], right[5], right[8], right[11]) == 2, "a quarter of the recommended, and what looks up, answer"
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["demo.png"]
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_the_benchmarks_are_listed_with_a_line_each():
    listed = run("bench", "--help").stdout
    for name in ("lines", "needle", "ruler", "infinite", "error", "report"):
        assert re.search(rf"│ {name} +[A-Z].*\w", listed), name


def test_a_benchmark_on_a_users_model_and_longevals_cases(small_model, tmp_path):
    sample = TASKS["lines"].make(random.Random(0), Setting(size=20))
    case = {"random_idx": ["x", 3], "num_lines": 20, "expected_number": int(sample.questions[0].answers[0])}
    (tmp_path / "20_lines.jsonl").write_text(json.dumps(case | {"prompt": sample.context + sample.questions[0].text}))
    options = ["--cases", tmp_path / "20_lines.jsonl", "--out", tmp_path / "out", "--max-new-tokens", 3]
    done = run("bench", "lines", small_model, "--methods", "exact", *options)
    assert done.returncode == 0, done.stderr
    assert "lines: 20_lines" in done.stdout
    _, rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert len(rows) == 2  # one case, both ways
    assert rows[0]["length"] == rows[0]["tokens"]


def test_tables_say_what_was_counted_on_80_columns(tmp_path):
    methods = "exact; random_buckets(buckets=16, window=64, probes=4); clustergen(keep=0.125, weights='none')"
    options = ["--lengths", 500, "--samples", 2, "--asked", "after", "--out", tmp_path]
    done = run("bench", "needle", "--methods", methods, *options)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "clustergen(keep=0.125, weights='none')" in done.stdout
    assert "probes=4, " in done.stdout
    assert "buckets=16)" in done.stdout  # the longest name goes on in the next line
    assert "1.000 [0.34, 1.00]" in done.stdout  # 2 of 2 is not certain


@pytest.mark.once
@pytest.mark.slow
def test_training_from_the_command_line(tmp_path):
    done = run("train-demo", tmp_path / "run", "--tokens", 3000, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    again = run("train-demo", tmp_path / "run", "--tokens", 4000)
    refused(again, "holds a run with other settings")


def test_as_a_module_in_a_process_of_its_own():
    done = finished("methods")
    assert (done.returncode, done.stdout) == (0, run("methods").stdout)
