"""What the columns of the board say of each line, as pure functions of rows."""

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from kvsketch.evaluation.answers.summary import wilson
from kvsketch.evaluation.board.lines import OWN, Line
from kvsketch.evaluation.board.names import SAME_PROMPT
from kvsketch.evaluation.results.ratios import ratio_of
from kvsketch.evaluation.results.rows import Row, key_of
from kvsketch.evaluation.tasks.haystack import MADE_UP
from kvsketch.evaluation.texts.summary import LEAST

LIMIT = 1.05  # times the budget: a line that holds more does not count in it
NOISE, PROSE = "noise and records", "prose"
Lined = Sequence[tuple[Line, Row]]
Pairs = Mapping[Any, Mapping[Any, float]]  # values by cell, and in each cell by prompt, window or step


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What a column says of a line. `share`: bytes held over exact's, the largest of all tasks that this comes from."""

    value: float
    text: str
    note: str = ""
    count: int
    share: float
    pairs: Pairs = field(default_factory=dict)  # compared with those of other lines; larger where the value is larger
    spread: tuple[float, float] | None = None  # the least and the most measured; compared where there are no pairs

    def over(self, line: Line) -> bool:
        """Whether more is held than the line's budget allows."""
        return line.keep is not None and self.share > LIMIT * line.keep


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the board. `kind`: which explanation on the page belongs to it; `where`: text below its title."""

    kind: str
    title: str
    where: str = ""
    more: bool  # whether more is better
    figures: Mapping[Line, Figure]

    @property
    def counts(self) -> str:
        """How many prompts, windows or turns its figures come from."""
        found = {figure.count for figure in self.figures.values()} or {0}
        low, high = min(found), max(found)
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"


# -- answers


def answer_columns(rows: Lined) -> tuple[list[Column], list[Column]]:
    """Means over tasks, for each question mode, kind of text and length; and columns of the single tasks."""
    groups = defaultdict[tuple[str, str, int], list[tuple[Line, Row]]](list)
    for line, row in rows:
        groups[row["asked"], kind_of(row), row["length"]].append((line, row))
    means, tasks = list[Column](), list[Column]()
    lengths = {length for _, _, length in groups}
    for (asked, kind, length), found in sorted(groups.items(), key=lambda group: group[0]):
        by_line = _by_task(found)
        names = list(dict.fromkeys(row["task"] for _, row in found))
        where = f"{kind}, {length:,} tokens" if len(lengths) > 1 else kind
        means.append(Column(kind=asked, title=asked, where=where, more=True, figures=_answers(by_line, names)))
        for name in names:
            figures = _answers(by_line, [name])
            tasks.append(Column(kind=asked, title=name, where=f"{asked}, {where}", more=True, figures=figures))
    return means, tasks


def kind_of(row: Row) -> str:
    """Prose if the row's needle lies in a text of the user's; everything else is made up."""
    return NOISE if row["haystack"] in MADE_UP else PROSE


def _by_task(rows: Lined) -> dict[Line, dict[str, dict[Hashable, Row]]]:
    found: dict[Line, dict[str, dict[Hashable, Row]]] = defaultdict(lambda: defaultdict(dict))
    for line, row in rows:
        found[line][row["task"]][key_of(row, SAME_PROMPT)] = row
    return found


def _answers(by_line: Mapping[Line, Mapping[str, Mapping[Hashable, Row]]], tasks: Sequence[str]) -> dict[Line, Figure]:
    """The mean of the tasks' means for each line; lines that lack a task get none."""
    figures = dict[Line, Figure]()
    for line, found in by_line.items():
        if not all(found.get(task) for task in tasks):
            continue
        scores = {task: {key: row["score"] for key, row in found[task].items()} for task in tasks}
        score = statistics.fmean(statistics.fmean(of_task.values()) for of_task in scores.values())
        count = sum(map(len, scores.values()))
        low, high = wilson(score, count)
        share = max(_share(found[task].values()) for task in tasks)
        figures[line] = Figure(
            value=score, text=f"{score:.3f}", note=f"{low:.2f} to {high:.2f}", count=count, share=share, pairs=scores
        )
    return figures


def _share(rows: Iterable[Row]) -> float:
    held = [(row["nbytes"], row["exact_nbytes"]) for row in rows]
    return sum(own for own, _ in held) / sum(exact for _, exact in held)


# -- texts


def text_column(rows: Lined) -> list[Column]:
    """Divergence of predictions, as the geometric mean over windows; no column if no text was measured."""
    by_line = defaultdict[Line, list[Row]](list)
    for line, row in rows:
        by_line[line].append(row)
    figures = dict[Line, Figure]()
    for line, found in by_line.items():
        logs = {(row["text"], row["start"]): math.log(max(row["kl"], LEAST)) for row in found}
        typical = ratio_of(list(logs.values()))
        note = "" if len(logs) == 1 else f"{typical.low:.3f} to {typical.high:.3f}"
        share, text = _share(found), f"{typical.mean:.3f}"
        figures[line] = Figure(
            value=typical.mean, text=text, note=note, count=len(logs), share=share, pairs={"": dict(logs)}
        )
    return [Column(kind="kl", title="KL on text", more=False, figures=figures)] if figures else []


# -- speed


def speed_columns(rows: Lined) -> list[Column]:
    """Peak memory, seconds to compress, and tokens a second; times of other packages are not compared with ours."""
    found = dict(rows)
    if not found:
        return []
    whole = {line.package: row for line, row in rows if line.reference}
    peaks = {line: _peak(row, whole.get(line.package)) for line, row in found.items()}
    compressing = {line: _compressing(line, row) for line, row in found.items() if not line.reference}
    decoding = {line: _decoding(line, row) for line, row in found.items()}
    return [
        Column(kind="peak", title="peak memory", more=False, figures=peaks),
        Column(kind="compress", title="to compress", more=False, figures=compressing),
        Column(kind="decode", title="decode", more=True, figures=decoding),
    ]


def _peak(row: Row, whole: Row | None) -> Figure:
    peak = float(row["peak_nbytes"])
    note = "" if whole is None else f"{peak / whole['peak_nbytes']:.2f} of exact's"
    return Figure(value=peak, text=_megabytes(peak), note=note, count=1, share=_share([row]), spread=(peak, peak))


def _compressing(line: Line, row: Row) -> Figure:
    """Seconds beyond exact's reading: to take notes, to read a second time, and to choose."""
    times, exact = seconds_to_compress(row), statistics.median(row["exact_reading"])
    middle = statistics.median(times)
    note = f"{min(times):.3f} to {max(times):.3f}; prompt {1 + middle / exact:.2f} ×"
    spread = (min(times), max(times)) if line.package == OWN else None
    return Figure(value=middle, text=f"{middle:.3f} s", note=note, count=len(times), share=_share([row]), spread=spread)


def seconds_to_compress(row: Row) -> list[float]:
    """The times one by one; by noise alone, a reading like exact's can take less time than exact."""
    more = [max(0.0, own - exact) for own, exact in zip(row["reading"], row["exact_reading"], strict=True)]
    if not row["compressing"]:  # the method read and compressed at once
        return more
    return [seconds + noting for seconds, noting in zip(row["compressing"], cycle(more), strict=False)]


def _decoding(line: Line, row: Row) -> Figure:
    logs = [math.log(exact / own) for exact, own in zip(row["exact_step"], row["step"], strict=True)]
    low, middle, high = (math.exp(log) for log in statistics.quantiles(logs, n=4))
    rate = 1 / statistics.median(row["step"])
    note = "" if line.reference else f"{middle:.2f} × exact, {low:.2f} to {high:.2f}"
    pairs = {"": dict(enumerate(logs))} if line.package == OWN else {}
    return Figure(value=middle, text=f"{rate:,.0f} /s", note=note, count=len(logs), share=_share([row]), pairs=pairs)


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
