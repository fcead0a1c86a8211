"""Shards: what Saap learns from one text, in one file.

For every layer it has all keys, before rotation and after it, and some queries of every KV head, from all query heads
of its group: those whose best key is far away. A KV head that has none in a text gives a few others, marked as such.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.files import read_about, read_tensors, ready, write_tensors
from kvsketch.fitting.corpus import Text
from kvsketch.fitting.settings import ShardSettings, generator
from kvsketch.huggingface.capture import Captured, capture
from kvsketch.kernels.buckets import long_range

FORMAT = 2
POSITIONS_AT_ONCE = 256  # positions whose queries are looked at together
FALLBACK_PART = 8  # if no query is long-range, one in so many of the number wanted is taken
CANDIDATES = 16  # queries looked at for every query wanted, at most


@dataclass(frozen=True)
class ShardLayer:
    """One layer's part of a shard; queries of all KV heads one after another."""

    keys: Float[Tensor, "h n d"]
    keys_before: Float[Tensor, "h n d"]  # rotation
    queries: Float[Tensor, "m d"]
    queries_before: Float[Tensor, "m d"]
    query_heads: Int64[Tensor, " m"]  # the KV head that each belongs to
    query_positions: Int64[Tensor, " m"]
    query_is_far: Bool[Tensor, " m"]
    scale: float
    softcap: float | None

    @property
    def key_positions(self) -> Int64[Tensor, " n"]:
        """A text is read from its beginning."""
        return torch.arange(self.keys.shape[1], device=self.keys.device)


@dataclass(frozen=True)
class Shards:
    """A folder of shards, all made with the same model and settings."""

    folder: Path
    model: dict[str, Any]  # what identifies the model, and the precision it ran in
    settings: ShardSettings

    def path(self, text: Text) -> Path:
        """Where the shard of a text is: under another name for another model, setting or text."""
        digest = hashlib.sha256(json.dumps(self._about(text), sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:24]}.safetensors"

    def has(self, text: Text) -> bool:
        """Whether the shard of a text is there and whole."""
        about = read_about(self.path(text)) or {}
        return {name: about.get(name) for name in self._about(text)} == self._about(text)

    def write(self, text: Text, captured: list[Captured]) -> None:
        """Make the shard of a text from what the model's layers saw."""
        tensors, layers = dict[str, Tensor](), dict[str, Any]()
        for seen in captured:
            chosen = choose_queries(seen, self.settings, generator(self.settings.seed, text.digest, seen.layer))
            tensors |= {f"{seen.layer}.{name}": tensor for name, tensor in chosen.items()}
            heads = chosen["query_heads"][chosen["query_is_far"]]
            far = torch.bincount(heads, minlength=len(seen.keys)).tolist()
            layers[str(seen.layer)] = {"scale": seen.scale, "softcap": seen.softcap, "long_range": far}
        ready(self.folder)
        write_tensors(self.path(text), tensors, {**self._about(text), "tokens": len(text.ids), "seen": layers})

    def _about(self, text: Text) -> dict[str, Any]:
        settings = {**asdict(self.settings), "layers": list(self.settings.layers)}
        return {"format": FORMAT, "model": self.model, "settings": settings, "text": text.digest}


class Reader:
    """Reads texts and leaves a shard of each: the work of a machine that takes part in a capture."""

    def __init__(self, load: Callable[[], PreTrainedModel], shards: Shards) -> None:
        self.model, self.shards = load(), shards

    def __call__(self, text: Text) -> str:
        """Read a text; the result is the name of its shard."""
        ids = text.ids[None].to(self.model.device)
        captured = capture(self.model, ids, self.shards.settings.layers, before_rotation=True)
        self.shards.write(text, captured)
        return self.shards.path(text).name


def read_layer(path: Path, layer: int, device: torch.device | str = "cpu") -> ShardLayer:
    """A layer's part of a shard."""
    seen = _seen(path, layer)
    tensors = read_tensors(path, device, f"{layer}.")
    return ShardLayer(**tensors, scale=seen["scale"], softcap=seen["softcap"])


def long_range_queries(paths: list[Path], layer: int) -> Int64[Tensor, " h"]:
    """How many long-range queries of every KV head these shards have."""
    return torch.tensor([_seen(path, layer)["long_range"] for path in paths]).sum(0)


def _seen(path: Path, layer: int) -> dict[str, Any]:
    """What a shard's description says about a layer."""
    found: dict[str, Any] | None = (read_about(path) or {}).get("seen", {}).get(str(layer))
    if found is None:
        raise ValueError(f"the shard {path} is missing or damaged: run the same command again to make it anew")
    return found


def choose_queries(seen: Captured, settings: ShardSettings, draw: torch.Generator) -> dict[str, Tensor]:
    """Keys of a layer, and for every KV head the number of long-range queries wanted, or all there are."""
    assert seen.keys_before is not None
    assert seen.queries_before is not None
    heads, count, _ = seen.keys.shape
    grouped, before = (_by_position(x, heads) for x in (seen.queries, seen.queries_before))  # [h, n·g, d]
    group = grouped.shape[1] // count
    keys, at = seen.keys.float(), torch.arange(count, device=seen.keys.device)
    first = settings.least_tokens - 1  # the first position from which a key far away can be seen
    order = torch.randperm(count - first, generator=draw).to(at.device) + first
    most = -(-settings.queries * CANDIDATES // group)  # positions
    places, far = list[Tensor](), list[Tensor]()
    for part in order[:most].split(POSITIONS_AT_ONCE):
        here = (part[:, None] * group + torch.arange(group, device=at.device)).flatten()
        places.append(here)
        far.append(long_range(grouped[:, here].float(), keys, here // group, at, settings.away, settings.sinks))
        if int(torch.cat(far, 1).sum(1).min()) >= settings.queries:
            break
    looked_at, is_far = torch.cat(places), torch.cat(far, 1)
    others = looked_at[: -(-settings.queries // FALLBACK_PART)]
    chosen = [looked_at[found][: settings.queries] if bool(found.any()) else others for found in is_far]
    head = torch.repeat_interleave(torch.tensor([len(found) for found in chosen]).to(at.device))
    place = torch.cat(chosen)
    return {
        "keys": seen.keys,
        "keys_before": seen.keys_before,
        "queries": grouped[head, place],
        "queries_before": before[head, place],
        "query_heads": head,
        "query_positions": place // group,
        "query_is_far": is_far.any(1)[head],
    }


def _by_position(queries: Float[Tensor, "hg n d"], heads: int) -> Float[Tensor, "h ng d"]:
    """Queries of a KV head's whole group, those of one position side by side."""
    return queries.unflatten(0, (heads, -1)).transpose(1, 2).flatten(1, 2)
