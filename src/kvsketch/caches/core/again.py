"""A single token that comes like the one before it: held, answered, and its attention noted in one call of C.

`LayerCache._step` is the long road, which every token can take; this one is shorter and does the same. After a token
`LayerCache` has an `Again` if the next token may take the short road. What the road depends on is compared each time,
and if anything differs the `Again` is dropped.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens
from kvsketch.caches.core.asking import Asking, weights, where_noted
from kvsketch.caches.core.buffers import Growing, Window
from kvsketch.caches.core.config import BLOCK
from kvsketch.caches.core.layer_state import LayerState
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.stream import Stream
from kvsketch.caches.core.tokens import NewTokens, Seen
from kvsketch.kernels import native
from kvsketch.kernels.native.attention import can_attend, can_read_weights
from kvsketch.kernels.native.step import Note, Step
from kvsketch.kernels.routing.native import Question, question
from kvsketch.kernels.sources import Classifier, Entries

AT_ONCE = 8  # answers to make room for at a time: after a step the processor's caches are cold; one alone costs 30 µs


class Room:
    """Memory for the answers of a few tokens to come, used from last to first; and tensors that all tokens share."""

    def __init__(
        self, query: Float[Tensor, "b hg 1 d"], width: int, heads: int, no_notes: Tensor | None, *, reads: bool
    ) -> None:
        """For answers of this width; `no_notes` come with every token. `reads`: what is looked up is counted."""
        rows, every = query.shape[:2]
        self.shape, self.read_shape = (rows, every, 1, width), (1, rows * heads, 1) if reads else None
        self.lse, self.no_notes = native.room(rows, every, 1), no_notes
        self.no_lse = torch.full_like(self.lse, torch.nan)  # given out if no `lse` is wanted
        self.fill(query)

    def fill(self, query: Float[Tensor, "b hg 1 d"]) -> None:
        """Make room for AT_ONCE answers again."""
        # A model may keep an answer (and all eight with it), and write to it. With gradients enabled, torch may refuse
        # to write to a part of a tensor.
        if torch.is_grad_enabled():
            self.outs = [query.new_empty(self.shape) for _ in range(AT_ONCE)]
        else:
            self.outs = [*query.new_empty(AT_ONCE, *self.shape).unbind()]
        if self.read_shape is not None:
            self.read = [*native.room(AT_ONCE, *self.read_shape, dtype=torch.int64).unbind()]


class Again:
    """What is known from the latest token's step, so that tokens that come like it need one call each."""

    @classmethod
    def of(
        cls,
        layer: LayerState,
        asked: Query,
        new: NewTokens,
        found: Answer | None,
        asking_now: Sequence[tuple[Asking, slice]],
        before: "Again | None" = None,
    ) -> "Again | None":
        """The short road for the next token; None if that must take the long one.

        `found`: what the query had to read, window included. None if a block has left since: then it is looked for
        again; if the method looks tokens up, the next token takes the long road instead. `asking_now`: the askings that
        note which tokens of the window get attention. `before`: the `Again` that the latest token took, if it did.
        """
        stream = layer.streams.only if asked.queries.is_cpu else None
        if stream is None or not _is_plain(layer, stream) or _is_to_note(stream):
            return None
        notes = _notes_of(layer, stream, asked, asking_now)
        if notes is None or (found is None and stream.looks_up):
            return None
        found = layer.streams.look(asked) if found is None else found
        parts = [part for source in found.unread for part in source]
        chosen = [part.choice for part in parts if part.choice is not None]
        into = _room_in(layer, stream.window)
        if (
            found.attended is not None
            or found.estimated is not None
            or len(into) < len(_written_to(layer, stream.window))
            or native.library_for(asked.queries, new.keys, new.values, *(one.behind(0) for one in into[:2])) is None
            or any(part.segments is not None for part in parts)
            or not can_attend(asked.queries, parts, layer.heads)
            or len(found.unread[-1]) != 1
            or parts[-1].lanes is not None
            or any(x.stride(3) != 1 for x in (new.keys, new.values))
            or not all(one.behind(0).is_contiguous() for one in into)
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
        return cls(layer, stream, into, asked, new, parts, router, asking, notes, before)

    def __init__(
        self,
        layer: LayerState,
        stream: Stream,
        into: list[Growing],
        asked: Query,
        new: NewTokens,
        parts: list[Entries],
        router: Classifier | None,
        asking: Question | None,
        notes: list[Note],
        before: "Again | None",
    ) -> None:
        self.stream, self.window, self.library = stream, stream.window, native.library()
        self.mode = _mode()
        self.how, self.looks = (asked.scale, asked.softcap), _looks_of(asked.queries, new)
        self.held, self.looks_up = _held_by(stream), asking is not None
        self.store: Any = stream.past.bundles[0].holding if self.looks_up and stream.past is not None else None
        every = _entries_of(stream)  # when a block has left, C can be told where these are then
        there = len(every) == len(parts) - 1 and all(
            own is part.tokens for own, part in zip(every, parts, strict=False)
        )
        self.entries = every if there and all(of_window for _, _, of_window in notes) else []
        self.may_grow = there and not notes  # C is told only once where notes lie, which is beside the window
        beside = [] if router is None else [*router.tensors]
        beside += [x for to, _, _ in notes for x in (to.got, to.keys, to.log_mass) if x is not None]
        for part in parts[:-1]:
            tables = () if part.choice is None else part.choice.tables
            beside += [x for x in (part.lanes, *tables) if x is not None]
        self._put_into(into)
        self.beside = _placed(beside)
        self.at = self.beside + _read_of([part.tokens for part in parts[:-1]])
        self.rank = layer.seen  # of the next token
        lender = before if before is not None and before.can_lend(self) else None
        self.served: bool = lender is not None and lender.served
        self.room: Room = self._new_room(layer, asked.queries, new) if lender is None else lender.room
        self.notes = bool(notes)
        coming = [new.keys, new.values, None] + ([] if self.room.no_notes is None else [self.room.no_notes])
        puts = [(one.behind(0), own) for one, own in zip(into, coming, strict=True)]
        self.step = Step(asked.queries, parts, layer.heads, self.how, puts, asking, notes)

    def _new_room(self, layer: LayerState, query: Tensor, new: NewTokens) -> Room:
        return Room(query, new.values.shape[3], layer.heads, self.stream.no_notes(new.keys), reads=self.looks_up)

    def goes_on(self, layer: LayerState) -> bool:
        """Whether the next token may take this road although a block has left: the entries changed, the lanes did not.

        If so, C is told where the entries are now, and how many there are.
        """
        stream, known = self.stream, self.entries
        if not known or layer.streams.only is not stream or _is_to_note(stream):
            return False
        now = _entries_of(stream)
        if len(now) != len(known):
            return False
        for own, was in zip(now, known, strict=True):
            for x, y in ((own.keys, was.keys), (own.values, was.values)):
                if x.shape[:2] != y.shape[:2] or x.dtype != y.dtype or x.stride(3) != 1:
                    return False
            if not all(can_read_weights(x, own.keys) for x in own.weights):
                return False
        self.step.read_others([*now, stream.window.tokens()])
        for lanes in stream.lanes:
            lanes.forget_parts()
        self.held, self.entries = _held_by(stream), now
        self.at = self.beside + _read_of(now)
        return True

    def _grow(self) -> None:
        """Make room for more tokens in the buffers that they are put into, and tell C where these are."""
        for grown, _, _ in self.buffers:
            grown.make_room(grown.length + 1, grown.view)
        self._put_into([grown for grown, _, _ in self.buffers])
        self.step.put_into([buffer for _, buffer, _ in self.buffers])
        self.step.read_others([*self.entries, self.window.tokens()])

    def _put_into(self, into: Sequence[Growing]) -> None:
        """Note the buffers that tokens are put into, and their addresses."""
        self.buffers = [(grown, grown.behind(0), grown.behind(0).data_ptr()) for grown in into]
        self.places = min(buffer.shape[grown.dim] for grown, buffer, _ in self.buffers)

    def can_lend(self, to: "Again") -> bool:
        """Whether another `Again` may take over the memory made here for tokens to come; this one then serves none."""
        return (self.looks, self.mode) == (to.looks, to.mode)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy is None: what C is told is about the tensors of one layer, and of no other."""
        return type(None), ()

    def take(
        self,
        layer: LayerState,
        query: Tensor,
        new: NewTokens,
        how: tuple[float, float | None],
        begin: Callable[[], None],
        *,
        lse: bool,
        sinks: Tensor | None,
    ) -> Partial | None:
        """Hold a token and answer its query; None, with nothing held, if it does not come like the one before it.

        Attention is noted without learned `sinks` here: if notes must include them, the token takes the long road.
        """
        place = self.window.ranks.length
        if how != self.how or (sinks is not None and self.notes) or not self._is_still(layer, place, query, new):
            return None
        begin()
        if place >= self.places:
            self._grow()
        room = self.room
        if not room.outs:
            room.fill(query)
        out, read = room.outs.pop(), room.read.pop() if self.looks_up else None
        unrotated = new.unrotated.queries if self.looks_up and new.unrotated is not None else None
        into = (out.data_ptr(), room.lse.data_ptr(), 0 if read is None else read.data_ptr())
        notes = 0 if room.no_notes is None else room.no_notes.data_ptr()
        if not self.step.run(
            place, self.rank, (new.keys.data_ptr(), new.values.data_ptr(), notes), query, unrotated, into
        ):
            return None
        layer.came_one()
        for grown, _, _ in self.buffers:
            grown.length = place + 1
        if self.stream.takes_notes:
            ranks = torch.full((len(query), 1), self.rank, device="cpu")
            self.stream.waiting.append(Seen.of(new, ranks, ahead=layer.config.looks_ahead))
        if read is not None:
            self.store.count_read(read)
        self.rank, self.served = self.rank + 1, True
        return Partial(out, room.lse.clone() if lse else room.no_lse)

    def _is_still(self, layer: LayerState, place: int, query: Tensor, new: NewTokens) -> bool:
        """Whether all is as it was, no notes of tokens that came are due, and there is room."""
        stream = self.stream
        if layer.streams.only is not stream or stream.window is not self.window or layer.seen != self.rank:
            return False
        if (place >= self.places and not self.may_grow) or _is_elsewhere(layer, self.window) or _is_to_note(stream):
            return False
        for grown, buffer, at in self.buffers:
            if grown.buffer is not buffer or grown.length != place or buffer.data_ptr() != at:
                return False
        held = _held_by(stream)
        if len(held) != len(self.held):
            return False
        for was, now in zip(self.held, held, strict=True):
            if was is not now:
                return False
        for x, at in self.at:
            if x.data_ptr() != at:
                return False
        if _looks_of(query, new) != self.looks or _mode() != self.mode:
            return False
        if torch.is_grad_enabled() and (query.requires_grad or new.keys.requires_grad or new.values.requires_grad):
            return False
        return native.library() is self.library


def _is_plain(layer: LayerState, stream: Stream) -> bool:
    """Whether a step only holds a token, reads, and notes which tokens get attention."""
    if not stream.heads.all_here or _is_elsewhere(layer, stream.window):
        return False
    if stream.method is not None and stream.method.notes_at_once:
        return False
    past = stream.past
    if past is None or not stream.observes:
        return True
    told = past.method.observes
    return len(past.bundles) == 1 and (told == {"mass"} or (told == {"read"} and past.method.has_router))


def _notes_of(
    layer: LayerState, stream: Stream, asked: Query, asking_now: Sequence[tuple[Asking, slice]]
) -> list[Note] | None:
    """Where it is noted which tokens a token attends to; None if noting needs the long road."""
    past = stream.past
    bundles = past.bundles if past is not None and stream.observes and "mass" in past.method.observes else []
    if not asking_now and not bundles:
        return []
    if asked.sinks is not None or not asked.queries.is_contiguous():
        return None
    window, queries = stream.window, asked.queries.shape[1] // layer.heads
    found = [(where_noted(own, window.keys.view, weights(window.to_note(place))), True) for own, place in asking_now]
    for bundle in bundles:
        noting = bundle.holding.noting()
        if noting is None:
            return None
        found += [(to, False) for to in noting]
    notes = list[Note]()
    for to, of_window in found:
        how = to.weighing(queries, asked.scale, asked.softcap) if to.keys.dtype == asked.queries.dtype else None
        if how is None:
            return None
        notes.append((to, how, of_window))
    return notes


def _written_to(layer: LayerState, window: Window) -> list[Growing | None]:
    """The buffers that a token is put into: keys, values, ranks, and notes if tokens come with any."""
    return [window.keys, window.values, window.ranks, *([window.notes] if layer.config.askings else ())]


def _room_in(layer: LayerState, window: Window) -> list[Growing]:
    """Those of the buffers that a token is put into which have room for it."""
    grown = [one for one in _written_to(layer, window) if one is not None and one.buffer is not None]
    return [one for one in grown if one.length < one.behind(0).shape[one.dim]]


def _is_to_note(stream: Stream) -> bool:
    """Whether the notes of tokens that came are due with the next token."""
    return stream.takes_notes and len(stream.waiting) + 1 >= BLOCK


def _is_elsewhere(layer: LayerState, window: Window) -> bool:
    """Whether tokens are put elsewhere: only the device counts them, or rows have unequal lengths."""
    return layer.next_rank is not None or layer.ragged or window.ragged or window.place is not None


def _held_by(stream: Stream) -> list[Any]:
    """What a step reads beside the window: objects that are replaced by others whenever anything is written there."""
    bundles = [bundle for lanes in stream.lanes for bundle in lanes.bundles]
    return [x for bundle in bundles for x in (bundle.holding, bundle.holding.read_from)]


def _entries_of(stream: Stream) -> list[WeightedTokens]:
    """The entries held beside the window, bundle by bundle; none, if not all that is held there is weighted entries."""
    every = [bundle.holding.weighted for lanes in stream.lanes for bundle in lanes.bundles if bundle.count]
    found = [own for own in every if own is not None]
    return found if len(found) == len(every) else []


def _read_of(entries: Sequence[WeightedTokens]) -> list[tuple[Tensor, int]]:
    return _placed([x for own in entries for x in (own.keys, own.values, *own.weights)])


def _placed(tensors: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """Tensors, and where they lie: torch may move one, for example to share it with another process."""
    return [(x, x.data_ptr()) for x in tensors]


def _mode() -> tuple[bool, bool]:
    """Torch's modes, which decide what may be done later with an answer that is made now."""
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled()


def _looks_of(query: Tensor, new: NewTokens) -> list[Any]:
    """What C relies on in a token: types, shapes and strides of its tensors, and whether a view turns the signs."""
    tensors = [query, new.keys, new.values]
    if new.unrotated is not None:
        tensors.append(new.unrotated.queries)
    return [(type(x), x.is_cpu, x.is_neg(), x.dtype, x.shape, x.stride()) for x in tensors]
