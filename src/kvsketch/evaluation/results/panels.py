"""Figures with a panel for each of several things, their colours, and how they are saved."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

EXACT = "#9a9a9a"
COLOURS = (
    "#0b6e75", "#d1495b", "#edae49", "#30638e", "#6a4c93", "#5f7a3a",
    "#b0578d", "#00a6a6", "#8c510a", "#f4845f", "#4d4d4d", "#7fb069",
)  # fmt: skip


def panels_for(count: int, columns: int = 3, width: float = 3.6, *, share_y: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels of this width in inches, at most `columns` side by side."""
    wide = min(columns, count)
    high = -(-count // wide)
    figure = Figure(figsize=(width * wide, 3.0 * high), dpi=150)
    grid = figure.subplots(high, wide, squeeze=False, sharey=share_y)
    panels = list(grid.flat)
    for unused in panels[count:]:
        unused.set_visible(False)
    return figure, panels[:count]


def plain(text: str) -> str:
    """Text that is drawn as it is: matplotlib would take what stands between two $ for mathematics."""
    return text.replace("$", r"\$")


def heading(text: str, width: int = 40) -> str:
    """Such a text as a panel's title, wrapped so that it does not run into the next panel."""
    return plain("\n".join(part for line in text.split("\n") for part in wrap(line, width)))


@contextmanager
def boxes_for_missing_letters() -> Iterator[None]:
    """Letters that the font lacks are drawn as boxes, and without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        yield


def save(figure: Figure, path: Path) -> Path:
    """Write a picture, and make its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with boxes_for_missing_letters():
        figure.savefig(path, bbox_inches="tight")
    return path
