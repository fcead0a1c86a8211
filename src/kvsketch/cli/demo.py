"""`kvsketch demo`: methods side by side on one document."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from kvsketch.cli.app import MOST, check_folder, output, size_for_people
from kvsketch.cli.ending import stop_in_order
from kvsketch.cli.notes import notes

if TYPE_CHECKING:
    from kvsketch.evaluation.answers.demo import Row

TASKS = ("lines", "niah_single", "niah_multikey")  # of the report: one dense, two that are not
LENGTHS = (1000, 2000)
SHOWN = 7  # characters of an answer: a number has five, and six columns must fit a line
NOTE = (
    "error: how far attention's answers are from exact attention's after the record was read, relative; "
    "mean over layers and heads. read/s, write/s: tokens a second. Green answers are right. Every line of this "
    "record is random, so what a method dropped it cannot know; needles in noise are the other case: "
    "kvsketch bench ruler --samples 20 --lengths 2000 --out FOLDER"
)


def demo(
    tokens: Annotated[int, typer.Option(min=500, max=6000, help="Length of the document.")] = 4000,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also run a few tasks, and write a report to this folder.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=MOST, help="Prompts for each task and length of the report.")] = 5,
) -> None:
    """Compare methods on one record of lines: bytes, speed, and the answers to six questions."""
    if out is not None:
        check_folder("--out", out)
    console = output()
    console.print(
        f"The model inside the package reads a record of lines, {tokens:,} tokens. Then it is asked for six of them, "
        "the first near the start of the record, the last near its end.",
        soft_wrap=True,
    )
    rows = _run_with_bar(tokens)
    console.print(_costs_table(rows))
    console.print(_answers_table(rows))
    console.print(NOTE)
    if out is not None:
        _report(out, samples)


def _run_with_bar(tokens: int) -> "list[Row]":
    from kvsketch.evaluation.answers.demo import demo_methods, run_demo

    stop_in_order()
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), console=notes, transient=True
    ) as bar:
        task = bar.add_task("", total=len(demo_methods()))
        rows = []
        for row in run_demo(tokens, lambda method: bar.update(task, description=method)):
            rows.append(row)
            bar.advance(task)
    return rows


def _costs_table(rows: "list[Row]") -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", overflow="fold")
    for heading in ("cache", "of full", "error", "read/s", "write/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        error = row.report.error
        table.add_row(
            row.method,
            size_for_people(row.report.nbytes),
            f"{row.report.nbytes / row.report.full_nbytes:.1%}",
            "0" if error is None else f"{error:.3f}",
            f"{row.prefill.rate:,.0f}",
            f"{row.decode.rate:,.0f}",
        )
    return table


def _answers_table(rows: "list[Row]") -> Table:
    table = Table("line at", box=SIMPLE_HEAD, pad_edge=False)
    for question in rows[0].answers:
        table.add_column(f"{question.depth:.0%}", justify="right", no_wrap=True)
    table.add_column("right", justify="right", no_wrap=True)
    for row in rows:
        texts = (Text(answer.text[:SHOWN], style="green" if answer.right else "red") for answer in row.answers)
        right = f"{sum(answer.right for answer in row.answers)} of {len(row.answers)}"
        table.add_row(row.method.split("(")[0], *texts, right)
    return table


def _report(folder: Path, samples: int) -> None:
    from kvsketch.cli.bench import measure, write_report
    from kvsketch.evaluation.answers.demo import demo_methods
    from kvsketch.evaluation.answers.plan import Plan
    from kvsketch.evaluation.embedded import load_embedded

    model, tokenizer = load_embedded()
    plan = Plan(tasks=TASKS, methods=demo_methods(), lengths=LENGTHS, samples=samples, wording="compact", raw=True)
    measure(plan, model, tokenizer, None, folder)
    write_report(folder)
