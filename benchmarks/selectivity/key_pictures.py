"""Pictures of a model's keys and queries: spans of attention, sizes of buckets, and how far queries are from keys."""

from collections.abc import Sequence
from statistics import fmean

from benchmarks.selectivity.bucket_sizes import KINDS, even_deviation
from benchmarks.selectivity.key_query_spread import RECENT
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from kvsketch.evaluation.results.panels import COLOURS, EXACT, panels_for
from kvsketch.evaluation.results.rows import Row

KEYS, QUERIES = COLOURS[0], COLOURS[1]
BEFORE, AFTER = COLOURS[0], COLOURS[1]  # rotation
SPREAD = 0.3  # of a layer's heads, to either side


def spans_picture(rows: Sequence[Row]) -> Figure:
    """The largest keys' share of each head's attention to the past: a dot per head, mean over texts; as Figure 3."""
    layers = sorted({row["layer"] for row in rows})
    figure, (axes,) = panels_for(1, width=max(4.5, 0.45 * len(layers)))
    for place, layer in enumerate(layers):
        texts = [row["top_shares"] for row in rows if row["layer"] == layer]
        heads = [fmean(shares) for shares in zip(*texts, strict=True)]
        places = [place + SPREAD * (2 * head / max(1, len(heads) - 1) - 1) for head in range(len(heads))]
        axes.plot(places, heads, "o", color=COLOURS[0], ms=4, alpha=0.7, label="a head" if place == 0 else None)
        mean = fmean(heads)
        label = "mean of the layer" if place == 0 else None
        axes.plot([place - 0.4, place + 0.4], [mean, mean], color=COLOURS[1], lw=2, label=label)
    axes.set_xticks(range(len(layers)), map(str, layers))
    axes.set_xlabel("layer")
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylabel("share of the attention to the past")
    axes.set_title(f"top {rows[0]['top']} of {_range([row['past'] for row in rows])} keys", loc="left", fontsize=10)
    return _finish(figure, [axes], columns=2)


def separations_picture(rows: Sequence[Row]) -> Figure:
    """How well queries are told from keys by the nearer mean, and the cosine of the means: a dot per head, by layer."""
    layers = sorted({row["layer"] for row in rows})
    figure, panels = panels_for(2, width=max(4.0, 0.24 * len(layers)))
    parts = (("accuracy", "told apart by the nearer mean", 0.5), ("cosine", "cosine of the two means", 0.0))
    for axes, (name, title, nothing) in zip(panels, parts, strict=True):
        axes.axhline(nothing, color=EXACT, lw=1, ls="--")
        for when, colour, shift in (("before rotation", BEFORE, -0.15), ("after rotation", AFTER, 0.15)):
            for place, layer in enumerate(layers):
                texts = [row[when][name] for row in rows if row["layer"] == layer]
                heads = [fmean(values) for values in zip(*texts, strict=True)]
                axes.plot([place + shift] * len(heads), heads, "o", color=colour, ms=3, alpha=0.6, mew=0, label=when)
        axes.set_xticks(range(len(layers)), map(str, layers), fontsize=7)
        axes.set_xlabel("layer")
        axes.set_title(title, loc="left", fontsize=10)
    return _finish(figure, panels, columns=2)


def sizes_picture(rows: Sequence[Row]) -> Figure:
    """Deviation of bucket sizes: a panel per layer and number of buckets, a dot per draw, mean over heads; as Figure 2.

    Grey: the deviation of keys that are spread evenly at random.
    """
    places = sorted({(row["buckets"], row["layer"]) for row in rows})
    columns = min(4, len({layer for _, layer in places}))
    figure, panels = panels_for(len(places), columns)
    for number, (axes, (buckets, layer)) in enumerate(zip(panels, places, strict=True)):
        here = [row for row in rows if (row["buckets"], row["layer"]) == (buckets, layer)]
        for row in here:
            _deviations(axes, row)
        axes.axvline(even_deviation(here[0]["keys"], buckets), color=EXACT, ls="--", lw=1.2, label="even buckets")
        axes.set_yticks(range(len(KINDS)), KINDS if number % columns == 0 else [""] * len(KINDS), fontsize=8)
        axes.set_ylim(len(KINDS) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel("bucket sizes: deviation / mean")
        axes.set_title(f"layer {layer}, {buckets} buckets, {here[0]['keys']:,} keys", loc="left", fontsize=9)
    return _finish(figure, panels, columns=3)


def _deviations(axes: Axes, row: Row) -> None:
    colour, label, shift = (AFTER, "after rotation", 0.15) if row["rotated"] else (BEFORE, "before rotation", -0.15)
    for line, kind in enumerate(KINDS):
        dots = [fmean(heads) for heads in row["kinds"][kind]["deviations"]]
        axes.plot(dots, [line + shift] * len(dots), "o", color=colour, ms=4, alpha=0.5, mew=0, label=label)


def spreads_picture(rows: Sequence[Row]) -> Figure:
    """A line of panels for each head: maps before and after rotation, logits, shares of buckets; as Figure 1."""
    figure, panels = panels_for(4 * len(rows), columns=4)
    for line, row in enumerate(rows):
        maps, logits, buckets = panels[4 * line : 4 * line + 2], panels[4 * line + 2], panels[4 * line + 3]
        for axes, (when, points) in zip(maps, row["maps"].items(), strict=True):
            _map(axes, points)
            axes.set_title(f"layer {row['layer']}, head {row['head']}: {when}", loc="left", fontsize=9)
        _logits(logits, row["logits"])
        _shares(buckets, row["buckets"])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


def _map(axes: Axes, points: Row) -> None:
    for name, colour in (("keys", KEYS), ("queries", QUERIES)):
        axes.plot(*zip(*points[name], strict=True), "o", color=colour, ms=2.5, alpha=0.5, mew=0, label=name)
        sinks = points[f"sink {name}"]
        if sinks:
            axes.plot(*zip(*sinks, strict=True), "o", color=colour, ms=9, mec="black", mew=0.8)
    axes.set_xlabel("first principal component (large: sinks)", fontsize=8)
    axes.set_ylabel("second", fontsize=8)
    axes.legend(fontsize=7, frameon=False, markerscale=2)


def _logits(axes: Axes, found: Row) -> None:
    labels = {"first keys": "sinks", "keys between": "keys between", "latest keys": f"latest {RECENT} keys"}
    for colour, (kind, label) in zip((EXACT, COLOURS[0], COLOURS[1]), labels.items(), strict=True):
        axes.stairs(found["shares"][kind], found["edges"], color=colour, lw=1.4, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("logit of a query with a key", fontsize=8)
    axes.set_ylabel("share of the kind's pairs", fontsize=8)
    axes.legend(fontsize=7, frameon=False)


def _shares(axes: Axes, found: dict[str, list[float]]) -> None:
    """A dot per bucket, at the edge if it has none; on the line its shares of keys and of queries are equal."""
    least = min(share for shares in found.values() for share in shares if share > 0)
    top = max(share for shares in found.values() for share in shares)
    nothing = least / 3
    places = [[max(share, nothing) for share in found[name]] for name in ("keys", "queries")]
    axes.plot(*places, "o", color=COLOURS[4], ms=4, alpha=0.6, mew=0)
    axes.plot([least, top], [least, top], color=EXACT, lw=1, ls="--")
    decades = [10.0**power for power in range(-6, 1) if least <= 10.0**power <= 1.5 * top]
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([nothing, *decades], ["none", *(f"{100 * share:g} %" for share in decades)], fontsize=7)
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlim(nothing / 1.5, 1.5 * top)
    axes.set_ylim(nothing / 1.5, 1.5 * top)
    axes.set_xlabel("share of keys in a bucket", fontsize=8)
    axes.set_ylabel("share of queries", fontsize=8)


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _finish(figure: Figure, panels: Sequence[Axes], columns: int) -> Figure:
    """One legend below all panels."""
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    found = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))  # each name once
    figure.legend(
        found.values(), found, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=columns, fontsize=8, frameon=False
    )
    return figure
