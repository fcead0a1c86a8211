"""The content of the board, from rows: columns, lines by budget, and the winners."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvsketch.evaluation.board.columns import Column, Lined, answer_columns, speed_columns, text_column
from kvsketch.evaluation.board.gathering import Rows
from kvsketch.evaluation.board.lines import OWN, Line
from kvsketch.evaluation.board.ranking import BEST, LEVEL_WITH_BEST, Ranked, ranked
from kvsketch.evaluation.results.names import ANSWERS, SPEED, TEXTS
from kvsketch.evaluation.results.rows import Row
from kvsketch.evaluation.tasks.haystack import MADE_UP


@dataclass(frozen=True, kw_only=True)
class Section:
    """The lines of one budget, with what all columns say of them, and what all tasks say."""

    keep: float
    lines: Sequence[Ranked]
    tasks: Sequence[Ranked]

    def winners(self, column: int) -> tuple[Ranked | None, list[Line]]:
        """The best line in a column, and all lines that cannot be told from it."""
        marked = [(one, cell.mark) for one in self.lines if (cell := one.cells[column]) is not None]
        best = next((one for one, mark in marked if mark == BEST), None)
        return best, [one.line for one, mark in marked if mark == LEVEL_WITH_BEST]


@dataclass(frozen=True, kw_only=True)
class Content:
    """Everything that a page shows."""

    columns: Sequence[Column]
    tasks: Sequence[Column]  # a column for each task
    sections: Sequence[Section]
    whole: Sequence[Ranked]  # lines that hold everything; exact first
    whole_tasks: Sequence[Ranked]
    unable: Sequence[tuple[Column, float, int]]  # tasks the model cannot do with everything held: score and prompts
    prose: bool  # whether some needles lie in texts of the user's

    @property
    def kinds(self) -> set[str]:
        """The kinds of which there are columns."""
        return {column.kind for column in self.columns}

    @property
    def packages(self) -> list[str]:
        """The packages beside ours."""
        return sorted({line.package for column in self.columns for line in column.figures} - {OWN})


def content(rows: Rows) -> Content:
    """The board of these rows."""
    answers = rows.beside_exact(ANSWERS)
    asked = {_place(line, row) for line, row in answers if not line.reference}
    compared = [(line, row) for line, row in answers if _place(line, row) in asked]
    means, tasks = answer_columns(compared)
    columns = [*means, *text_column(rows.beside_exact(TEXTS)), *speed_columns(rows.beside_exact(SPEED))]
    lines = list(dict.fromkeys(line for column in columns for line in column.figures))
    whole = sorted((line for line in lines if line.keep is None), key=lambda line: (not line.reference, line.package))
    return Content(
        columns=columns,
        tasks=tasks,
        sections=[_section(keep, columns, tasks, lines) for keep in _keeps(lines)],
        whole=ranked(columns, whole),
        whole_tasks=ranked(tasks, whole[:1]),
        unable=_unable(answers, compared),
        prose=any(row["haystack"] not in MADE_UP for _, row in compared),
    )


def _section(keep: float, columns: Sequence[Column], tasks: Sequence[Column], lines: Sequence[Line]) -> Section:
    own = [line for line in lines if line.keep == keep]
    return Section(keep=keep, lines=ranked(columns, own), tasks=ranked(tasks, own))


def _keeps(lines: Iterable[Line]) -> list[float]:
    return sorted({line.keep for line in lines if line.keep is not None}, reverse=True)


def _place(line: Line, row: Row) -> tuple[object, ...]:
    """Where a row belongs: its package, task, question mode, haystack and length."""
    return line.package, *(row[name] for name in ("task", "asked", "haystack", "length"))


def _unable(answers: Lined, compared: Lined) -> list[tuple[Column, float, int]]:
    """Tasks on which exact was asked and then no method, with exact's score and count."""
    there = {id(row) for _, row in compared}
    left = [(line, row) for line, row in answers if id(row) not in there and line.package == OWN]
    _, tasks = answer_columns(left)
    return [(column, figure.value, figure.count) for column in tasks for figure in column.figures.values()]
