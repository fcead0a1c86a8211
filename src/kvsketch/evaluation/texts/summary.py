"""Results of `kvsketch bench text`: means over windows with intervals, and ratios over pairs of windows."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvsketch.evaluation.results.ratios import NORMAL, Ratio, ratio_of
from kvsketch.evaluation.results.rows import Row

LEAST = 1e-9  # nats: used for a divergence of 0 where logarithms are taken


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A method's means over all windows."""

    method: str
    windows: int
    kl: float  # nats a token
    error: float  # its standard error over windows
    typical: Ratio  # the geometric mean with its interval; a single window cannot dominate it
    agree: float
    perplexity: float
    exact_perplexity: float
    share: float  # of the bytes of a full cache
    looked_up: float | None
    seconds: float

    @property
    def interval(self) -> tuple[float, float]:
        """Where the divergence lies with 95 % confidence, for windows of these texts."""
        half = NORMAL * self.error
        return max(0.0, self.kl - half), self.kl + half


def summarise(rows: Iterable[Row]) -> list[Mean]:
    """One mean for each method, in the order of their first rows."""
    groups = defaultdict[str, list[Row]](list)
    for row in rows:
        groups[row["method"]].append(row)
    return [_mean(method, found) for method, found in groups.items()]


def _mean(method: str, rows: Sequence[Row]) -> Mean:
    divergences = [row["kl"] for row in rows]
    looked_up = [row["looked_up"] for row in rows if row["looked_up"] is not None]
    return Mean(
        method=method,
        windows=len(rows),
        kl=statistics.fmean(divergences),
        error=statistics.stdev(divergences) / math.sqrt(len(rows)) if len(rows) > 1 else math.nan,
        typical=ratio_of([math.log(max(kl, LEAST)) for kl in divergences]),
        agree=statistics.fmean(row["agree"] for row in rows),
        perplexity=math.exp(statistics.fmean(row["nll"] for row in rows)),
        exact_perplexity=math.exp(statistics.fmean(row["nll_exact"] for row in rows)),
        share=statistics.fmean(row["nbytes"] / row["full_nbytes"] for row in rows),
        looked_up=statistics.fmean(looked_up) if looked_up else None,
        seconds=statistics.median(row["seconds"] for row in rows),
    )


def compare(rows: Iterable[Row], method: str, other: str) -> Ratio | None:
    """The ratio of two methods over the windows that both have; None if there are none."""
    found = dict[str, dict[tuple[object, ...], float]]()
    for row in rows:
        place = tuple(row[name] for name in ("text", "start", "tokens", "next"))
        found.setdefault(row["method"], {})[place] = row["kl"]
    one, two = found.get(method, {}), found.get(other, {})
    logs = [math.log(one[place] / two[place]) for place in one.keys() & two.keys() if one[place] > 0 < two[place]]
    return ratio_of(logs) if logs else None
