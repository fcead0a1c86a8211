"""Pictures of what `inspection` found: clusters against length, norms, and maps of keys and values."""

import math
from collections.abc import Mapping, Sequence
from itertools import product

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from kvsketch.algorithms.kcenter import greedy_k_center
from kvsketch.evaluation.inspection.spread import Row
from kvsketch.evaluation.results.panels import COLOURS, panels_for
from kvsketch.huggingface.capture import Captured

CENTRES = 16  # as in Figure 1 of the SubGen paper
KINDS = (("clusters", "keys", "-"), ("value_clusters", "values", "--"))
POINTS = 1500  # of a map; more would take long and show no more


def profile_picture(parts: Mapping[int, Sequence[Sequence[float]]], keeps: Sequence[float]) -> Figure:
    """A panel for each budget, with the part of the tokens that each head of each layer holds."""
    figure, panels = panels_for(len(keeps), columns=len(keeps), width=2.4)
    layers = list(parts)
    for place, (panel, keep) in enumerate(zip(panels, keeps, strict=True)):
        held = [[head[place] for head in parts[layer]] for layer in layers]
        image = panel.imshow(held, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
        panel.set_title(f"keep {keep:g}")
        panel.set_xlabel("KV head")
        panel.set_xticks(range(len(held[0])))
        panel.set_yticks(range(0, len(layers), max(1, len(layers) // 10)))
        panel.set_yticklabels([str(layer) for layer in layers[:: max(1, len(layers) // 10)]])
    panels[0].set_ylabel("layer")
    figure.tight_layout()
    figure.colorbar(image, ax=panels, label="part of the tokens that is held")
    return figure


def clusters_picture(rows: Sequence[Row]) -> Figure:
    """A panel for each layer: clusters against tokens, mean over heads, a curve for each δ; dotted: one per token.

    Solid lines are keys and dashed ones values, whose δ are shares of their own distances.
    """
    layers = sorted({row["layer"] for row in rows})
    shares = sorted({cell["share"] for cell in rows[0]["clusters"]})
    figure, panels = panels_for(len(layers), 4, 3.2 if len(layers) > 1 else 4.0)
    for axes, layer in zip(panels, layers, strict=True):
        heads = [row for row in rows if row["layer"] == layer]
        at = [cell["at"] for cell in heads[0]["clusters"] if cell["share"] == shares[0]]
        axes.plot(at, at, color="#bbbbbb", ls=":", lw=1)
        for (number, share), (name, what, style) in product(enumerate(shares), KINDS):
            mean = counts_of([head[name] for head in heads], share)
            label = f"{what}, δ = {share:g} × median distance"
            axes.plot(at, mean, style, color=COLOURS[number % len(COLOURS)], lw=1.6, marker="o", ms=2.5, label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(f"layer {layer}", loc="left", fontsize=10)
        axes.set_xlabel("tokens")
        axes.set_ylabel("clusters")
    return _with_legend(figure, panels)


def counts_of(heads: Sequence[Sequence[Row]], share: float) -> list[float]:
    """Numbers of clusters at one δ, mean over heads, in the order of tokens."""
    curves = [[cell["count"] for cell in head if cell["share"] == share] for head in heads]
    return [sum(counts) / len(counts) for counts in zip(*curves, strict=True)]


def norms_picture(rows: Sequence[Row]) -> Figure:
    """Norms of queries, keys, keys less their mean, and values, over the layers; bars are standard deviations."""
    layers = sorted({row["layer"] for row in rows})
    figure, (axes,) = panels_for(1, width=4.0)
    names = {"queries": "queries", "keys": "keys", "centred_keys": "keys less their mean", "values": "values"}
    for colour, (name, label) in zip(COLOURS, names.items(), strict=False):
        found = [[row[name] for row in rows if row["layer"] == layer] for layer in layers]
        means = [sum(head["mean"] for head in heads) / len(heads) for heads in found]
        deviations = [math.sqrt(sum(head["deviation"] ** 2 for head in heads) / len(heads)) for heads in found]
        axes.errorbar(layers, means, yerr=deviations, color=colour, marker="o", ms=4, capsize=2, label=label)
    axes.set_xticks(layers)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("layer")
    axes.set_ylabel("norm")
    return _with_legend(figure, [axes])


def maps_picture(seen: Sequence[Captured], heads: Sequence[int], seed: int = 0) -> Figure:
    """t-SNE maps, keys above and values below, a column for each layer and head; k-center's centres are marked.

    Colours show the place in the text. As Figure 1 of the SubGen paper.
    """
    from sklearn.manifold import TSNE

    columns = [(layer, head) for layer in seen for head in heads]
    figure = Figure(figsize=(2.6 * len(columns), 5.2), dpi=150)
    grid = figure.subplots(2, len(columns), squeeze=False)
    for (layer, head), panels in zip(columns, grid.T, strict=True):
        for axes, name, vectors in zip(panels, ("keys", "values"), (layer.keys[head], layer.values[head]), strict=True):
            points = _some(vectors.float().cpu())
            centres = greedy_k_center(points, CENTRES).centres
            flat = TSNE(n_components=2, random_state=seed, init="pca", perplexity=min(30, len(points) // 4))
            places = flat.fit_transform(points.numpy())
            axes.scatter(*places.T, c=range(len(points)), cmap="viridis", s=2, lw=0)
            axes.scatter(*places[centres].T, color="#d1495b", s=18, marker="x", lw=1.2)
            axes.set_title(f"{name}, layer {layer.layer}, head {head}", fontsize=8)
            axes.set_xticks([])
            axes.set_yticks([])
    figure.tight_layout()
    return figure


def _some(vectors: Float[Tensor, "n d"]) -> Float[Tensor, "m d"]:
    """At most POINTS of the vectors, taken evenly from the text."""
    if len(vectors) <= POINTS:
        return vectors
    return vectors[torch.linspace(0, len(vectors) - 1, POINTS).long()]


def _with_legend(figure: Figure, panels: Sequence[Axes]) -> Figure:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, fontsize=8, frameon=False)
    return figure
