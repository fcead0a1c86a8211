"""What the rows on lookups say: how far off a method's answers are, by how much of the past it reads."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from benchmarks.selectivity.plan import WINDOW_ALONE

from kvsketch.evaluation.results.rows import Row

MEASURES = ("mse", "error", "recall")
NAMES = {
    WINDOW_ALONE: "sinks and window alone",
    "saap": "Saap",
    "saap(estimate=True)": "Saap with estimates",
    "saap(prefer='density')": "Saap by density",
    "kmeans": "k-means before rotation",
    "kmeans(rope=True)": "k-means after rotation",
    "lsh(kind='kdeformer')": "KDEformer",
    "lsh(kind='reformer')": "Reformer",
    "lsh(kind='magicpig')": "MagicPIG",
    "random_buckets": "random buckets",
    "random_tokens": "random tokens",
    "retrieval": "exact top-k",
}
Curve = tuple[int, str, str | None]  # layer, method, index


@dataclass(frozen=True)
class Point:
    """A method at one setting: means over prompts and seeds."""

    read: float  # share of the past
    mse: float
    error: float  # relative
    recall: float  # of the attention to the past
    knob: int
    buckets: int | None

    def value(self, measure: str) -> float:
        """One of the measures."""
        return float(getattr(self, measure))


def summarise(rows: Iterable[Row]) -> dict[Curve, list[Point]]:
    """Every curve's points, in the order of how much is read."""
    settings = defaultdict[tuple[Curve, float], list[Row]](list)
    for row in rows:
        aim = row["knob"] if row["aim"] is None else row["aim"]  # the same share is another number in every text
        settings[(row["layer"], row["method"], row["index"]), aim].append(row)
    curves = defaultdict[Curve, list[Point]](list)
    for (curve, _), found in settings.items():
        means = {name: fmean(row[name] for row in found) for name in ("read", *MEASURES)}
        curves[curve].append(Point(**means, knob=found[0]["knob"], buckets=found[0]["buckets"]))
    return {curve: sorted(points, key=lambda point: point.read) for curve, points in curves.items()}


def with_first_index(curves: dict[Curve, list[Point]], indexes: Sequence[str]) -> dict[Curve, list[Point]]:
    """The curves that are compared: for methods with an index, those with the first index."""
    return {curve: points for curve, points in curves.items() if curve[2] in (None, indexes[0])}


def at_read(points: Sequence[Point], share: float, measure: str) -> float | None:
    """A curve's value where this share is read: between two settings, on a straight line over the log of what is read.

    None if all settings read more, or all read less.
    """
    read = [point for point in points if point.read > 0]
    for left, right in pairwise(read):
        if left.read <= share <= right.read:
            width = math.log(right.read / left.read)
            part = math.log(share / left.read) / width if width else 0.0
            return (1 - part) * left.value(measure) + part * right.value(measure)
    return None


def label(method: str) -> str:
    """A method's name for people."""
    return NAMES.get(method, method)
