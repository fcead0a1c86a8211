"""A page of results that needs no other file: tables, pictures, and where the numbers come from."""

import base64
from collections.abc import Sequence
from pathlib import Path

from kvsketch.evaluation.answers.able import able_part
from kvsketch.evaluation.answers.pictures import Picture, draw_all
from kvsketch.evaluation.answers.summary import ASKED, Mean, summarise
from kvsketch.evaluation.pages import write_html
from kvsketch.evaluation.results.rows import read_rows
from kvsketch.evaluation.tasks import TASKS


def write_page(rows_path: Path, folder: Path, able: float | None = None) -> Path:
    """Draw the pictures of a file of rows, and write `report.html` beside them.

    With `able`, only of what the model can do: where it scores at least that with everything held.
    """
    runs, rows = read_rows(rows_path)
    if not rows:
        raise ValueError(f"{rows_path} has no rows yet: run a benchmark into this folder first")
    held, counting = ([], rows) if able is None else able_part(rows, able)
    pictures = draw_all(counting, folder)
    means = summarise(counting)
    return write_html(
        folder / "report.html",
        "kvsketch.evaluation.answers",
        "report.html",
        runs=runs,
        count=len(rows),
        able=able,
        held=held,
        tables=[_table(means, asked, title) for asked, title in ASKED.items() if any(m.asked == asked for m in means)],
        pictures=[(picture.caption, _data(picture)) for picture in pictures],
    )


def _table(means: Sequence[Mean], asked: str, title: str) -> dict[str, object]:
    """A table with a line for each method and a column for each task and length."""
    here = [mean for mean in means if mean.asked == asked]
    columns = sorted({(mean.task, mean.length) for mean in here}, key=lambda column: (_place(column[0]), column[1]))
    methods = dict.fromkeys(mean.method for mean in here)
    by_cell = {(mean.method, mean.task, mean.length): mean for mean in here}
    counts = {mean.count for mean in here}
    return {
        "title": title,
        "samples": f"{min(counts):,}" if len(counts) == 1 else f"{min(counts):,} to {max(counts):,}",
        "columns": columns,
        "lines": [(method, [by_cell.get((method, *column)) for column in columns]) for method in methods],
    }


def _place(task: str) -> tuple[int, str]:
    name = task.split(":")[0].split(" (")[0]
    return (list(TASKS).index(name) if name in TASKS else len(TASKS), task)


def _data(picture: Picture) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.path.read_bytes()).decode()
