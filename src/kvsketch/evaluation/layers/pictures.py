"""Pictures of the study of layers: errors against rates, and time and error by block size."""

import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsketch.evaluation.layers.summary import Curve, Errors, Place, name_of, rate_name, summarise
from kvsketch.evaluation.results.panels import COLOURS, panels_for, plain
from kvsketch.evaluation.results.rows import Row

HIGHEST = 2.0  # a relative error of 1 is an answer of zeros; curves above this leave the picture at the top


def errors_picture(rows: Sequence[Row]) -> Figure:
    """A panel for each layer: error against rate, a curve for each method at its largest block; as Figure 1.

    Bars are standard deviations over seeds.
    """
    found = summarise(rows)
    curves = largest_blocks(rows)
    rates = _rates(found)
    layers = sorted({layer for layer, _, _ in found})
    figure, panels = panels_for(len(layers), columns=4)
    for axes, layer in zip(panels, layers, strict=True):
        for number, curve in enumerate(curves):
            here = [(x, found[layer, curve, rate]) for x, rate in enumerate(rates) if (layer, curve, rate) in found]
            _curve(axes, here, COLOURS[number % len(COLOURS)], name_of(curve))
        axes.set_xticks(range(len(rates)), [rate_name(rate) for rate in rates])
        axes.set_ylim(0, min(axes.get_ylim()[1], HIGHEST))
        axes.set_title(f"layer {layer}", loc="left", fontsize=10)
        axes.set_xlabel("share of the middle that is kept")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[::4]:
        axes.set_ylabel("relative error")
    figure.tight_layout()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, fontsize=8, frameon=False)
    return figure


def blocks_picture(rows: Sequence[Row]) -> Figure:
    """Time to compress and error for each layer and method with blocks, a row for each block size; as Figure 3."""
    found = {place: errors for place, errors in summarise(rows).items() if place[1][1] is not None}
    rates = _rates(found)
    pairs = list(dict.fromkeys((layer, method) for layer, (method, _), _ in found))
    figure, panels = panels_for(2 * len(pairs), columns=4, width=2.9)
    for number, (layer, method) in enumerate(pairs):
        blocks = sorted({block for place, (name, block), _ in found if (place, name) == (layer, method)}, key=_size)
        for axes, what, value in zip(panels[2 * number :], MEASURES, MEASURES.values(), strict=False):
            cells = [[_value(found.get((layer, (method, block), rate)), value) for rate in rates] for block in blocks]
            _heat(axes, cells)
            axes.set_title(plain(f"layer {layer}, {method}:\n{what}"), loc="left", fontsize=8)
            axes.set_xticks(range(len(rates)), [rate_name(rate) for rate in rates], fontsize=8)
            axes.set_yticks(range(len(blocks)), [str(block) for block in blocks], fontsize=8)
            axes.set_ylabel("block", fontsize=8)
    figure.tight_layout()
    return figure


MEASURES: dict[str, Callable[[Errors], float]] = {
    "milliseconds": lambda errors: 1000 * errors.seconds,
    "relative error": lambda errors: errors.mean,
}


def largest_blocks(rows: Sequence[Row]) -> list[Curve]:
    """A curve for each method, at its largest block size."""
    curves = dict[str, Curve]()
    for row in rows:
        _, block = curves.get(row["method"], (None, None))
        if _size(row["block"]) >= _size(block):
            curves[row["method"]] = row["method"], row["block"]
    return list(curves.values())


def _size(block: int | None) -> int:
    return block or 0


def _rates(found: dict[Place, Errors]) -> list[float]:
    """The rates, from the largest share kept to the smallest, as in the paper."""
    return sorted({rate for _, _, rate in found}, reverse=True)


def _curve(axes: Axes, points: Sequence[tuple[int, Errors]], colour: str, name: str) -> None:
    places = [x for x, _ in points]
    means = [errors.mean for _, errors in points]
    bars = [errors.deviation or 0.0 for _, errors in points]
    axes.errorbar(places, means, yerr=bars, color=colour, lw=1.8, marker="o", ms=4, capsize=2, label=plain(name))


def _value(errors: Errors | None, value: Callable[[Errors], float]) -> float:
    return math.nan if errors is None else value(errors)


def _heat(axes: Axes, cells: Sequence[Sequence[float]]) -> None:
    """Draw the numbers on a background of colours."""
    axes.imshow(cells, aspect="auto", cmap="YlOrRd", alpha=0.6)  # pale, so that numbers on it can be read
    for y, line in enumerate(cells):
        for x, value in enumerate(line):
            if not math.isnan(value):
                axes.text(x, y, f"{value:.3g}", ha="center", va="center", fontsize=8)
