"""Means over rows, each with its standard error."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvsketch.evaluation.rows import Row, name_alone


@dataclass(frozen=True, kw_only=True)
class Mean:
    """The rows of one setting."""

    task: str  # with the name of its file, where the prompts came from one
    asked: str
    length: int
    method: str
    count: int
    tokens: float  # in the prompts, which may be shorter than asked for
    score: float
    error: float  # standard error of the score
    nbytes: float
    share: float  # of the bytes of a full cache
    seconds: float
    looked_up: float | None = None  # share of the past that a query reads, where tokens are looked up

    def __str__(self) -> str:
        return f"{self.score:.3f} ± {self.error:.3f}" if self.count > 1 else f"{self.score:.3f}"


def summarise(rows: Iterable[Row]) -> list[Mean]:
    """One mean for each task, question mode, length and method, in the order in which they first come."""
    rows = list(rows)
    values = defaultdict[tuple[str, str], set[Any]](set)
    for row in rows:
        for name in () if row["cases"] else ("wording", "haystack", "template", "new_tokens"):
            values[row["task"], name].add(row[name])
    mixed = {setting for setting, found in values.items() if len(found) > 1}
    groups = defaultdict[tuple[str, str, int, str], list[Row]](list)
    for row in rows:
        groups[_title(row, mixed), row["asked"], row["length"], row["method"]].append(row)
    return [_mean(*setting, found) for setting, found in groups.items()]


def _title(row: Row, mixed: set[tuple[str, str]]) -> str:
    """The task's name for people, with whatever keeps its rows apart from others in the file."""
    if row["cases"] is not None:
        return f"{row['task']}: {name_alone(row['cases'])}"
    words = {
        "wording": row["wording"],
        "haystack": name_alone(row["haystack"]),
        "template": "chat template" if row["template"] else "raw",
        "new_tokens": f"{row['new_tokens']} new tokens",
    }
    said = [word for name, word in words.items() if (row["task"], name) in mixed]
    return f"{row['task']} ({', '.join(said)})" if said else row["task"]


def standard_error(scores: list[float]) -> float:
    """Of their mean, from their spread; NaN for a single score, where it is not known."""
    return statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else math.nan


def _mean(task: str, asked: str, length: int, method: str, rows: list[Row]) -> Mean:
    scores = [row["score"] for row in rows]
    held = statistics.fmean(row["nbytes"] for row in rows)
    read = [
        row["looked_up"] for row in rows if row.get("looked_up") is not None
    ]  # rows of earlier versions say nothing
    return Mean(
        task=task,
        asked=asked,
        length=length,
        method=method,
        count=len(rows),
        tokens=statistics.fmean(row["tokens"] for row in rows),
        score=statistics.fmean(scores),
        error=standard_error(scores),
        nbytes=held,
        share=held / statistics.fmean(row["full_nbytes"] for row in rows),
        seconds=statistics.fmean(row["seconds"] for row in rows),
        looked_up=statistics.fmean(read) if read else None,
    )
