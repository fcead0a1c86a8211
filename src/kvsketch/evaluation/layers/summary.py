"""Results of the study of layers from its rows: errors over seeds, times, ratios to a uniform sample, norms."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvsketch.evaluation.results.ratios import NORMAL, Ratio, deviation, ratio_of, short
from kvsketch.evaluation.results.rows import Row

VECTORS = ("queries", "keys", "values")
Curve = tuple[str, int | None]  # a method and its block size
Place = tuple[int, Curve, float]  # layer, curve, rate


@dataclass(frozen=True)
class Errors:
    """Relative errors of one layer, method and rate."""

    mean: float  # over prompts and seeds
    deviation: float | None  # over seeds, each a mean over prompts; None where there is only one
    seconds: float  # to compress, the median

    def __str__(self) -> str:
        return short(self.mean) if self.deviation is None else f"{short(self.mean)} ± {short(self.deviation)}"


@dataclass(frozen=True)
class Norm:
    """A mean of norms, and half the width of its 95 % interval."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.half_width:.4f}"


def name_of(curve: Curve) -> str:
    """A method and its block size, for people to read."""
    method, block = curve
    return method if block is None else f"{method}, block {block}"


def rate_name(rate: float) -> str:
    """A rate as a fraction where it is one: 1/4 for 0.25."""
    return f"1/{round(1 / rate)}" if (1 / rate).is_integer() and rate < 1 else f"{rate:g}"


def place_of(row: Row) -> Place:
    """The group of a row that is averaged: its rows differ only in prompt and seed."""
    return row["layer"], (row["method"], row["block"]), row["rate"]


def summarise(rows: Iterable[Row]) -> dict[Place, Errors]:
    """Errors and times of every layer, method and rate."""
    groups = defaultdict[Place, list[Row]](list)
    for row in rows:
        groups[place_of(row)].append(row)
    return {place: _errors(found) for place, found in groups.items()}


def _errors(rows: Sequence[Row]) -> Errors:
    by_seed = defaultdict[int | None, list[float]](list)
    for row in rows:
        by_seed[row["seed"]].append(row["error"])
    means = [statistics.fmean(errors) for errors in by_seed.values()]
    return Errors(
        mean=statistics.fmean(row["error"] for row in rows),
        deviation=deviation(means) if len(means) > 1 else None,
        seconds=statistics.median(row["seconds"] for row in rows),
    )


def compare(rows: Iterable[Row], method: str, other: str) -> dict[Place, Ratio]:
    """Ratios of a method's errors to those of `other`, which has no blocks, over pairs of the same prompt and seed.

    The interval is that of a normal distribution of the logarithms. Rows in which nothing is dropped are not compared.
    """
    rows = [row for row in rows if row["rate"] < 1 and row["error"] != 0]
    others = {_pair(row): row["error"] for row in rows if row["method"] == other}
    logs = defaultdict[Place, list[float]](list)
    for row in rows:
        if row["method"] == method and _pair(row) in others:
            logs[place_of(row)].append(math.log(row["error"] / others[_pair(row)]))
    return {place: ratio_of(found) for place, found in logs.items()}


def _pair(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in ("prompt", "tokens", "layer", "rate", "seed", "exact"))


def pool_norms(rows: Sequence[Row]) -> dict[str, Norm]:
    """Norms of queries, keys and values, over all layers of the rows."""
    return {name: _pool([row[name] for row in rows]) for name in VECTORS}


def _pool(parts: Sequence[dict[str, float | int]]) -> Norm:
    count = sum(part["count"] for part in parts)
    mean = sum(part["count"] * part["mean"] for part in parts) / count
    square = sum(part["count"] * (part["deviation"] ** 2 + part["mean"] ** 2) for part in parts) / count
    return Norm(mean, NORMAL * math.sqrt(max(0.0, square - mean**2) / count))
