"""How the time of a step grows with the context, and at what share of the memory's speed a step reads."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsketch.evaluation.results.panels import COLOURS, EXACT, panels_for, plain
from kvsketch.evaluation.results.rows import Row
from kvsketch.evaluation.speed import plan
from kvsketch.evaluation.speed.summary import timed

LOOK: dict[str, Any] = {"lw": 1.6, "marker": "o", "ms": 4}
GREYS = {plan.STOCK: EXACT, plan.FOLDED: EXACT, plan.PRODUCTS: EXACT, plan.EXACT: "black"}
APART = 0.1  # of the axis, at least, between the names of two lengths
STYLES = {plan.STOCK: ":", plan.FOLDED: "--", plan.PRODUCTS: "-."}


def speed_picture(rows: Sequence[Row], title: str) -> Figure:
    """Medians with 5th and 95th percentiles; times of torch's own kernels are thin and dashed."""
    figure, (left, right) = panels_for(2, width=5.0)
    figure.set_figheight(4.6)
    found = timed(rows, plan.LAYER)
    forms = list(dict.fromkeys((row["method"], row["kernel"]) for row in found))
    methods = list(dict.fromkeys(method for method, _ in forms if method not in GREYS))
    colours = GREYS | {method: COLOURS[number % len(COLOURS)] for number, method in enumerate(methods)}
    for method, kernel in forms:
        here = sorted((row for row in found if (row["method"], row["kernel"]) == (method, kernel)), key=_tokens)
        torchs = kernel == plan.TORCH and method not in STYLES
        name = f"{method}, torch's kernels" if torchs else method
        look = LOOK | {"ls": "--" if torchs else STYLES.get(method, "-"), "lw": 0.8 if torchs else 1.6}
        look |= {"color": colours[method]}
        x, y = [_tokens(row) for row in here], [1e3 * row["seconds"] for row in here]
        left.plot(x, y, label=plain(name), **look)
        if not torchs:
            left.vlines(
                x, [1e3 * row["low"] for row in here], [1e3 * row["high"] for row in here], look["color"], lw=0.8
            )
        right.plot(x, [100 * row["share"] for row in here], **look)
    _finish(left, "a step of one layer (ms; bars: 5th to 95th percentile)", found)
    _finish(right, "bytes read / time, in % of the speed of a memory read", found)
    figure.suptitle(plain(title), x=0.02, ha="left", fontsize=10)
    figure.legend(
        *left.get_legend_handles_labels(), fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 0.95)
    )
    figure.tight_layout()
    return figure


def _tokens(row: Row) -> int:
    return int(row["tokens"])


def _finish(axes: Axes, title: str, rows: Sequence[Row]) -> None:
    """Logarithmic axes, a tick at each length."""
    lengths = sorted({_tokens(row) for row in rows})
    axes.set_xscale("log")
    axes.set_yscale("log")
    labels, last, factor = list[str](), 0.0, (lengths[-1] / lengths[0]) ** APART if lengths else 1.0
    for tokens in lengths:  # leave out a name that would overlap another one
        labels.append(f"{tokens:,}" if tokens >= factor * last else "")
        last = tokens if labels[-1] else last
    axes.set_xticks(lengths, labels)
    low, high = axes.get_ylim()
    ticks = [tick for power in range(-3, 6) for tick in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("tokens in context")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
