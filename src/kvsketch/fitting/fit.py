"""The whole fit: read a corpus, learn layer by layer, and leave a folder in which a cache can look tokens up."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvsketch.caches.lookup.key_index import KeyIndex, read_index
from kvsketch.files import claim, ready
from kvsketch.fitting.corpus import Corpus, Text, read_corpus
from kvsketch.fitting.layer import LayerFit, report_of
from kvsketch.fitting.run import Run
from kvsketch.fitting.settings import FitSettings, generator
from kvsketch.fitting.shards import Reader, Shards, long_range_queries
from kvsketch.fitting.spread import RayCluster
from kvsketch.huggingface import detach, make_cache
from kvsketch.huggingface.attaching import is_attached
from kvsketch.huggingface.capture import choose_layers
from kvsketch.huggingface.identity import describe_model

Job = TypeVar("Job")
Done = TypeVar("Done")


@dataclass(frozen=True)
class Progress:
    """How far one part of the work has got."""

    part: str  # reading or fitting
    done: int
    total: int
    text: str = ""


def _no_progress(progress: Progress) -> None: ...


def _no_note(text: str) -> None: ...


def fit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    files: Sequence[Path],
    out: Path,
    settings: FitSettings,
    *,
    name: str,
    shards_folder: Path | None = None,
    cluster: RayCluster | None = None,
    keep: bool = False,
    save_every: float = 60.0,
    about: Mapping[str, Any] | None = None,
    show: Callable[[Progress], None] = _no_progress,
    note: Callable[[str], None] = _no_note,
) -> KeyIndex:
    """Fit Saap's buckets and classifiers to a model, or go on where a run in this folder was stopped.

    Left empty, `settings.shards.layers` means all full-attention layers that have long-range queries. If the run is
    killed, the text, the clustering or the pool that was being made is lost, and of a training at most `save_every`
    seconds. Unless `keep`, what a layer was made from is removed when the layer is there, and shards in `out` at the
    end; shards in a folder of their own stay.
    """
    device = str(model.device) if cluster is None else cluster.place()  # a cluster that is missing is reported at once
    corpus = _read_files(files, tokenizer, settings, note)
    train, held_out = split(corpus, settings)
    _check_enough_keys(train, settings)
    layers = layers_of(model, settings.shards.layers)
    described, dtype = {**describe_model(model), "id": name}, str(model.dtype).removeprefix("torch.")
    run = Run(out.resolve(), described, dtype, settings, corpus)
    claimed = claim(ready(run.out))
    if run.begin():
        note(f"{out} is finished already")
        return _finished(run, keep)
    shards = _shards_of(run, model, layers, shards_folder)
    _read(corpus, shards, (lambda: model) if cluster is None else partial(cluster.load, device), cluster, show)
    layers = _with_long_range_queries(layers, [shards.path(text) for text in train], settings, note)
    job = _layer_fit(run, shards, train, held_out, device=device, save_every=save_every, keep=keep)
    _fit_layers(job, layers, cluster, show)
    run.finish({layer: report_of(run.out, layer) for layer in layers}, {**(about or {}), **_sizes(train, held_out)})
    index = _finished(run, keep)
    del claimed
    return index


def _read_files(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, settings: FitSettings, note: Callable[[str], None]
) -> Corpus:
    """The corpus; notes what was left out of it."""
    limits = settings.shards
    corpus = read_corpus(files, tokenizer, tokens=settings.tokens, least=limits.least_tokens, apart=limits.apart)
    for text in corpus.notes:
        note(text)
    return corpus


def _shards_of(run: Run, model: PreTrainedModel, layers: list[int], folder: Path | None) -> Shards:
    known = {**describe_model(model), "dtype": run.dtype}
    settings = replace(run.settings.shards, layers=tuple(layers))
    return Shards((folder or run.work / "shards").resolve(), known, settings)


def _layer_fit(
    run: Run,
    shards: Shards,
    train: list[Text],
    held_out: list[Text],
    *,
    device: str,
    save_every: float,
    keep: bool,
) -> LayerFit:
    return LayerFit(
        out=run.out,
        work=run.work,
        train=[shards.path(text) for text in train],
        lengths=[len(text.ids) for text in train],
        held_out=[shards.path(text) for text in held_out],
        settings=run.settings,
        device=device,
        save_every=save_every,
        keep=keep,
    )


def split(corpus: Corpus, settings: FitSettings) -> tuple[list[Text], list[Text]]:
    """Texts to fit to, and texts to measure on."""
    count = len(corpus.texts)
    if count < 2:
        raise ValueError(
            "a fit needs two texts at least, one to measure on, and the corpus has one: give more, or cut it into "
            "shorter ones (--tokens)"
        )
    order = torch.randperm(count, generator=generator(settings.seed, "held out")).tolist()
    out = set(order[: min(count - 1, max(1, round(settings.held_out * count)))])
    return [t for i, t in enumerate(corpus.texts) if i not in out], [t for i, t in enumerate(corpus.texts) if i in out]


def layers_of(model: PreTrainedModel, wanted: Sequence[int]) -> list[int]:
    """The full-attention layers wanted, or all; the model is left with the attention it had."""
    attached_before = is_attached(model)
    try:
        return sorted(choose_layers(make_cache(model, "exact"), list(wanted) or None))
    finally:
        if not attached_before:
            detach(model)


def _check_enough_keys(train: list[Text], settings: FitSettings) -> None:
    there = sum(len(text.ids) - settings.shards.sinks for text in train)
    if there < settings.buckets:
        raise ValueError(
            f"{settings.buckets} buckets need at least as many keys, and the texts to fit to have {there}: give more "
            "text, or make fewer buckets (--buckets)"
        )


def _finished(run: Run, keep: bool) -> KeyIndex:
    index = read_index(run.out)
    index.check_files()
    if run.work.exists() and not keep:
        shutil.rmtree(run.work)
    return index


def _read(
    corpus: Corpus,
    shards: Shards,
    load: Callable[[], PreTrainedModel],
    cluster: RayCluster | None,
    show: Callable[[Progress], None],
) -> None:
    total = len(corpus.texts)
    numbered = {f"text {number} of {total}": text for number, text in enumerate(corpus.texts, 1)}
    missing = {name: text for name, text in numbered.items() if not shards.has(text)}
    done = total - len(missing)
    show(Progress("reading", done, total))
    for name in _spread(cluster, lambda: Reader(load, shards), missing):
        done += 1
        show(Progress("reading", done, total))
        if not (shards.folder / name).is_file():
            raise ValueError(
                f"a worker wrote {shards.folder / name}, which is not there for this machine: workers of a cluster "
                "must share the folder of the shards and that of the result (--shards, -o)"
            )


def _fit_layers(job: LayerFit, layers: list[int], cluster: RayCluster | None, show: Callable[[Progress], None]) -> None:
    steps = job.settings.recipe.steps
    total, finished = steps * len(layers), list[int]()

    def inside(layer: int, step: int, text: str) -> None:
        show(Progress("fitting", steps * len(finished) + step, total, f"layer {layer} {text}"))

    work = job if cluster is not None else replace(job, show=inside)
    for layer in _spread(cluster, lambda: work, {f"layer {layer}": layer for layer in layers}):
        finished.append(layer)
        show(Progress("fitting", steps * len(finished), total, f"layer {layer}"))


def _spread(
    cluster: RayCluster | None, make_worker: Callable[[], Callable[[Job], Done]], jobs: Mapping[str, Job]
) -> Iterator[Done]:
    """The results of the jobs, which are given by their names."""
    if cluster is not None:
        yield from cluster.run(make_worker, jobs)
    elif jobs:
        yield from map(make_worker(), jobs.values())


def _with_long_range_queries(
    layers: list[int], paths: list[Path], settings: FitSettings, note: Callable[[str], None]
) -> list[int]:
    """Layers with long-range queries; layers without any are refused if named or if all are such, else left out."""
    counts = {layer: long_range_queries(paths, layer) for layer in layers}
    without = [layer for layer, count in counts.items() if not count.any()]
    what = f"no query of layers {without} has its best key more than {settings.shards.away} tokens away"
    if without and (settings.shards.layers or len(without) == len(layers)):
        raise ValueError(f"{what}: give longer texts, a smaller --away, or leave the layers out (--layers)")
    if without:
        note(f"{what}: they are left out, to be read in full")
    for layer, count in counts.items():
        if count.any() and not count.all():
            note(f"layer {layer}: KV heads {(count == 0).nonzero()[:, 0].tolist()} learn from queries that look near")
    return [layer for layer in layers if layer not in without]


def _sizes(train: list[Text], held_out: list[Text]) -> dict[str, Any]:
    return {
        name: {"texts": len(texts), "tokens": sum(len(text.ids) for text in texts)}
        for name, texts in (("fitted_to", train), ("held_out", held_out))
    }
