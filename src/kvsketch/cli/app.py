"""The command `kvsketch` itself, and what its parts share."""

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import kvsketch
from kvsketch.cli.ending import stop_at_once, stop_in_order, was_stopped
from kvsketch.cli.notes import notes, say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

N = TypeVar("N", int, float)
T = TypeVar("T")
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
MOST = 10**9  # limit of all counts; a larger one is a typing error, and would run for ever


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvsketch {kvsketch.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Language models with long contexts and a small KV cache."""


@app.command()
def methods() -> None:
    """List the methods, with a line on what each keeps."""
    table = Table("method", "what it keeps", box=None, pad_edge=False)
    for name, line in kvsketch.methods().items():
        table.add_row(name, line)
    output().print(table)


def output() -> Console:
    """Standard output, for tables; brackets in names are shown as they are, and are not markup."""
    return Console(markup=False, emoji=False)


def say_no_pictures(missing: str, rows: Path) -> None:
    """Say that a package is missing, and that without it there are rows but no pictures."""
    say(f"no pictures: {missing} is not installed (pip install {missing}); the rows are in {rows}")


def progress_bar(*more: ProgressColumn, transient: bool = True) -> Progress:
    """A progress bar with elapsed and remaining time, for anything that takes longer than a moment."""
    stop_in_order()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *more,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=notes, transient=transient)


@contextmanager
def reported(report: Callable[[], None]) -> Iterator[None]:
    """Measure in the body, then report; a run that is stopped is reported too, from the rows that it has by then."""
    stop_in_order()
    try:
        yield
    except BaseException as error:
        if not was_stopped(error):
            raise
        stop_at_once()  # a second Ctrl-C ends the report too
        say("stopped: what follows is from the rows measured so far. Run the same command again to go on")
        try:
            report()
        except (ValueError, OSError) as wrong:
            say(f"no report: {wrong}")
        raise
    report()


def check_folder(what: str, folder: Path) -> None:
    """Refuse a path that cannot be a folder to write to, before any work is done."""
    from kvsketch.files import nearest

    there = nearest(folder)
    if not there.is_dir():
        raise ValueError(f"{what} must name a folder, a new one or one that is there, got {folder}: {there} is a file")
    if not os.access(there, os.W_OK):
        raise ValueError(f"{what} must name a folder that can be written to, got {folder}: {there} cannot")


def check_output(
    option: str, path: Path, inputs: Iterable[Path | None], *, begins: Callable[[bytes], bool], what: str
) -> None:
    """Refuse a file that cannot be written, and an existing one of another kind, which would be overwritten."""
    from kvsketch.files import can_be_written, is_another

    target = can_be_written(path)
    if not target.exists():
        return
    if any(one is not None and one.exists() and one.samefile(target) for one in inputs):
        raise ValueError(f"{option} would overwrite {path}, which is an input: name another file")
    if is_another(target, begins):
        raise ValueError(f"{option} would overwrite {path}, which is no {what}: name another file, or remove it")


def read_text(path: Path) -> str:
    """The text of a file or a pipe; of standard input where the path is -."""
    from kvsketch.files import as_text, read_file

    if str(path) == "-":
        stream = getattr(sys.stdin, "buffer", None)
        content, name = (sys.stdin.read().encode() if stream is None else stream.read()), "standard input"
    else:
        content, name = read_file(path), str(path)
    text = as_text(content, name)
    if not text.strip():
        raise ValueError(f"{name} is empty: there is nothing to read")
    return text


def made_text(task: str, tokens: int, seed: str, tokenizer: "PreTrainedTokenizerBase", questions: int = 0) -> str:
    """A document of a task, of about `tokens` tokens, in the wording that the embedded model knows.

    It ends with at most `questions` questions and their right answers.
    """
    from kvsketch.evaluation.embedded.corpus import answered
    from kvsketch.evaluation.tasks import TASKS, Sample, Setting
    from kvsketch.evaluation.tasks.length import Fitter

    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; there are {', '.join(TASKS)}")

    def written(made: Sample) -> str:
        return answered(Sample(made.context, made.questions[:questions]))

    def count(made: Sample) -> int:
        return len(tokenizer(written(made))["input_ids"])

    setting = Setting(size=1, wording="compact", questions=max(1, questions))
    return written(Fitter(TASKS[task], setting, count).sample(tokens, seed))


def listed(text: str) -> list[str]:
    """The parts of an option's comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def specs(text: str) -> list[str]:
    """The methods of an option's list, which has ; between them; a ; in quotes belongs to a path."""
    parts = re.findall(r"""(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^;])+""", text)
    return [part.strip() for part in parts if part.strip()]


def numbers(option: str, text: str, kind: Callable[[str], N]) -> list[N]:
    """The numbers of an option's comma-separated list."""
    try:
        found = [kind(part) for part in listed(text)]
    except ValueError as error:
        raise ValueError(f"{option} must be numbers with commas between them, got {text!r:.60}") from error
    for number in found:
        if not math.isfinite(number) or abs(number) > MOST:
            raise ValueError(f"{option} must be numbers up to {MOST:,}, got {text!r:.60}")
    return found


def some_numbers(option: str, text: str, kind: Callable[[str], N]) -> list[N]:
    """As `numbers`, and at least one."""
    found = numbers(option, text, kind)
    if not found:
        raise ValueError(f"{option} must be numbers with commas between them, got {text!r}")
    return found


def or_default(value: T | None, default: T) -> T:
    """The value, or the default where none was given."""
    return default if value is None else value


def size_for_people(count: int) -> str:
    """A number of bytes in a unit that suits it."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
