"""Saap's study of single layers: answers against how much is read, spans of attention, buckets, keys and queries."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.selectivity.attention_span import span
from benchmarks.selectivity.bucket_sizes import deviations
from benchmarks.selectivity.key_query_spread import key_query_spread
from benchmarks.selectivity.lookups import Case, case_of, measure
from benchmarks.selectivity.plan import KEY, Study, Trial, index_name
from benchmarks.selectivity.separation import separation
from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.caches.lookup.key_index import KeyIndex
from kvsketch.evaluation.layers.plan import Prompt
from kvsketch.evaluation.results.rows import Row, RowsFile, key_of, name_with_digest, read_rows
from kvsketch.huggingface.capture import Captured, capture
from kvsketch.kernels.buckets import assign

# The parts of the study, a file of rows for each, and what their rows depend on besides the model.
KEYS = {
    "lookups": KEY,
    "spans": ("prompt", "tokens", "layer", "top", "sinks", "window", "asking"),
    "spreads": ("prompt", "tokens", "layer", "head", "index", "sinks"),
    "separations": ("prompt", "tokens", "layer", "index", "sinks"),
    "sizes": ("training", "others", "layer", "index", "rotated", "sinks"),
}


@dataclass(frozen=True)
class Item:
    """A row that is wanted: its labels, and how it is measured in a layer."""

    part: str
    labels: Row
    measure: Callable[[Captured, Case], Row]

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells this row from the others of its part."""
        return key_of(self.labels, KEYS[self.part])


@dataclass(frozen=True)
class Asked:
    """Everything that one call of the study is to measure."""

    study: Study
    prompts: Sequence[Prompt]
    training: Sequence[Prompt]  # whose keys the buckets were made of; none if that is not known
    layers: Sequence[int]
    heads: Sequence[tuple[int, int]]  # layers and query heads whose keys and queries are shown, of the first prompt
    top: int  # keys of a span

    @property
    def total(self) -> int:
        """Rows of all texts."""
        return sum(1 for prompt in self.prompts for _ in self.items(prompt))

    def items(self, prompt: Prompt) -> Iterator[Item]:
        """All rows of one text."""
        cut, place = self.study.cut, {"prompt": prompt.name, "tokens": prompt.ids.shape[1]}
        filed = place | {"index": index_name(self.study.indexes[0])} | cut.labels
        for layer in self.layers:
            labels = place | {"layer": layer, "top": self.top} | cut.labels
            yield Item("spans", labels, lambda seen, case: span(seen, cut, self.top))
            yield Item("separations", filed | {"layer": layer}, self._separation)
        for layer, head in self.heads if prompt is self.prompts[0] else ():
            yield Item("spreads", filed | {"layer": layer, "head": head}, partial(self._spread, head))
        for layer, trial in product(self.layers, self.study.trials(self.study.past(prompt))):
            yield Item("lookups", self.study.labels(prompt, layer, trial), partial(_looked_up, trial))

    def sizes(self) -> Iterator[tuple[KeyIndex, Row]]:
        """All rows on bucket sizes: each row's index, and what tells the row from the others."""
        if not self.training:
            return
        texts = {"training": _together(self.training), "others": _together(self.prompts)}
        for layer, index, rotated in product(self.layers, self.study.indexes, (False, True)):
            place = {"layer": layer, "index": index_name(index), "rotated": rotated}
            yield index, texts | place | {"sinks": self.study.cut.sinks, "buckets": index.buckets}

    def _spread(self, head: int, seen: Captured, case: Case) -> Row:
        kv_head = head * len(seen.keys) // len(seen.queries)
        return key_query_spread(seen, head, self._centroids(seen)[kv_head], self.study.cut.sinks)

    def _separation(self, seen: Captured, case: Case) -> Row:
        return separation(seen, self._centroids(seen), self.study.cut.sinks)

    def _centroids(self, seen: Captured) -> Tensor:
        return self.study.indexes[0].layer(seen.layer).centroids


class Files:
    """The rows of all parts, in one folder."""

    def __init__(self, out: Path, run: dict[str, Any]) -> None:
        """Open the files, or begin them."""
        self.by_part = {part: RowsFile(out / f"{part}.jsonl", run, key) for part, key in KEYS.items()}

    def missing(self, items: Iterator[Item]) -> list[Item]:
        """The items that are in no file yet."""
        return [item for item in items if item.key not in self.by_part[item.part].done]

    def rows(self, asked: Asked) -> dict[str, list[Row]]:
        """All rows that were asked for, whenever they were made, by part."""
        wanted = {(item.part, item.key) for prompt in asked.prompts for item in asked.items(prompt)}
        wanted |= {("sizes", key_of(labels, KEYS["sizes"])) for _, labels in asked.sizes()}
        return {
            part: [row for row in read_rows(file.path, file.key)[1] if (part, key_of(row, file.key)) in wanted]
            for part, file in self.by_part.items()
        }


def run(model: PreTrainedModel, asked: Asked, files: Files) -> Iterator[tuple[str, int]]:
    """Measure what the files lack, row by row; yields what was just done, and how many rows of texts that settled."""
    for prompt in asked.prompts:
        missing = files.missing(asked.items(prompt))
        yield "reading", sum(1 for _ in asked.items(prompt)) - len(missing)
        layers = sorted({item.labels["layer"] for item in missing})
        for seen in capture(model, prompt.ids, layers, before_rotation=True) if layers else ():
            case = case_of(seen, asked.study.cut)
            for item in missing:
                if item.labels["layer"] == seen.layer:
                    files.by_part[item.part].add([item.labels | item.measure(seen, case)])
                    yield f"layer {seen.layer}, {item.labels.get('method', item.part)}", 1
    yield from _run_sizes(model, asked, files.by_part["sizes"])


def _looked_up(trial: Trial, seen: Captured, case: Case) -> Row:
    return measure(case, trial)


def _run_sizes(model: PreTrainedModel, asked: Asked, file: RowsFile) -> Iterator[tuple[str, int]]:
    """How evenly the keys of all texts fall into the buckets."""
    missing = [(index, labels) for index, labels in asked.sizes() if key_of(labels, file.key) not in file.done]
    filed = list[list[Tensor]]()
    for prompt in (*asked.training, *asked.prompts) if missing else ():
        yield "filing keys", 0
        filed.append(_buckets_of(model, prompt, missing))
    for number, (index, labels) in enumerate(missing):
        buckets = [text[number] for text in filed]
        training, others = buckets[: len(asked.training)], buckets[len(asked.training) :]
        file.add([labels | deviations(training, others, index.buckets)])


def _buckets_of(model: PreTrainedModel, prompt: Prompt, places: Sequence[tuple[KeyIndex, Row]]) -> list[Tensor]:
    """The bucket of every key of a text except the sinks, [h n], for each of the wanted rows."""
    layers = sorted({labels["layer"] for _, labels in places})
    seen = {found.layer: found for found in capture(model, prompt.ids, layers, before_rotation=True)}
    filed = list[Tensor]()
    for index, labels in places:
        here, learnt = seen[labels["layer"]], index.layer(labels["layer"], model.device)
        centroids = learnt.rotated_centroids if labels["rotated"] else learnt.centroids
        keys = here.keys if labels["rotated"] else here.keys_before
        assert keys is not None, "captured before rotation"
        filed.append(assign(keys[:, labels["sinks"] :].to(centroids.dtype), centroids).cpu())
    return filed


def _together(texts: Sequence[Prompt]) -> str:
    """One name for several texts."""
    return name_with_digest(f"{len(texts)} texts", "\n".join(text.name for text in texts).encode())
