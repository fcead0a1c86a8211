"""`kvsketch demo`: methods side by side on one document."""

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from kvsketch.cli.app import notes, size_for_people

TASKS = ("lines", "kv", "niah_multikey", "niah_multiquery")  # of the report


def demo(
    tokens: Annotated[int, typer.Option(min=500, max=6000, help="Length of the document.")] = 4000,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also run a few tasks, and write a report to this folder.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Prompts for each task and length of the report.")] = 16,
) -> None:
    """Compare methods on one record of lines: bytes, speed, and the answers to six questions."""
    from kvsketch.evaluation.demo import QUESTIONS, demo_methods, run_demo

    console = Console()
    console.print(
        f"The model inside the package reads a record of lines, {tokens:,} tokens. Then it is asked for six of them, "
        "the first near the start of the record, the last near its end.",
        soft_wrap=True,
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", overflow="fold")
    for heading in ("cache", "of full", "error", "read/s", "write/s", "right"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number in range(1, QUESTIONS + 1):
        table.add_column(f"{number}", justify="right", no_wrap=True)
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), console=notes, transient=True) as bar:
        task = bar.add_task("", total=len(demo_methods()))
        for row in run_demo(tokens, lambda method: bar.update(task, description=method)):
            error = row.report.error
            table.add_row(
                row.method,
                size_for_people(row.report.nbytes),
                f"{row.report.nbytes / row.report.full_nbytes:.1%}",
                "0" if error is None else f"{error:.3f}",
                f"{row.prefill.rate:,.0f}",
                f"{row.decode.rate:,.0f}",
                f"{sum(a.right for a in row.answers)} of {len(row.answers)}",
                *(Text(a.text, style="green" if a.right else "red") for a in row.answers),
            )
            bar.advance(task)
    console.print(table)
    console.print(
        "error: how far attention's answers are from exact attention's after the record was read, relative; "
        "mean over layers and heads.\nread/s, write/s: tokens a second. Green answers are right. Every line of this "
        "record is random, so what a method dropped it cannot know;\nneedles in noise are the other case: "
        "kvsketch bench ruler --samples 20 --lengths 2000"
    )
    if out is not None:
        _report(out, samples)


def _report(folder: Path, samples: int) -> None:
    from kvsketch.cli.bench import measure, write_report
    from kvsketch.evaluation.demo import demo_methods
    from kvsketch.evaluation.embedded import load_embedded
    from kvsketch.evaluation.runner import Plan

    model, tokenizer = load_embedded()
    plan = Plan(tasks=TASKS, methods=demo_methods(), lengths=(1000, 2000), samples=samples, wording="compact", raw=True)
    measure(plan, model, tokenizer, None, folder)
    write_report(folder)
