"""Results of `kvsketch bench speed`: from which context on a method is faster than exact."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvsketch.evaluation.results.rows import Row
from kvsketch.evaluation.speed.plan import EXACT, LAYER


@dataclass(frozen=True)
class BreakEven:
    """The shortest context from which on a method with its kernels is faster than exact at all contexts measured."""

    method: str
    kernel: str
    tokens: int | None  # None: it is not faster at the longest
    longest: int


def break_even(rows: Iterable[Row]) -> list[BreakEven]:
    """The break-even of every method timed in one layer, against exact with the same kernels."""
    found = defaultdict[tuple[str, str], dict[int, bool]](dict)
    for row in timed(rows, LAYER):
        if row["method"] != EXACT and row["exact"] is not None:
            found[row["method"], row["kernel"]][row["tokens"]] = row["seconds"] < row["exact"]
    return [BreakEven(*form, _first(faster), max(faster)) for form, faster in found.items()]


def timed(rows: Iterable[Row], part: str) -> list[Row]:
    """The rows of a part that have times: their answers were right."""
    return [row for row in rows if row["part"] == part and row["right"]]


def parts_of(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Parts and lengths of which there are rows, lengths in order."""
    places = {(row["part"], row["tokens"]) for row in rows}
    order = list(dict.fromkeys(row["part"] for row in rows))
    return sorted(places, key=lambda place: (order.index(place[0]), place[1]))


def _first(faster: dict[int, bool]) -> int | None:
    start = None
    for tokens in sorted(faster, reverse=True):
        if not faster[tokens]:
            break
        start = tokens
    return start
