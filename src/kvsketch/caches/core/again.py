"""A single token that comes as the one before it did: held and answered in one call of C, where nothing else is due.

`LayerCache._step` is the road that every token can take. It leaves an `Again` behind where the next one may take this
one, which does the same; what both go by is compared each time, and where anything is another there is no `Again` left.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvsketch.attention import Partial
from kvsketch.caches.core.buffers import Growing, Window
from kvsketch.caches.core.config import BLOCK
from kvsketch.caches.core.layer_state import LayerState
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.stream import Stream
from kvsketch.caches.core.tokens import NewTokens, Seen
from kvsketch.kernels import native
from kvsketch.kernels.native.attention import NOTED
from kvsketch.kernels.native.step import Step
from kvsketch.kernels.routing.native import Question, question
from kvsketch.kernels.sources import Classifier, Entries


class Again:
    """What is known of the latest token's step, so that up to a block of tokens that come alike need one call each."""

    @classmethod
    def of(cls, layer: LayerState, asked: Query, new: NewTokens, found: Answer) -> "Again | None":
        """None where the next token may not come so; `found`: what was still to be read, with the window."""
        stream = layer.streams.only if asked.queries.is_cpu else None
        if stream is None or not _is_plain(layer, stream) or not _nothing_due(stream):
            return None
        parts = [part for source in found.unread for part in source]
        chosen = [part.choice for part in parts if part.choice is not None]
        buffers = [x for one in _grown(stream.window) if (x := one.buffer) is not None]
        if (
            found.attended is not None
            or found.estimated is not None
            or native.library_for(asked.queries, new.keys, new.values, *buffers[:2]) is None
            or not all(NOTED in part.noted and part.segments is None for part in parts)
            or len(found.unread[-1]) != 1
            or parts[-1].lanes is not None
            or any(x.stride(3) != 1 for x in (asked.queries, new.keys, new.values))
            or not all(x.is_contiguous() for x in buffers)
            or (found.read is not None) != (len(chosen) == 1)
        ):
            return None
        router = asking = None
        if chosen:
            router = stream.method.router(asked.queries, layer.heads) if stream.method is not None else None
            if router is not None and asked.unrotated is not None:
                asking = question(asked.unrotated, router, layer.heads)
            if asking is None:
                return None
        return cls(layer, stream, asked, new, parts, router, asking)

    def __init__(
        self,
        layer: LayerState,
        stream: Stream,
        asked: Query,
        new: NewTokens,
        parts: list[Entries],
        router: Classifier | None,
        asking: Question | None,
    ) -> None:
        rows = len(asked.queries)
        self.stream, self.window, self.library = stream, stream.window, native.library()
        self.inferring = torch.is_inference_mode_enabled()
        self.how, self.looks = (asked.scale, asked.softcap), _looks_of(asked.queries, new)
        self.buffers = [(one, one.buffer) for one in _grown(stream.window)]
        self.held, self.looks_up = _held_by(stream), asking is not None
        read = [x for _, x in self.buffers if x is not None] + ([] if router is None else [*router.tensors])
        for part in parts[:-1]:
            read += [x for x in (part.tokens.keys, part.tokens.values, part.tokens.log_mass) if x is not None]
        self.at = [(x, x.data_ptr()) for x in read]  # torch may move a tensor, as to share it with a process
        self.first = layer.seen  # the rank of the next token
        self.ranks = [torch.full((rows, 1), self.first + n, device="cpu") for n in range(BLOCK)]
        self.lse = native.room(BLOCK, *asked.queries.shape[:3]).unbind()
        self.read = native.room(BLOCK, 1, rows * layer.heads, 1, dtype=torch.int64).unbind()
        self.notes = stream.method is not None and stream.method.takes_notes
        coming = (new.keys, new.values, self.ranks[0])
        puts = [(x, own) for (_, x), own in zip(self.buffers, coming, strict=True) if x is not None]
        self.step = Step(asked.queries, parts, layer.heads, self.how, puts, asking)
        self.served = False

    def __deepcopy__(self, _: object) -> None:
        """What is told to C is about one layer's tensors, and no other's."""

    def take(
        self,
        layer: LayerState,
        query: Tensor,
        new: NewTokens,
        how: tuple[float, float | None],
        begin: Callable[[], None],
    ) -> Partial | None:
        """Hold a token and answer its query; None, and nothing is held, where it does not come as the one before."""
        number, place = layer.seen - self.first, self.window.ranks.length
        if not (how == self.how and 0 <= number < BLOCK and self._is_still(layer, place, query, new)):
            return None
        begin()
        ranks, lse, read = self.ranks[number], self.lse[number], self.read[number]
        unrotated = new.unrotated.queries if self.looks_up and new.unrotated is not None else None
        out = self.step.run(place, (new.keys, new.values, ranks), query, lse, unrotated, read)
        if out is None:
            return None
        self.served = True
        layer.count_one()
        for grown, _ in self.buffers:
            grown.length = place + 1
        self.stream.may_come -= 1
        if self.notes:
            self.stream.waiting.append(Seen.of(new, ranks, ahead=layer.config.looks_ahead))
        if self.looks_up:
            self.held[0].count_read(read)  # of the one store there is
        return Partial(out, lse)

    def _is_still(self, layer: LayerState, place: int, query: Tensor, new: NewTokens) -> bool:
        """Whether all is as it was, nothing is due, and there is room."""
        stream = self.stream
        if layer.streams.only is not stream or stream.window is not self.window or _is_elsewhere(layer, self.window):
            return False
        if not _nothing_due(stream) or native.library() is not self.library or _looks_of(query, new) != self.looks:
            return False
        if torch.is_grad_enabled() and (query.requires_grad or new.keys.requires_grad or new.values.requires_grad):
            return False
        if torch.is_inference_mode_enabled() != self.inferring:
            return False
        if any(grown.buffer is not buffer or grown.length != place for grown, buffer in self.buffers):
            return False
        held = _held_by(stream)
        if len(held) != len(self.held) or any(x is not y for x, y in zip(held, self.held, strict=True)):
            return False
        return all(x.data_ptr() == at for x, at in self.at)


def _is_plain(layer: LayerState, stream: Stream) -> bool:
    """Whether a step is nothing but holding and reading: nobody notes whom attention goes to."""
    if layer.config.askings or not stream.heads.all_here or _is_elsewhere(layer, stream.window):
        return False
    if stream.method is not None and stream.method.notes_at_once:
        return False
    past = stream.past
    if past is None or not stream.observes:
        return True
    return past.method.observes == {"read"} and past.method.has_router and len(past.bundles) == 1


def _grown(window: Window) -> tuple[Growing, ...]:
    """What a token is put into."""
    return window.keys, window.values, window.ranks


def _nothing_due(stream: Stream) -> bool:
    """Whether there is room for a token in the window, and neither does one leave it then nor is one noted."""
    noting = stream.method is not None and stream.method.takes_notes
    if stream.may_come <= 1 or (noting and len(stream.waiting) + 1 >= BLOCK):
        return False
    place = stream.window.ranks.length
    return all(one.buffer is not None and place < one.buffer.shape[one.dim] for one in _grown(stream.window))


def _is_elsewhere(layer: LayerState, window: Window) -> bool:
    """Whether tokens go other ways: only the device counts, or rows have unequal lengths."""
    return layer.next_rank is not None or layer.ragged or window.ragged or window.place is not None


def _held_by(stream: Stream) -> list[Any]:
    """What a step reads beside the window. Whatever is written there, other objects are read from then on."""
    bundles = [bundle for lanes in stream.lanes for bundle in lanes.bundles]
    return [x for bundle in bundles for x in (bundle.holding, bundle.holding.read_from)]


def _looks_of(query: Tensor, new: NewTokens) -> list[Any]:
    """What C takes a token by: kinds, shapes and strides of all that comes."""
    tensors = [query, new.keys, new.values]
    if new.unrotated is not None:
        tensors.append(new.unrotated.queries)
    return [(type(x), x.is_cpu, x.dtype, x.shape, x.stride()) for x in tensors]
