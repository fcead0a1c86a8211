"""Texts that are read after the one a cache holds, for the notes that layers take; then the cache is what it was."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.attention import Partial
from kvsketch.caches.core.asking import Askings, attention_got
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.query import Query
from kvsketch.caches.core.tokens import chunks
from kvsketch.huggingface.layer import SketchLayer
from kvsketch.huggingface.layers import LayerStack
from kvsketch.huggingface.supported import check_context

CHUNK = 1024  # tokens of a call
PIECE, LEAD = 2048, 64  # tokens that are read again at a time; and of the tokens before them, which lead up to them
LEAST = 256  # tokens of a piece, if the context has no room for more
ONCE = "Or take a method that reads a prompt once, such as keydiff"

Give = Callable[[dict[str, Tensor | None]], object]


@dataclass(frozen=True)
class Behind:
    """A text read after the one a cache holds: its tokens, which of them are real, and from which one on they ask."""

    ids: Int64[Tensor, "b n"]
    real: Int64[Tensor, "b n"]
    lead: int = 0


def check_room_behind(model: PreTrainedModel, count: int, what: str, advice: str = ONCE) -> int:
    """How many tokens a second reading of `count` needs after them, at least; refuses a text that leaves no room."""
    least = min(count, LEAST + LEAD)
    check_context(model, count + least, f"{what} and what is read again of it at a time have", advice)
    return least


def most_behind(count: int) -> int:
    """How many tokens a second reading of `count` has after them, at most."""
    return count if count <= PIECE else PIECE + LEAD


def pieces(ids: Int64[Tensor, "b n"], real: Int64[Tensor, "b n"], room: int | None) -> list[Behind]:
    """A text as it is read again: whole, or in pieces, each read after the text and after the tokens that lead to it.

    `room`: for how many tokens the context has room. If that is little, pieces of a row beside a longer one are shorter
    than those of the row alone.
    """
    count, most = ids.shape[1], PIECE + LEAD if room is None else min(PIECE + LEAD, room)
    if count <= min(PIECE, most):
        return [Behind(ids, real)]
    starts = range(0, count, most - LEAD)
    leads = [min(LEAD, start) for start in starts]
    parts = [slice(start - lead, start + most - LEAD) for start, lead in zip(starts, leads, strict=True)]
    return [Behind(ids[:, part], real[:, part], lead) for part, lead in zip(parts, leads, strict=True)]


@torch.no_grad()
def read_behind(
    stack: LayerStack,
    askings: Askings,
    texts: Sequence[Behind],
    give: Give,
    progress: Callable[[int], None],
) -> None:
    """Have a model read each of these texts after the one that layers hold whole, and note what they look at in it.

    `give` calls the model with inputs that go on from the cache; `progress` is told how many tokens were read.
    """
    done, before, offsets = 0, stack.sketch[0].positions.real, stack.sketch[0].positions.offsets
    for layer in stack.sketch:  # a reading that was interrupted has left notes
        window = layer.held.window
        for asking, place in askings:
            if asking.behind:
                window.renote(asking.none(window.columns.keys), place)
    for text in texts:
        count, real = text.ids.shape[1], text.real
        if not count:  # there is nothing but padding
            continue
        first = real.new_ones(len(real), stack.seen) if before is None else before.to(real)
        spans = [(text.lead + start, text.lead + stop) for start, stop in chunks(count - text.lead, CHUNK)]
        noting = _Noting(askings)
        with _put_back(stack), _watched(stack, noting):
            for start, stop in [(0, text.lead)] * (text.lead > 0) + spans:
                noting.on = start >= text.lead
                mask = torch.cat([first, real[:, :stop]], 1)
                positions = (mask.cumsum(1) - 1).clamp_min(0)[:, start - stop :]
                if offsets is not None:
                    positions = positions + torch.tensor(offsets, device=real.device)[:, None]
                noting.padded = not bool(mask.all())
                whole = mask if noting.padded else None
                give({"input_ids": text.ids[:, start:stop], "attention_mask": whole, "position_ids": positions})
                if noting.on:
                    progress(done + stop - text.lead)
        done += count - text.lead


class _Noting:
    """Notes what a layer's first `count` columns got from a call, before the call is taken back: that moves columns."""

    def __init__(self, askings: Askings) -> None:
        self.askings, self.on, self.padded = askings, True, True

    def __call__(self, held: LayerCache, count: int, asked: Query, whole: Partial) -> None:
        if not self.on:
            return
        columns = held.window.columns.part(0, count)
        assert columns.notes is not None, "notes are made with the tokens"
        real = None if asked.ranks is None or not self.padded else asked.ranks >= 0
        ranks = columns.ranks if held.ragged else None
        for asking, place in self.askings:
            if asking.behind:
                more = attention_got(asking, asked, whole.lse, columns.keys, ranks, real)
                held.window.renote(asking.with_more(columns.notes[..., place], more), place)


@contextmanager
def _watched(stack: LayerStack, note: Callable[..., None]) -> Iterator[None]:
    """In this block `note` is told of each layer's queries and answers, and how many columns the layer has now."""
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
    """Whatever is read in this block is taken back: our layers are cropped, others get back the state they had."""
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
