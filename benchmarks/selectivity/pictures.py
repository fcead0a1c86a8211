"""Pictures of the study of selectivity: errors and recall against how much is read, also by number of buckets."""

from collections.abc import Sequence

from benchmarks.selectivity.plan import WINDOW_ALONE
from benchmarks.selectivity.summary import NAMES, Point, label, summarise, with_first_index
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvsketch.evaluation.results.panels import COLOURS, EXACT, panels_for, plain
from kvsketch.evaluation.results.rows import Row

AXES = {"mse": "mean squared error", "error": "relative error", "recall": "recall of attention to the past"}
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of the past, where the axis is marked
DEEPEST = 1e-5  # of the largest error: lower errors leave the picture at the bottom, smaller shares at the left
WIDE = 100  # an axis of more than two decades is marked at powers of ten alone
DASHED = ("random_tokens", "saap(estimate=True)")  # their curves may lie on those of random buckets and of Saap
LEARNT = ("saap", "kmeans")  # methods with an index, compared for several numbers of buckets


def lookups_picture(rows: Sequence[Row], indexes: Sequence[str], measure: str = "mse") -> Figure:
    """A panel for each layer: a measure against the share of the past that is read, a curve per method; as Figure 5.

    Grey: sinks and window alone, which read nothing of the past.
    """
    curves = with_first_index(summarise(rows), indexes)
    layers = sorted({layer for layer, _, _ in curves})
    methods = sorted({method for _, method, _ in curves if method != WINDOW_ALONE}, key=_order)
    figure, panels = panels_for(len(layers), columns=4)
    for axes, layer in zip(panels, layers, strict=True):
        alone = curves.get((layer, WINDOW_ALONE, None))
        if alone and measure != "recall":
            axes.axhline(alone[0].value(measure), color=EXACT, lw=1.5, ls="--", label=label(WINDOW_ALONE))
        for method, colour in zip(methods, COLOURS, strict=False):
            for points in (found for (at, name, _), found in curves.items() if (at, name) == (layer, method)):
                _curve(axes, points, measure, colour, label(method), ":" if method in DASHED else "-")
        _shape(axes, measure, f"layer {layer}")
    return _finish(figure, panels)


def buckets_picture(rows: Sequence[Row]) -> Figure:
    """The errors of each method with an index, by layer, a curve per number of buckets; as Figure 10."""
    curves = {curve: points for curve, points in summarise(rows).items() if curve[1].startswith(LEARNT)}
    places = sorted({(method, layer) for layer, method, _ in curves}, key=lambda place: (_order(place[0]), place[1]))
    counts = sorted({count_of(points) for points in curves.values()})
    figure, panels = panels_for(len(places), columns=len({layer for _, layer in places}) if len(places) > 4 else 4)
    for axes, (method, layer) in zip(panels, places, strict=True):
        here = [points for (at, name, _), points in curves.items() if (at, name) == (layer, method)]
        for points in sorted(here, key=count_of):
            colour = COLOURS[counts.index(count_of(points)) % len(COLOURS)]
            _curve(axes, points, "mse", colour, f"{count_of(points):,} buckets")
        _shape(axes, "mse", plain(f"layer {layer}, {label(method)}"))
    return _finish(figure, panels)


def count_of(points: Sequence[Point]) -> int:
    """Into how many buckets the past was put."""
    return points[0].buckets or 0


def _order(method: str) -> int:
    """A method's place in NAMES; other methods come last."""
    return [*NAMES, method].index(method)


def _curve(axes: Axes, points: Sequence[Point], measure: str, colour: str, name: str, style: str = "-") -> None:
    read = [point for point in points if point.read > 0]  # a logarithmic axis has no place for 0
    values = [point.value(measure) for point in read]
    axes.plot(
        [point.read for point in read], values, style, color=colour, lw=1.6, marker="o", ms=3.5, label=plain(name)
    )


def _shape(axes: Axes, measure: str, title: str) -> None:
    axes.set_xscale("log")
    axes.set_xlim(SHARES[0] / 1.5, 1.1)
    axes.set_xticks(SHARES, [f"{100 * share:g}" for share in SHARES], fontsize=8)
    axes.xaxis.set_minor_formatter(NullFormatter())
    if measure == "recall":
        axes.set_ylim(0, 1.03)
    elif axes.dataLim.ymax > 0:
        _logarithmic(axes)
    else:
        axes.set_ylim(-0.03, 1)
        axes.set_yticks([0])
        axes.text(0.5, 0.5, "no error: what is read\nin full has it all", transform=axes.transAxes, ha="center")
    axes.set_xlabel("share of the past that is read (%)")
    axes.set_ylabel(AXES[measure])
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _logarithmic(axes: Axes) -> None:
    """A logarithmic axis for errors, marked even if they all lie within one decade."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    low = max(low, high * DEEPEST)
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > WIDE else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", labelsize=8)


def _finish(figure: Figure, panels: Sequence[Axes]) -> Figure:
    figure.tight_layout()
    named = {name: handle for axes in panels for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        named.values(), named, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=5, fontsize=8, frameon=False
    )
    return figure
