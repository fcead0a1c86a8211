"""Means over rows, each with an interval that says how certain it is."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from kvsketch.evaluation.results.ratios import NORMAL
from kvsketch.evaluation.results.rows import Row, name_without_digest

ASKED = {"before": "question known before compression", "after": "question asked after compression"}
NOT_AVERAGED = ("wording", "haystack", "template", "new_tokens", "depth")  # rows that differ here stay separate


@dataclass(frozen=True, kw_only=True)
class Mean:
    """The means over the rows of one setting."""

    task: str  # with the name of the file if the prompts came from one
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

    @property
    def interval(self) -> tuple[float, float]:
        """Where the score would lie with many more prompts, in 19 of 20 cases."""
        return wilson(self.score, self.count)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.score:.3f} [{low:.2f}, {high:.2f}]"


def summarise(rows: Iterable[Row]) -> list[Mean]:
    """One mean for each task, question mode, length and method, in the order of their first rows."""
    rows = list(rows)
    title_of = titles(rows)
    groups = defaultdict[tuple[str, str, int, str], list[Row]](list)
    for row in rows:
        groups[title_of(row), row["asked"], row["length"], row["method"]].append(row)
    return [_mean(*setting, found) for setting, found in groups.items()]


def titles(rows: Iterable[Row]) -> Callable[[Row], str]:
    """A readable name for each row: its task, with everything in which the rows of that task differ."""
    rows = list(rows)
    values = defaultdict[tuple[str, str | None, str], set[Any]](set)
    for row in rows:
        for name in NOT_AVERAGED:
            values[row["task"], row["cases"], name].add(_group_value(row, name))
    file_of = _file_names({row[name] for row in rows for name in ("cases", "haystack") if row[name] is not None})

    def title(row: Row) -> str:
        task, cases = row["task"], row["cases"]
        words = {
            "wording": row["wording"],
            "haystack": file_of[row["haystack"]],
            "template": "chat template" if row["template"] else "raw",
            "new_tokens": f"{row['new_tokens']} new tokens",
            "depth": "depths drawn at random" if row["depth"] is None else "given depths",
        }
        said = [words[name] for name in NOT_AVERAGED if len(values[task, cases, name]) > 1]
        named = task if cases is None else f"{task}: {file_of[cases]}"
        return f"{named} ({', '.join(said)})" if said else named

    return title


def _group_value(row: Row, name: str) -> Any:
    """The value that must be equal for rows to be averaged; for depths, only whether they are given."""
    return row[name] is None if name == "depth" else row[name]


def _file_names(names: Collection[str]) -> dict[str, str]:
    """Names of files, without the digest of their content if they still differ without it."""
    times = Counter(map(name_without_digest, names))
    return {name: name if times[name_without_digest(name)] > 1 else name_without_digest(name) for name in names}


def wilson(score: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share that was found in `count` samples.

    It does not say that 12 of 12 are certain. For samples with scores between 0 and 1 it is a little too wide.
    """
    more = NORMAL**2 / count
    middle = (score + more / 2) / (1 + more)
    half = NORMAL * math.sqrt(max(0.0, score * (1 - score)) / count + (NORMAL / (2 * count)) ** 2) / (1 + more)
    return max(0.0, min(score, middle - half)), min(1.0, max(score, middle + half))


def standard_error(scores: list[float]) -> float:
    """The standard error of the mean of scores, from their spread; NaN for a single score, where it is unknown."""
    return statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else math.nan


def _mean(task: str, asked: str, length: int, method: str, rows: list[Row]) -> Mean:
    scores = [row["score"] for row in rows]
    nbytes = statistics.fmean(row["nbytes"] for row in rows)
    # rows of earlier versions say nothing of this
    looked_up = [row["looked_up"] for row in rows if row.get("looked_up") is not None]
    return Mean(
        task=task,
        asked=asked,
        length=length,
        method=method,
        count=len(rows),
        tokens=statistics.fmean(row["tokens"] for row in rows),
        score=statistics.fmean(scores),
        error=standard_error(scores),
        nbytes=nbytes,
        share=nbytes / statistics.fmean(row["full_nbytes"] for row in rows),
        seconds=statistics.fmean(row["seconds"] for row in rows),
        looked_up=statistics.fmean(looked_up) if looked_up else None,
    )
