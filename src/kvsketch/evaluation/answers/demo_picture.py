"""The picture of `kvsketch demo`: how much each method answers, beside how much it holds and reads."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from kvsketch.evaluation.answers.demo import DOCUMENTS, METHODS, Row
from kvsketch.evaluation.results.panels import COLOURS, panels_for

QUANTITIES = {"held, of a full cache": "holds", "read by a new token": "reads", "answered": "right"}


def demo_picture(rows: Sequence[Row]) -> Figure:
    """A panel for each document: three bars for each method."""
    figure, panels = panels_for(len(DOCUMENTS), len(DOCUMENTS), 5.2)
    height = 0.8 / len(QUANTITIES)
    for panel, (name, what) in zip(panels, DOCUMENTS.items(), strict=True):
        here = [row for row in rows if row.document == name]
        for place, (label, quantity) in enumerate(QUANTITIES.items()):
            values = [getattr(row, quantity) for row in here]
            at = [number + place * height for number in range(len(here))]
            colour = COLOURS[2] if quantity == "right" else ("#9aa7b5", "#c9d1d9")[place]
            panel.barh(at, values, height * 0.9, color=colour, label=label)
            for y, value in zip(at, values, strict=True):
                panel.text(value + 0.01, y, f"{value:.0%}", va="center", fontsize=7, color="#444444")
        panel.set_yticks([number + height for number in range(len(here))])
        names = [f"{row.method.split('(')[0]}\n{METHODS[row.method]}" for row in here]
        panel.set_yticklabels(names if panel is panels[0] else [], fontsize=8)
        panel.invert_yaxis()
        panel.set_xlim(0, 1.25)
        panel.set_xticks([])
        panel.set_title(what.replace(": ", ":\n"), fontsize=9, loc="left")
        panel.spines[["top", "right", "bottom"]].set_visible(False)
    figure.tight_layout()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.02), ncols=3, fontsize=8, frameon=False)
    return figure
