"""Buckets that the study makes itself if it is given no index: k-means of the keys of a few other texts.

Nothing is learnt about queries: they are assigned as keys are, as in `kmeans` and unlike in `saap`.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.selectivity.key_query_spread import evenly
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.algorithms.draws import uniforms
from kvsketch.caches.lookup.key_index import DESCRIPTION, LayerIndex, layer_file, read_index, write_index
from kvsketch.evaluation.layers.plan import Prompt
from kvsketch.files import write_tensors
from kvsketch.huggingface.capture import capture
from kvsketch.huggingface.identity import describe_model
from kvsketch.kernels.buckets import spherical_k_means

MOST = 65_536  # keys of a head that k-means gets at most: more take long and change little


def folder_of(out: Path, count: int) -> Path:
    """The folder of the index with so many buckets."""
    return out / f"kmeans-{count}"


def make_buckets(
    model: PreTrainedModel, texts: Sequence[Prompt], layers: Sequence[int], counts: Sequence[int], out: Path, sinks: int
) -> Iterator[str]:
    """Write an index for each number of buckets, unless it is there already; yields what is being done."""
    about = {
        "model": describe_model(model),
        "texts": [text.name for text in texts],
        "sinks": sinks,
        "learnt": "k-means alone: queries are assigned as keys are",
    }
    missing = [count for count in counts if not _is_there(folder_of(out, count), about | {"buckets": count}, layers)]
    if not missing:
        return
    yield "reading what buckets are made of"
    for layer, (before, after) in keys_of(model, texts, layers, sinks).items():
        for count in missing:
            yield f"layer {layer}, {count} buckets"
            (folder_of(out, count) / DESCRIPTION).unlink(missing_ok=True)  # written last: without it there is no index
            learnt = cluster(before, after, count, layer)
            folder_of(out, count).mkdir(parents=True, exist_ok=True)
            write_tensors(folder_of(out, count) / layer_file(layer), learnt.tensors(), {})
    for count in missing:
        each: dict[str, Any] = {str(layer): {} for layer in layers}
        write_index(folder_of(out, count), about | {"buckets": count, "layers": each})


def keys_of(
    model: PreTrainedModel, texts: Sequence[Prompt], layers: Sequence[int], sinks: int
) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys of all texts for every layer, before and after rotation, evenly spaced in every text; no sinks."""
    parts = defaultdict[int, list[Tensor]](list)
    for text in texts:
        chosen = evenly(sinks, text.ids.shape[1], MOST // len(texts)).to(model.device)
        for seen in capture(model, text.ids, layers, before_rotation=True):
            assert seen.keys_before is not None, "captured before rotation"
            parts[seen.layer].append(torch.stack([seen.keys_before[:, chosen], seen.keys[:, chosen]]).float())
    return {layer: tuple(torch.cat(found, 2)) for layer, found in parts.items()}


def cluster(before: Float[Tensor, "h n d"], after: Float[Tensor, "h n d"], count: int, layer: int = 0) -> LayerIndex:
    """Centroids of keys before and after rotation, from a random start; queries are assigned as keys are."""
    heads, keys, _ = before.shape
    if count > keys:
        raise ValueError(f"{count} buckets need as many keys, the texts have {keys}: give more texts or fewer buckets")
    drawn = uniforms(layer, torch.arange(heads)[:, None], torch.arange(keys))
    start = drawn.argsort(1)[:, :count].to(before.device)
    centroids, rotated = spherical_k_means(before, start), spherical_k_means(after, start)
    no_bias = torch.zeros(heads, 1, count, device=before.device)
    return LayerIndex(centroids, rotated, centroids.mT.contiguous(), no_bias)


def _is_there(folder: Path, about: dict[str, Any], layers: Sequence[int]) -> bool:
    """Whether a readable index is there that was made from the same things for these layers."""
    try:
        index = read_index(folder)
    except ValueError:
        return False
    return index.layers == sorted(layers) and about.items() <= index.description.items()
