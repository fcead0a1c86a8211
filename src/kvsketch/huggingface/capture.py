"""What a model's attention layers see while it reads a text: queries and keys, also before rotation, and values."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.attention import Partial
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens
from kvsketch.huggingface import SketchCache, detach, make_cache, prefill
from kvsketch.huggingface.attaching import is_attached
from kvsketch.huggingface.layer import SketchLayer
from kvsketch.huggingface.rotation import BeforeRotation
from kvsketch.huggingface.supported import check_context


@dataclass(frozen=True)
class Captured:
    """One layer's share of a text."""

    layer: int
    queries: Float[Tensor, "hg n d"]  # query head = KV head · g + number in the group
    keys: Float[Tensor, "h n d"]
    values: Float[Tensor, "h n e"]
    scale: float  # of the logits
    softcap: float | None = None
    queries_before: Float[Tensor, "hg n d"] | None = None  # rotation
    keys_before: Float[Tensor, "h n d"] | None = None


class Listening(LayerCache):
    """Holds everything, and notes the queries; with a `watch` also queries and keys as they were before rotation."""

    def __init__(self, *args: Any, watch: BeforeRotation | None) -> None:
        super().__init__(*args)
        self.watch = watch
        self.queries = list[Tensor]()
        self.before = list[tuple[Tensor, Tensor]]()
        self.scale = 0.0
        self.softcap: float | None = None

    def read(self, query: Tensor, new: NewTokens, scale: float, softcap: float | None = None, **given: Any) -> Partial:
        """Note the queries, and answer as ever."""
        self.queries.append(query.detach())
        if self.watch is not None:
            self.before.append(self.watch.take(self.layer, query, new.keys))
        self.scale, self.softcap = scale, softcap
        return super().read(query, new, scale, softcap, **given)


@torch.no_grad()
def capture(
    model: PreTrainedModel,
    ids: Tensor,
    layers: Sequence[int] | None = None,
    *,
    at_most: int | None = None,
    before_rotation: bool = False,
) -> list[Captured]:
    """Read one text (a row of ids) and return what these full-attention layers saw.

    Without `layers` it is all of them, or at most `at_most` of them, evenly from the first to the last. With
    `before_rotation` also queries and keys before rotation. The model is left with the attention it had.
    """
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise ValueError(f"capture reads one text, ids of shape 1 × tokens, got shape {tuple(ids.shape)}")
    check_context(model, ids.shape[1], "a text has")
    attached_before = is_attached(model)
    cache = make_cache(model, "exact")
    try:
        cache.model.check_in_one("noting what layers see")
        chosen = choose_layers(cache, layers, at_most)
        with BeforeRotation(model, chosen) if before_rotation else nullcontext() as watch:
            listening = _listen(cache, chosen, watch)
            prefill(model, ids, cache)
    finally:
        if not attached_before:
            detach(model)
    return [_captured(index, heard) for index, heard in listening.items()]


def choose_layers(cache: SketchCache, layers: Sequence[int] | None, at_most: int | None = None) -> list[int]:
    """The full-attention layers wanted: these, all, or at most `at_most` of them, evenly from the first to the last."""
    there = [index for index, layer in enumerate(cache.layers) if isinstance(layer, SketchLayer)]
    unknown = sorted(set(layers or ()) - set(there))
    if unknown:
        raise ValueError(f"layers {unknown} are no full-attention layers of this model; there are {there}")
    if layers is not None:
        return list(dict.fromkeys(layers))
    if at_most is None:
        return there
    places = {round(i * (len(there) - 1) / max(1, at_most - 1)) for i in range(at_most)}
    return [there[place] for place in sorted(places)]


def _listen(cache: SketchCache, layers: Sequence[int], watch: BeforeRotation | None) -> dict[int, Listening]:
    listening = dict[int, Listening]()
    for index in layers:
        layer = cache.layers[index]
        assert isinstance(layer, SketchLayer)
        held = layer.held
        layer.held = listening[index] = Listening(held.config, held.layer, held.layer_bytes, watch=watch)
    return listening


def _captured(index: int, heard: Listening) -> Captured:
    columns = heard.window.columns
    before = [torch.cat(parts, 2)[0] for parts in zip(*heard.before, strict=True)]
    found = Captured(
        index, torch.cat(heard.queries, 2)[0], columns.keys[0], columns.values[0], heard.scale, heard.softcap
    )
    return replace(found, queries_before=before[0], keys_before=before[1]) if before else found
