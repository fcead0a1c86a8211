"""Ratios of two methods, over pairs of rows that differ only in the method."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NORMAL = 1.96  # standard errors on either side: 95 % of a normal distribution


@dataclass(frozen=True)
class Ratio:
    """One method's figure over another's, pair by pair: the geometric mean and its 95 % interval."""

    mean: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        if self.pairs == 1:
            return short(self.mean)
        return f"{short(self.mean)} [{short(self.low)}, {short(self.high)}]"


def ratio_of(logs: Sequence[float]) -> Ratio:
    """The ratio from logarithms of single ratios; its interval is that of a normal distribution of these."""
    mean = statistics.fmean(logs)
    half = NORMAL * deviation(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample; NaN if a value is not finite, because an estimate exploded."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def short(number: float) -> str:
    """A number with three decimal places, or with two significant digits if an estimate exploded."""
    return f"{number:.3f}" if not number >= 100 else f"{number:.1e}"
