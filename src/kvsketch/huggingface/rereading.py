"""A cache's text read a second time, right behind itself, for the notes that layers take; then it is what it was."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from kvsketch.attention import Partial
from kvsketch.caches.core.asking import Asking, Weights, attention_got
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.query import Query
from kvsketch.caches.core.tokens import chunks
from kvsketch.huggingface.layer import SketchLayer
from kvsketch.huggingface.layers import LayerStack

CHUNK = 1024  # tokens read at a time


@torch.no_grad()
def read_again(
    stack: LayerStack,
    asking: Asking,
    ids: Tensor,
    give: Callable[[dict[str, Tensor | None]], object],
    progress: Callable[[int], None] | None,
) -> None:
    """Have a model read the text that layers hold whole again, and note which of its tokens are looked at.

    `give` gives it inputs of a call that goes on from there.
    """
    if not stack.sketch:
        return
    real = stack.sketch[0].positions.real
    real = torch.ones_like(ids) if real is None else real.to(ids)
    for layer in stack.sketch:
        if layer.held.ragged:
            layer.held.window.compact()  # as it is when what comes now is taken back
    found = dict[int, Weights]()
    with _put_back(stack), _watched(stack, partial(_note, asking, found)):
        for start, stop in chunks(ids.shape[1], CHUNK):
            mask = torch.cat([real, real[:, :stop]], 1)
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, start - stop :]
            whole = None if bool(mask.all()) else mask
            give({"input_ids": ids[:, start:stop], "attention_mask": whole, "position_ids": positions})
            if progress is not None:
                progress(ids.shape[1] + stop)
    for layer in stack.sketch:
        held = layer.held
        held.window.renote(asking.with_more(held.window.noted, found[held.layer]))


def _note(
    asking: Asking, found: dict[int, Weights], held: LayerCache, count: int, asked: Query, whole: Partial
) -> None:
    """Have the notes of a layer's first `count` columns after this call too, beside those that are there."""
    columns = held.window.columns.part(0, count)
    real = None if asked.ranks is None else asked.ranks >= 0
    more = attention_got(asking, asked, whole.lse, columns.keys, columns.ranks if held.ragged else None, real)
    before = found.get(held.layer)
    found[held.layer] = more if before is None else torch.maximum(before, more)


@contextmanager
def _watched(stack: LayerStack, note: Callable[..., None]) -> Iterator[None]:
    """Have a layer's queries and answers noted, with how many columns it has now."""
    for layer in stack.sketch:
        layer.watcher = partial(note, layer.held, layer.held.window.length)
    yield


@contextmanager
def _put_back(stack: LayerStack) -> Iterator[None]:
    """Whatever is read here is taken back: from our layers by cropping, others are as they were before."""
    kept = ("held", "model")
    saved = [
        copy.deepcopy({k: v for k, v in vars(layer).items() if not isinstance(layer, SketchLayer) or k not in kept})
        for layer in stack.layers
    ]
    before = {layer.held.layer: (layer.held.seen, list(layer.held.lengths)) for layer in stack.sketch}
    try:
        yield
    finally:
        for layer, state in zip(stack.layers, saved, strict=True):
            vars(layer).update(state)
        for layer in stack.sketch:
            seen, lengths = before[layer.held.layer]
            more = [now - then for now, then in zip(layer.held.lengths, lengths, strict=True)]
            layer.held.crop(layer.held.seen - seen, more)
        stack.touched = False
