"""Pictures that are made from rows alone: needle maps, score against bytes, score against length."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvsketch.evaluation.answers.summary import ASKED, Mean, summarise, titles
from kvsketch.evaluation.results.names import family
from kvsketch.evaluation.results.panels import (
    COLOURS,
    EXACT,
    boxes_for_missing_letters,
    heading,
    panels_for,
    plain,
    save,
)
from kvsketch.evaluation.results.rows import Row

DASH = 3.0  # length of the dashes of curves that lie on one another, in line widths
DEPTHS = 10  # rows of a needle map where depths were drawn at random


@dataclass(frozen=True)
class Picture:
    """A finished picture and what it shows."""

    path: Path
    caption: str


def draw_all(rows: Sequence[Row], folder: Path) -> list[Picture]:
    """Every picture that the rows allow."""
    with boxes_for_missing_letters():
        return [*draw_scores(summarise(rows), folder), *draw_needles(rows, folder)]


def draw_scores(means: Sequence[Mean], folder: Path) -> list[Picture]:
    """Score against bytes and against length, for each question mode."""
    found = list[Picture]()
    for asked in dict.fromkeys(mean.asked for mean in means):
        here = [mean for mean in means if mean.asked == asked]
        if any(mean.method != "exact" for mean in here):
            caption = f"Score against bytes, {ASKED[asked]}"
            found.append(_save(score_against_bytes(here), folder, f"bytes-{asked}", caption))
        if len({(mean.task, mean.length) for mean in here}) > len({mean.task for mean in here}):
            caption = f"Score against length, {ASKED[asked]}"
            found.append(_save(score_against_length(here), folder, f"length-{asked}", caption))
    return found


def draw_needles(rows: Sequence[Row], folder: Path) -> list[Picture]:
    """The needle maps; they need the rows, as means over lengths and depths would hide what maps show.

    Rows with another text, wording or limit of tokens get a map of their own.
    """
    found = list[Picture]()
    needles = [row for row in rows if row["task"] == "needle"]
    title_of = titles(needles)
    for asked in dict.fromkeys(row["asked"] for row in needles):
        for number, title in enumerate(dict.fromkeys(map(title_of, needles)), 1):
            here = [row for row in needles if row["asked"] == asked and title_of(row) == title]
            name = f"needle-{asked}" if number == 1 else f"needle-{asked}-{number}"
            if here:
                found.append(_save(needle_map(here), folder, name, f"Found: {title}, {ASKED[asked]}; {_counted(here)}"))
    return found


def _counted(rows: Sequence[Row]) -> str:
    """How many prompts each cell of a map has."""
    cells = Counter((row["method"], row["length"], row["depth"]) for row in rows).values()
    if any(row["depth"] is None for row in rows):
        return "depths drawn at random"
    return f"{_range(cells)} prompts a cell"


def _range(numbers: Collection[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def score_against_bytes(means: Sequence[Mean]) -> Figure:
    """A panel for each task, at the longest length at which methods were compared, with a curve for each method."""
    compared = [mean for mean in means if mean.method != "exact"]
    longest = {task: max(mean.length for mean in compared if mean.task == task) for task in _tasks(compared)}
    figure, panels = panels_for(len(longest))
    colours = _colours(means)
    for axes, (task, length) in zip(panels, longest.items(), strict=True):
        here = [mean for mean in means if mean.task == task and mean.length == length]
        for mean in here:
            if mean.method == "exact":
                axes.axhline(mean.score, color=EXACT, lw=1.5, ls="--")
        curves = list[Curve]()
        for name in dict.fromkeys(family(mean.method) for mean in here if mean.method != "exact"):
            curve_means = sorted((m for m in here if family(m.method) == name), key=lambda m: m.share)
            curves.append(Curve(name, colours[name], [100 * m.share for m in curve_means], curve_means))
        _draw_curves(axes, curves)
        axes.set_title(heading(f"{task}, {length:,} tokens"), loc="left", fontsize=10)
        axes.set_xlabel("bytes of a full cache (%)")
        axes.set_xlim(0, 106 * max(m.share for m in here if m.method != "exact"))
    return _finish(figure, panels, colours)


def score_against_length(means: Sequence[Mean]) -> Figure:
    """A panel for each task, with a curve for each method over the lengths."""
    means = [mean for mean in means if len({other.length for other in means if other.task == mean.task}) > 1]
    figure, panels = panels_for(len(_tasks(means)))
    colours = _colours(means, lambda mean: mean.method)
    for axes, task in zip(panels, _tasks(means), strict=True):
        here = [mean for mean in means if mean.task == task]
        curves = list[Curve]()
        for name in dict.fromkeys(mean.method for mean in here):
            curve_means = sorted((m for m in here if m.method == name), key=lambda m: m.length)
            curves.append(Curve(name, colours[name], [float(m.length) for m in curve_means], curve_means))
        _draw_curves(axes, curves)
        axes.set_title(heading(task), loc="left", fontsize=10)
        lengths = sorted({mean.length for mean in here})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.minorticks_off()
        axes.set_xlabel("tokens in the prompt")
    return _finish(figure, panels, colours)


def needle_map(rows: Sequence[Row]) -> Figure:
    """A panel for each method, with the share of needles found by length and depth."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    given = all(row["depth"] is not None for row in rows)
    depths = sorted({row["depth"] for row in rows}) if given else [(i + 0.5) / DEPTHS for i in range(DEPTHS)]
    figure, panels = panels_for(len(methods), share_y=True)
    for axes, method in zip(panels, methods, strict=True):
        cells = [[list[float]() for _ in lengths] for _ in depths]
        method_rows = [row for row in rows if row["method"] == method]
        for row in method_rows:
            place = depths.index(row["depth"]) if given else min(DEPTHS - 1, int(row["at"] * DEPTHS))
            cells[place][lengths.index(row["length"])].append(row["score"])
        found = [[sum(cell) / len(cell) if cell else math.nan for cell in line] for line in cells]
        axes.imshow(found, aspect="auto", cmap="RdYlGn", vmin=0, vmax=1)
        for y, line in enumerate(found):
            for x, value in enumerate(line):
                if not math.isnan(value):
                    axes.text(x, y, f"{value:.2f}".removeprefix("0"), ha="center", va="center", fontsize=7)
        share = sum(row["nbytes"] for row in method_rows) / sum(row["full_nbytes"] for row in method_rows)
        axes.set_title(heading(f"{method}\n{share:.0%} of the bytes"), loc="left", fontsize=9)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=8)
        axes.set_xlabel("tokens in the prompt")
    for axes in panels[:: min(3, len(panels))]:
        axes.set_ylabel("depth of the needle")
    figure.tight_layout()
    return figure


def _tasks(means: Sequence[Mean]) -> list[str]:
    return list(dict.fromkeys(mean.task for mean in means))


def _colours(means: Sequence[Mean], name: Callable[[Mean], str] = lambda mean: family(mean.method)) -> dict[str, str]:
    """A colour for every curve; exact is grey."""
    names = dict.fromkeys(name(mean) for mean in means)
    others = [one for one in names if one != "exact"]
    colours = {one: COLOURS[i % len(COLOURS)] for i, one in enumerate(others)}
    return {one: colours.get(one, EXACT) for one in names}


@dataclass(frozen=True)
class Curve:
    """A method's means, and their places on the x axis."""

    name: str
    colour: str
    places: Sequence[float]
    means: Sequence[Mean]

    @property
    def points(self) -> list[tuple[float, float]]:
        """The points of its markers."""
        return [(place, mean.score) for place, mean in zip(self.places, self.means, strict=True)]


def _draw_curves(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draw curves with intervals; lines that lie on one another get alternating dashes, and markers rings."""
    wide = max((abs(place) for curve in curves for place in curve.places), default=0.0)
    same_point = partial(_same_point, wide=wide)
    for number, curve in enumerate(curves):
        overlapping = _overlapping(curve, curves, same_point)
        place = overlapping.index(curve)
        dashes = (place * DASH, (DASH, DASH * (len(overlapping) - 1))) if len(overlapping) > 1 else "-"
        scores = [mean.score for mean in curve.means]
        below = [max(0.0, mean.score - mean.interval[0]) for mean in curve.means]
        above = [max(0.0, mean.interval[1] - mean.score) for mean in curve.means]
        axes.errorbar(
            curve.places, scores, yerr=[below, above], color=curve.colour, lw=1.8, ls=dashes, elinewidth=0.8,
            capsize=2, label=plain(curve.name), zorder=2 + number,
        )  # fmt: skip
        later = [
            sum(any(same_point(one, o) for o in other.points) for other in curves[number + 1 :]) for one in curve.points
        ]
        sizes = [(4 + 3 * count) ** 2 for count in later]
        axes.scatter(curve.places, scores, s=sizes, color=curve.colour, lw=0, zorder=2 + number, clip_on=False)


def _same_point(one: tuple[float, float], other: tuple[float, float], wide: float) -> bool:
    """Whether two points look like one in the picture: they are less than a marker apart."""
    return abs(one[0] - other[0]) <= 0.02 * wide and abs(one[1] - other[1]) <= 0.02


def _overlapping(curve: Curve, curves: Sequence[Curve], same_point: Callable[[Any, Any], bool]) -> list[Curve]:
    """This curve and those that lie on it, on one of these, and so on, in the order in which they are drawn."""
    found, new = [curve], [curve]
    while new:
        last, new = new, []
        for other in curves:
            if other not in found and any(_coincide(one, other, same_point) for one in last):
                found.append(other)
                new.append(other)
    return [other for other in curves if other in found]


def _coincide(one: Curve, other: Curve, same_point: Callable[[Any, Any], bool]) -> bool:
    return len(one.points) == len(other.points) and all(map(same_point, one.points, other.points))


def _finish(figure: Figure, panels: Sequence[Axes], colours: dict[str, str]) -> Figure:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(-0.03, 1.05)
        axes.set_ylabel("score")
    handles = [Line2D([], [], color=colour, lw=2, label=plain(name)) for name, colour in colours.items()]
    figure.tight_layout()
    figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, fontsize=8, frameon=False)
    return figure


def _save(figure: Figure, folder: Path, name: str, caption: str) -> Picture:
    return Picture(save(figure, folder / f"{name}.png"), caption)
