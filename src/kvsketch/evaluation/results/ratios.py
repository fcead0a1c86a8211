"""Ratios of two methods over pairs of rows that differ in nothing but the method."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NORMAL = 1.96  # standard errors on either side: 95 % of a normal distribution


@dataclass(frozen=True)
class Ratio:
    """One method's figure over another's, pair by pair: the geometric mean, and where it lies with 95 % confidence."""

    mean: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        if self.pairs == 1:
            return short(self.mean)
        return f"{short(self.mean)} [{short(self.low)}, {short(self.high)}]"


def ratio_of(logs: Sequence[float]) -> Ratio:
    """Of the logarithms of some ratios, whose interval is that of a normal distribution."""
    mean = statistics.fmean(logs)
    half = NORMAL * deviation(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def deviation(values: Sequence[float]) -> float:
    """Of a sample; not a number where an estimate exploded."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def short(number: float) -> str:
    """Three places, or two figures of an estimate that exploded."""
    return f"{number:.3f}" if not number >= 100 else f"{number:.1e}"
