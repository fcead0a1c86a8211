"""One layer's fit, from shards to a file: clusters, a pool of queries, classifiers, and how good they are."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvsketch.caches.lookup.key_index import LayerIndex, layer_file
from kvsketch.files import read_about, read_tensors, ready, write_tensors
from kvsketch.fitting.checkpoint import train_or_resume
from kvsketch.fitting.classifiers import Classifiers
from kvsketch.fitting.measure import measure
from kvsketch.fitting.pool import Clusters, Pool, cluster, fill_pool
from kvsketch.fitting.settings import FitSettings, generator
from kvsketch.fitting.shards import long_range_queries

T = TypeVar("T", Clusters, Pool)
Show = Callable[[int, int, str], None]  # the layer, steps of its training, and what is going on


@dataclass(frozen=True)
class LayerFit:
    """Fits one layer after another: the work of a machine that takes part in a fit."""

    out: Path  # where a finished layer's file goes
    work: Path  # where an interrupted layer finds what it goes on from
    train: list[Path]
    lengths: list[int]  # of the texts to fit to
    held_out: list[Path]
    settings: FitSettings
    device: str
    save_every: float = 60.0
    keep: bool = False  # whether files in `work` stay when the layer is there
    show: Show = lambda layer, step, text: None

    def __call__(self, layer: int) -> int:
        """Fit a layer; the result is its number, once its file is there."""
        path = self.out / layer_file(layer)
        if read_about(path) is None:
            self._fit(layer, path)
        if not self.keep:
            for file in self.work.glob(self._file(layer, "*").name):
                file.unlink()
        self.show(layer, self.settings.recipe.steps, "")
        return layer

    def _file(self, layer: int, what: str) -> Path:
        return self.work / f"layer-{layer:02}.{what}.safetensors"

    def _fit(self, layer: int, path: Path) -> None:
        settings, device, seconds = self.settings, self.device, dict[str, float]()
        ready(self.work)

        def made_once(kind: type[T], name: str, make: Callable[[], T]) -> T:
            self.show(layer, 0, name)
            file = self._file(layer, name)
            begin = time.monotonic()
            if read_about(file) is None:
                write_tensors(file, vars(make()), {"seconds": time.monotonic() - begin})
            seconds[name] = (read_about(file) or {})["seconds"]
            return kind(**read_tensors(file, device))

        clusters = made_once(Clusters, "clusters", lambda: cluster(self.train, self.lengths, layer, settings, device))
        pool = made_once(Pool, "pool", lambda: fill_pool(self.train, layer, clusters.before, settings, device))
        classifiers = classifiers_for(clusters, pool, settings, layer)
        seconds["training"] = train_or_resume(
            self._file(layer, "training"),
            classifiers,
            pool,
            settings.recipe,
            generator(settings.seed, layer, "batches"),
            layer=layer,
            save_every=self.save_every,
            show=lambda step, loss: self.show(layer, step, f"loss {loss:.2f}"),
        )
        begin = time.monotonic()
        held_out = measure(self.held_out, layer, classifiers, clusters, settings, device)
        seconds["measuring"] = time.monotonic() - begin
        about = {
            "queries": pool.queries.shape[1],
            "long_range_queries": long_range_queries(self.train, layer).tolist(),
            "held_out": held_out,
            "seconds": {name: round(value, 2) for name, value in seconds.items()},
        }
        write_tensors(path, index_of(clusters, classifiers).tensors(), about)


def classifiers_for(clusters: Clusters, pool: Pool, settings: FitSettings, layer: int) -> Classifiers:
    """A layer's classifiers as they begin: at random, or near what the clusters say."""
    lanes, _, width = pool.queries.shape
    draw = generator(settings.seed, layer, "weights")
    made = Classifiers(lanes, width, settings.hidden, settings.buckets, draw).to(pool.queries.device)
    made.products = None if settings.recipe.products == "float32" else getattr(torch, settings.recipe.products)
    if settings.recipe.start == "clusters":
        made.begin_at(clusters.weight, clusters.bias, pool.queries)
    return made


def index_of(clusters: Clusters, classifiers: Classifiers) -> LayerIndex:
    """What a cache looks up keys and queries by."""
    by_lane = [classifiers.classifier_of(lane) for lane in range(len(clusters.before))]

    def stacked(parts: list[Tensor | None]) -> Tensor | None:
        """Weights as products take them; biases as rows."""
        there = [part for part in parts if part is not None]
        return torch.stack([part.T if part.ndim == 2 else part[None] for part in there]) if there else None

    second, second_bias = stacked([one.second for one in by_lane]), stacked([one.second_bias for one in by_lane])
    assert second is not None
    assert second_bias is not None
    return LayerIndex(
        centroids=clusters.before,
        rotated_centroids=clusters.rotated,
        second=second,
        second_bias=second_bias,
        first=stacked([one.first for one in by_lane]),
        first_bias=stacked([one.first_bias for one in by_lane]),
    )


def report_of(out: Path, layer: int) -> dict[str, Any]:
    """The facts about a finished layer, from its file."""
    about = read_about(out / layer_file(layer))
    assert about is not None
    return about
