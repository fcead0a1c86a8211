"""What the attention layers of a model see while it reads a text: queries, keys and values, after rotation."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.attention import Partial
from kvsketch.caches.layer import LayerCache, NewTokens
from kvsketch.huggingface import make_cache, prefill
from kvsketch.huggingface.layer import SketchLayer


@dataclass(frozen=True)
class Captured:
    """One layer's share of a text."""

    layer: int
    queries: Float[Tensor, "hg n d"]  # query head = KV head · g + number in the group
    keys: Float[Tensor, "h n d"]
    values: Float[Tensor, "h n e"]
    scale: float  # of the logits


class Listening(LayerCache):
    """Holds everything, and notes the queries."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.queries = list[Tensor]()
        self.scale = 0.0

    def read(
        self, query: Tensor, new: NewTokens, scale: float, softcap: float | None = None, *, lse: bool = True
    ) -> Partial:
        """Answer as ever."""
        self.queries.append(query.detach())
        self.scale = scale
        return super().read(query, new, scale, softcap, lse=lse)


@torch.no_grad()
def capture(model: PreTrainedModel, ids: Tensor, layers: list[int] | None = None) -> list[Captured]:
    """Read one text (a row of ids) and return what these full-attention layers saw; all of them if None."""
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise ValueError(f"capture reads one text, ids of shape 1 × tokens, got shape {tuple(ids.shape)}")
    cache = make_cache(model, "exact")
    there = [index for index, layer in enumerate(cache.layers) if isinstance(layer, SketchLayer)]
    wanted = there if layers is None else layers
    unknown = sorted(set(wanted) - set(there))
    if unknown:
        raise ValueError(f"layers {unknown} are no full-attention layers of this model; there are {there}")
    listening = dict[int, Listening]()
    for index in wanted:
        layer = cache.layers[index]
        assert isinstance(layer, SketchLayer)
        layer.held = listening[index] = Listening(layer.held.config, layer.held.layer, layer.held.layer_bytes)
    prefill(model, ids, cache)
    return [
        Captured(
            index,
            torch.cat(held.queries, 2)[0],
            held.window.columns.keys[0],
            held.window.columns.values[0],
            held.scale,
        )
        for index, held in listening.items()
    ]
