"""`kvsketch demo`: methods side by side on two documents."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from kvsketch.cli.app import check_folder, output
from kvsketch.cli.ending import stop_in_order
from kvsketch.cli.models import check_device
from kvsketch.cli.notes import notes, say
from kvsketch.cli.options import Device

if TYPE_CHECKING:
    from kvsketch.evaluation.answers.demo import Row

SHOWN = 7  # characters of an answer
NOTE = (
    "holds: bytes of the cache, over those of a full one. reads: how much of what was seen a new token looks at. "
    "Green answers are right. No question is known when a document is read: questions about tokens "
    "that every head has dropped cannot be answered. This is one document of each kind, docs/results.md has hundreds; "
    "kvsketch methods lists the other methods."
)


def demo(
    tokens: Annotated[int, typer.Option(min=500, max=6000, help="Length of each document in tokens.")] = 4000,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also draw a picture, in this folder.")] = None,
    device: Device = None,
) -> None:
    """Read two documents with a few methods, ask about them later, and show what each holds, reads and answers."""
    if out is not None:
        check_folder("--out", out)
    place = check_device(device)
    console = output()
    console.print(
        f"The small model inside the package reads two documents of {tokens:,} tokens, each with six caches. The "
        "questions come later, the first about the beginning of a document, the last about its end.",
        soft_wrap=True,
    )
    rows = _run_with_bar(tokens, place)
    from kvsketch.evaluation.answers.demo import DOCUMENTS

    for name, what in DOCUMENTS.items():
        console.print(_table(what, [row for row in rows if row.document == name]))
    console.print(NOTE)
    if out is not None:
        _draw(rows, out)


def _run_with_bar(tokens: int, device: str) -> "list[Row]":
    from kvsketch.evaluation.answers.demo import DOCUMENTS, METHODS, run_demo

    stop_in_order()
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), console=notes, transient=True
    ) as bar:
        task = bar.add_task("", total=len(METHODS) * len(DOCUMENTS))
        rows = []
        for row in run_demo(tokens, lambda method: bar.update(task, description=method), device=device):
            rows.append(row)
            bar.advance(task)
    return rows


def _table(what: str, rows: "Sequence[Row]") -> Table:
    from kvsketch.evaluation.answers.demo import METHODS

    table = Table(title=what[0].upper() + what[1:], box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("method", overflow="fold")
    for heading in ("holds", "reads"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("answers", overflow="fold")
    table.add_column("right", justify="right", no_wrap=True)
    for row in rows:
        texts = [Text(answer.text[:SHOWN], style="green" if answer.right else "red") for answer in row.answers]
        right = f"{sum(answer.right for answer in row.answers)} of {len(row.answers)}"
        name = Text.assemble((row.method.split("(")[0], "bold"), f"\n{METHODS[row.method]}")
        table.add_row(name, f"{row.holds:.0%}", f"{row.reads:.0%}", Text(" ").join(texts), right)
    return table


def _draw(rows: "Sequence[Row]", folder: Path) -> None:
    from kvsketch.evaluation.answers.demo_picture import demo_picture
    from kvsketch.evaluation.results.panels import save

    save(demo_picture(rows), folder / "demo.png")
    say(f"picture: {folder / 'demo.png'}")
