"""Which tokens each head of a cache holds, and a page that shows it: `kvsketch inspect --heads`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from kvsketch.caches.core.chooser import ChosenEntries
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.stream import Stream
from kvsketch.evaluation.pages import write_html
from kvsketch.huggingface import SketchCache

STEPS = 9  # shades of colour, besides white for tokens that no head holds


@dataclass(frozen=True)
class HeldByLayer:
    """The tokens of a text that the KV heads of a layer hold."""

    layer: int
    held: Bool[Tensor, "h n"]  # which tokens
    made: list[int]  # number of each head's entries that are not single tokens, such as means of clusters


def held_tokens(whole: SketchCache, small: SketchCache) -> list[HeldByLayer]:
    """Which tokens of a text a small cache holds; `whole` is the exact cache that it was made from, of one row.

    An entry is taken for the token with the same key, bit by bit; if several have it, for the earliest one left.
    """
    assert whole.rows == 1, "a page shows one text"
    return [
        _of_layer(own.held, other.held) for own, other in zip(small.sketch_layers, whole.sketch_layers, strict=True)
    ]


def _of_layer(own: LayerCache, other: LayerCache) -> HeldByLayer:
    (stream,) = other.streams.all
    keys = stream.window.columns.keys[0]
    held, made = torch.zeros(keys.shape[:2], dtype=torch.bool), [0] * len(keys)
    for heads, part in zip(own.streams.heads, own.streams.all, strict=True):
        for place, head in enumerate(heads):
            held[head, part.window.columns.ranks[0].cpu()] = True
            entries = _keys_of_past(part, place)
            if entries is not None:
                found = _places(keys[head], held[head], entries)
                held[head, found] = True
                made[head] = len(entries) - len(found)
    return HeldByLayer(own.layer, held, made)


def _keys_of_past(stream: Stream, head: int) -> Tensor | None:
    """The keys of the entries that a head of a stream holds besides sinks and window; None if there are none."""
    for bundle in [] if stream.past is None else stream.past.bundles:
        if head in bundle.heads and bundle.count:
            if not isinstance(bundle.holding, ChosenEntries):
                raise ValueError(
                    f"{stream.config.name} holds its past in a form that does not tell tokens apart: a method whose "
                    "entries are tokens can be shown, kvzip for instance"
                )
            return bundle.holding.entries().keys[bundle.heads.index(head)]
    return None


def _places(keys: Tensor, held: Tensor, entries: Tensor) -> list[int]:
    """The tokens, not yet held, that have the keys of these entries; entries with other keys are left out."""
    by_key = dict[bytes, list[int]]()
    rows = keys.contiguous().view(torch.uint8).cpu().numpy()
    for place in (~held).nonzero()[:, 0].flip(0).tolist():
        by_key.setdefault(rows[place].tobytes(), []).append(place)
    wanted = [row.tobytes() for row in entries.contiguous().view(torch.uint8).cpu().numpy()]
    return [by_key[row].pop() for row in wanted if by_key.get(row)]


def write_kept_page(path: Path, layers: Sequence[HeldByLayer], tokens: Sequence[str], about: dict[str, Any]) -> None:
    """Write a page that needs no other file: the text, coloured by how many heads hold each token, and every head."""
    held = torch.cat([layer.held for layer in layers])  # [heads of all layers, n]
    counts = held.sum(0).tolist()
    most = len(held)
    spans = [(text, count, -(-count * STEPS // most)) for text, count in zip(tokens, counts, strict=True)]
    grid = [(layer.layer, [round(float(head.float().mean()), 4) for head in layer.held]) for layer in layers]
    write_html(
        path,
        "kvsketch.evaluation.inspection",
        "kept.html",
        about=about,
        tokens=spans,
        heads=most,
        nowhere=sum(count == 0 for count in counts),
        everywhere=sum(count == most for count in counts),
        mean=float(held.float().mean()),
        made=sum(sum(layer.made) for layer in layers),
        grid=grid,
        shades=STEPS,
        bits=[_bits(row) for row in held],
    )


def _bits(row: Bool[Tensor, " n"]) -> str:
    """A hexadecimal digit for every four tokens; the first token is the lowest bit."""
    padded = torch.cat([row, row.new_zeros(-len(row) % 4)]).view(-1, 4).int()
    return "".join(f"{digit:x}" for digit in (padded * torch.tensor([1, 2, 4, 8])).sum(1).tolist())


def token_texts(text: str, ends: Sequence[int]) -> list[str]:
    """The text that each token adds, from where tokens end; a character that several share goes to the first."""
    starts = [0, *accumulate(ends, max)]
    return [text[start:stop] for start, stop in zip(starts, ends, strict=False)]
