"""Texts that are read behind the one a cache holds, for the notes that layers take; then it is what it was."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from kvsketch.attention import Partial
from kvsketch.caches.core.asking import Askings, attention_got
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.query import Query
from kvsketch.caches.core.tokens import chunks
from kvsketch.huggingface.layer import SketchLayer
from kvsketch.huggingface.layers import LayerStack

CHUNK = 1024  # tokens read at a time


Give = Callable[[dict[str, Tensor | None]], object]


@torch.no_grad()
def read_behind(
    stack: LayerStack,
    askings: Askings,
    texts: Sequence[tuple[Tensor, Tensor]],
    give: Give,
    progress: Callable[[int], None],
) -> None:
    """Have a model read each of some texts behind the one that layers hold whole, and note what is looked at of that.

    Texts come with which of their tokens are real. `give` gives the model inputs of a call that goes on from the
    cache; `progress` hears how many tokens were read here.
    """
    done, before, offsets = 0, stack.sketch[0].positions.real, stack.sketch[0].positions.offsets
    for ids, real in texts:
        if not ids.shape[1]:  # of nothing but padding
            continue
        first = (
            torch.ones(len(ids), stack.seen, dtype=real.dtype, device=ids.device) if before is None else before.to(real)
        )
        with _put_back(stack), _watched(stack, partial(_note, askings)):
            for start, stop in chunks(ids.shape[1], CHUNK):
                mask = torch.cat([first, real[:, :stop]], 1)
                positions = (mask.cumsum(1) - 1).clamp_min(0)[:, start - stop :]
                if offsets is not None:
                    positions = positions + torch.tensor(offsets, device=ids.device)[:, None]
                whole = None if bool(mask.all()) else mask
                give({"input_ids": ids[:, start:stop], "attention_mask": whole, "position_ids": positions})
                progress(done + stop)
        done += ids.shape[1]


def _note(askings: Askings, held: LayerCache, count: int, asked: Query, whole: Partial) -> None:
    """Note what a layer's first `count` columns got from a call: before it is taken back, which moves columns."""
    columns = held.window.columns.part(0, count)
    assert columns.notes is not None, "notes are made with the tokens"
    real = None if asked.ranks is None else asked.ranks >= 0
    ranks = columns.ranks if held.ragged else None
    for asking, place in askings:
        if asking.behind:
            more = attention_got(asking, asked, whole.lse, columns.keys, ranks, real)
            held.window.renote(asking.with_more(columns.notes[..., place], more), place)


@contextmanager
def _watched(stack: LayerStack, note: Callable[..., None]) -> Iterator[None]:
    """Have a layer's queries and answers noted, with how many columns it has now."""
    try:
        for layer in stack.sketch:
            layer.watcher = partial(note, layer.held, layer.held.window.length)
            layer.held.notes_calls = False
        yield
    finally:
        for layer in stack.sketch:
            layer.held.notes_calls = True


@contextmanager
def _put_back(stack: LayerStack) -> Iterator[None]:
    """Whatever is read here is taken back: from our layers by cropping, others are as they were before."""
    kept = ("held", "model")
    saved = [
        copy.deepcopy({k: v for k, v in vars(layer).items() if not isinstance(layer, SketchLayer) or k not in kept})
        for layer in stack.layers
    ]
    touched = stack.touched
    before = {layer.held.layer: (layer.held.seen, list(layer.held.lengths)) for layer in stack.sketch}
    try:
        yield
    finally:
        stack.touched = True  # until all of them are back
        for layer, state in zip(stack.layers, saved, strict=True):
            vars(layer).update(state)
        for layer in stack.sketch:
            layer.held.go_back(*before[layer.held.layer])
        stack.touched = touched
