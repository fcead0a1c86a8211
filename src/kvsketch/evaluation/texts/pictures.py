"""Divergence from the full cache against the bytes held: a curve for each method over its budgets."""

from collections.abc import Collection, Sequence
from typing import Any

from matplotlib.figure import Figure

from kvsketch.evaluation.results.names import family
from kvsketch.evaluation.results.panels import COLOURS, plain
from kvsketch.evaluation.texts.summary import Mean

LOOK: dict[str, Any] = {"lw": 1.6, "ms": 4, "capsize": 2}
LINES = ({"ls": "-", "marker": "o"}, {"ls": "--", "marker": "s"}, {"ls": ":", "marker": "^"})  # as colours come again
BEHIND: dict[str, Any] = {"lw": 1.0, "color": "0.8", "zorder": 0}
MANY = 9  # with more curves, there is no room for their names inside the picture


def divergence_picture(means: Sequence[Mean], title: str, behind: Collection[str] = ()) -> Figure:
    """Geometric means over windows with their 95 % intervals, on logarithmic axes.

    Methods of the families `behind` are drawn behind the others for comparison, in grey and without names.
    """
    every = list(dict.fromkeys(family(mean.method) for mean in means))
    if unknown := set(behind) - set(every):
        raise ValueError(f"of {', '.join(sorted(unknown))} there is nothing to draw, but of {', '.join(every)}")
    names = [name for name in every if name not in behind]
    figure = Figure(figsize=(7.2, 4.6) if len(names) <= MANY else (10.5, 5.6), dpi=150)
    axes = figure.subplots()
    for number, name in enumerate(name for name in every if name in behind):
        here = _of(name, means)
        label = None if number else f"{len(behind)} others"
        axes.plot([100 * mean.share for mean in here], [mean.typical.mean for mean in here], label=label, **BEHIND)
    for number, name in enumerate(names):
        here = _of(name, means)
        found = [mean.typical for mean in here]
        values = [one.mean for one in found]
        bars = [[one.mean - one.low for one in found], [one.high - one.mean for one in found]]
        places = [100 * mean.share for mean in here]
        again, colour = divmod(number, len(COLOURS))
        look = LOOK | LINES[again % len(LINES)]
        axes.errorbar(places, values, yerr=bars, color=COLOURS[colour], label=plain(name), **look)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [size for size in (2, 3, 5, 6, 8, 10, 12, 15, 20, 25, 35, 50, 70, 100) if _near(size, means)]
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.minorticks_off()
    axes.set_xlabel("bytes of a full cache (%)")
    axes.set_ylabel("KL from the full cache's predictions\n(nats a token, geometric mean)")
    axes.set_title(plain(title), loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if len(names) > MANY else {}
    axes.legend(fontsize=8, frameon=False, **beside)
    figure.tight_layout()
    return figure


def _of(name: str, means: Sequence[Mean]) -> list[Mean]:
    """The means of a family, in order of bytes, the fewest first."""
    return sorted((mean for mean in means if family(mean.method) == name), key=lambda mean: mean.share)


def _near(size: int, means: Sequence[Mean]) -> bool:
    shares = [100 * mean.share for mean in means]
    return 0.8 * min(shares) <= size <= 1.25 * max(shares)
