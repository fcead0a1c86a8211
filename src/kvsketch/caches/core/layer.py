"""What one attention layer holds of its tokens, and how a query reads it.

`read` is the entry point. Prompts and chunks of them go through `_call`, a single token through `_step`; `again.py`
does the work of `_step` in one call of C for a token that comes like the one before it. A layer has one stream
(`stream.py`), or a few if its KV heads have windows of different lengths.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.attention import Partial, join_queries, merge
from kvsketch.caches.core.again import Again
from kvsketch.caches.core.allocation import SharesOf, budget_of, budgets_of
from kvsketch.caches.core.asking import WINDOW, Asking, Notes
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.buffers import marks_of, written
from kvsketch.caches.core.config import BLOCK, MethodConfig
from kvsketch.caches.core.layer_state import LayerState
from kvsketch.caches.core.part import HeadPart
from kvsketch.caches.core.probe import PROBES, exact_probe, relative_error
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.shares import equal
from kvsketch.caches.core.spans import Spans
from kvsketch.caches.core.stream import Stream
from kvsketch.caches.core.tokens import Columns, NewTokens, Seen, chunks, without_history
from kvsketch.kernels.merging import merge_into
from kvsketch.kernels.weighted_attention import causal_attention


class LayerCache(LayerState):
    """What one attention layer holds of its tokens, for all rows and KV heads."""

    def __init__(
        self,
        config: MethodConfig,
        layer: int,
        layer_bytes: Callable[[int, int], int] | None = None,
        shares: SharesOf | None = None,
        spans_of: Callable[[int], list[Spans]] | None = None,
        part_of: Callable[[int, int], HeadPart] | None = None,
    ) -> None:
        """`layer_bytes(rows, bytes per token)` is the layer's share of a budget in bytes; `shares` divides it by head.

        Without `shares` all heads have the same share. `spans_of(rows)` are the protected spans. `part_of(layer,
        heads)` says which of the layer's heads are in this process.
        """
        super().__init__(config.for_layer(layer), layer)
        self.layer_bytes, self.shares, self.spans_of, self.part_of = layer_bytes, shares, spans_of, part_of
        self.recording = False  # hold back all writing to the past until the next `crop`
        self.notes_calls = True  # note what attention tokens get from calls; off while texts are read after a prompt
        self.settles_later = False  # whether compiled code leaves `settle` to the end of the call

    def reset(self) -> None:
        super().reset()
        self.again: Again | None = None  # the short road for the next token, if that may take it
        self.not_yet = 0  # steps to wait before the short road is prepared again

    def map_rows(self, rows: list[int]) -> None:
        self._take_long_road()
        super().map_rows(rows)

    def _take_long_road(self) -> None:
        """Forget the short road; if it served no token, wait a while: to prepare it at every step would not pay."""
        if self.again is not None:
            self.not_yet = 0 if self.again.served else BLOCK
            self.again = None

    # -- reading

    def read(
        self,
        query: Float[Tensor, "b hg q d"],
        new: NewTokens,
        scale: float,
        softcap: float | None = None,
        *,
        lse: bool = True,
        sinks: Float[Tensor, " hg"] | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> Partial:
        """Attention of the new tokens' queries over all that is held and the new tokens, which are then held too.

        A single token joins the window first: then all that it sees is held, which saves a call. This is not done if
        the column is padding in other rows, or if its key needs a gradient: tensors that are held have none. Several
        tokens see everything if `prefill` is "exact", even with a method that looks tokens up. `lse=False`: the answer
        is not merged with anything else. Learned `sinks` are not part of the answer, but they are part of what methods
        note about attention. `begin` is called before anything changes, and may refuse; if one call of it does not
        refuse, others will not.
        """
        if torch.compiler.is_compiling():
            self.again = None  # it would keep tensors alive that have moved by now
        else:
            if self.again is not None and new.valid is None and not self.recording and self.notes_calls:
                whole = self.again.take(self, query, new, (scale, softcap), begin, lse=lse, sinks=sinks)
                if whole is not None:
                    if self.streams.all[0].is_due:
                        self._settle_after(Query(query, scale, softcap, sinks=sinks), new, None)
                    return whole
            self._take_long_road()
        if not self.started:
            self._start(new)
        count, streaming = new.keys.shape[2], self.config.prefill == "streaming"
        unrotated = None if new.unrotated is None else without_history(new.unrotated.queries)
        asked = Query(
            query, scale, softcap, unrotated, self._ranks(new), in_full=count > 1 and not streaming, apart=count > 1,
            sinks=sinks, padded=new.valid is not None,
        )  # fmt: skip
        lse = lse or bool(self.config.askings)
        if count == 1 and new.valid is None and not _learns(query, new.keys, new.values):
            return self._step(asked, new, lse=lse, begin=begin)
        if not streaming or count <= self.config.chunk:
            return self._call(asked, new, lse=lse, begin=begin)
        parts = [
            self._call(asked.part(start, stop), new.part(start, stop), lse=lse, begin=begin)
            for start, stop in chunks(count, self.config.chunk)
        ]
        return join_queries(parts)

    def _step(self, asked: Query, new: NewTokens, *, lse: bool, begin: Callable[[], None]) -> Partial:
        """Hold a single token and answer its query."""
        begin()
        self._count(new)
        for stream, columns, seen in self._arriving(new, asked.ranks_in_row):
            stream.append_one(columns, seen)
        found = self.streams.look(asked)
        answer = self.streams.answer(asked, found, lse=lse)
        whole = _whole(answer)
        assert whole is not None, "the new token itself is held"
        self._observe(asked, answer, whole)
        for asking, place in self._asking_now():
            self.streams.all[0].note_step(asked, asked.over_all(whole.lse), asking, place)
        if self.next_rank is None:
            self._settle_after(asked, new, found)
        else:
            self.next_rank.add_(1)
        return whole

    def _settle_after(self, asked: Query, new: NewTokens, found: Answer | None) -> None:
        """Write to the past what is due after a single token, and prepare the short road for the next one if it pays.

        In a compiled call the writing waits for the end of the call, if it has one: see `SketchCache.end_call`.

        `found`: what the token's query still had to read; None: the token took the short road.
        """
        if torch.compiler.is_compiling():
            if not self.settles_later or all(stream.past is None for stream in self.streams.all):  # `settle` is traced
                self.settle()
            return
        left = self.left
        self.settle()
        same, before = self.left == left, self.again
        if not same and not (before is not None and before.goes_on(self)):
            self._take_long_road()
        if self.again is not None:
            return
        if self.not_yet:
            self.not_yet -= 1
        elif not self.recording and self.notes_calls:
            self.again = Again.of(self, asked, new, found if same else None, tuple(self._asking_now()), before)

    def _call(self, asked: Query, new: NewTokens, *, lse: bool, begin: Callable[[], None]) -> Partial:
        """Answer a call's queries from what is held and from the call's own tokens, then hold these tokens."""
        answer, ranks = self.look(asked), asked.ranks_in_row
        lse = lse or answer.attended is not None
        among = causal_attention(
            asked.queries, new.keys, new.values, asked.scale, valid=new.valid, softcap=asked.softcap, lse=lse
        )
        whole = merge_into(among, *(part for part in (answer.attended, answer.estimated) if part is not None))
        begin()
        self._observe(asked, answer, whole)
        self._remember(asked, new)
        first_and_whole = self.seen == 0 and self.config.prefill == "exact" and not self.recording
        self.hold(new, ranks, self._note(asked, whole, new, ranks))
        if first_and_whole and not self.keeps_all:
            if new.valid is None and not any(self.left):
                self._note_no_error(asked)
            elif (before := exact_probe(asked, new)) is not None:
                self._measure(before, asked)
        return whole

    def attend(
        self,
        query: Float[Tensor, "b hg q d"],
        scale: float,
        softcap: float | None = None,
        *,
        unrotated: Tensor | None = None,
    ) -> Partial | None:
        """Attention over all that is held, or looked up, all of it visible; None if there is nothing.

        The queries are those of the latest tokens of every row.
        """
        before = torch.arange(-query.shape[2], 0, device=query.device)
        ranks = self.lengths_on(query.device) + before
        return _whole(self.look(Query(query, scale, softcap, unrotated, ranks)))

    def look(self, asked: Query, *, lse: bool = True) -> Answer:
        """The answer from what is held, or from the part of it that is looked up; nothing changes.

        If the queries need a gradient, a copy answers: by the backward pass, what is held will have changed.
        """
        streams = copy.deepcopy(self.streams) if _learns(asked.queries) else self.streams
        return streams.answer(asked, lse=lse)

    def _observe(self, asked: Query, answer: Answer, whole: Partial) -> None:
        """Commit what is to be noted about an answer, now that it is complete."""
        only = self.streams.only
        if only is None or not only.observes:
            return
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            only.observe(asked, answer, Partial(whole.out, asked.over_all(whole.lse)))

    @torch.no_grad()
    def _note(self, asked: Query, whole: Partial, new: NewTokens, ranks: Int64[Tensor, "b q"]) -> Notes | None:
        """Notes about a call's tokens, if the method wants them; notes of the window's tokens are updated as well."""
        if not self.config.askings:
            return None
        columns = Columns(without_history(new.keys), without_history(new.values), ranks)
        again, notes = self.recording or self.keeps_all, self.config.askings.none(columns.keys)
        for asking, place in self._asking_now():
            anew = asking.queries == WINDOW and again and new.keys.shape[2] > 1
            own = self.streams.all[0].note_call(asked, asked.over_all(whole.lse), columns, asking, place, anew=anew)
            notes[..., place] = own
        return notes

    def _remember(self, asked: Query, new: NewTokens) -> None:
        """Keep the last queries of a prompt that is held back: `settle` measures what forgetting does to their answers.

        Queries of texts that are read after the prompt are left out. Copies are kept: a view would keep all queries of
        the call alive.
        """
        if self.recording and self.notes_calls and self.config.holds_back and not self.keeps_all:
            there = new.valid is None or bool(new.valid[:, -PROBES:].all())
            self.last_asked = (
                replace(asked.part(-PROBES, asked.queries.shape[2]).copied(), in_full=False) if there else None
            )

    def _asking_now(self) -> Iterator[tuple[Asking, slice]]:
        """The askings that go by queries as they come; in a prompt, without those that wait for texts read after it."""
        waiting = self.recording or self.keeps_all
        every = self.config.askings if self.notes_calls else ()
        return ((asking, place) for asking, place in every if not (waiting and asking.behind))

    @property
    def _looks_up(self) -> bool:
        """Whether a query may read only a part of what is held."""
        return any(stream.looks_up for stream in self.streams.all)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing ever leaves the window."""
        return self.config.window_size(self.streams.budgets[0], 0) is None

    # -- writing

    def hold(self, new: NewTokens, ranks: Int64[Tensor, "b q"] | None = None, notes: Notes | None = None) -> None:
        """Put new tokens where they belong, without answering queries."""
        self._take_long_road()
        if not self.started:
            self._start(new)
        ranks = self._ranks(new) if ranks is None else ranks
        before = self.lengths
        self._count(new)
        came = [length - less for length, less in zip(self.lengths, before, strict=True)]
        for stream, columns, seen in self._arriving(new, ranks):
            stream.window.ragged = self.ragged
            own = columns if notes is None else replace(columns, notes=notes)
            stream.hold(own, seen, self.lengths, came, leave=not self.recording)

    def _arriving(self, new: NewTokens, ranks: Int64[Tensor, "b q"]) -> list[tuple[Stream, Columns, Seen]]:
        """New tokens for every stream, without their autograd history."""
        columns = Columns(without_history(new.keys), without_history(new.values), ranks)
        seen = Seen.of(new, ranks, ahead=self.config.looks_ahead)
        return self.streams.divided(columns, seen)

    def leaves(self) -> bool:
        """Whether anything is due to leave a window, so that `settle` must be called."""
        found = [stream.leaves(self.lengths) for stream in self.streams.all]
        return True in found and not self.recording

    def settle(self) -> None:
        """Write to the past what is due to leave the window."""
        if self.recording:
            return
        asked, self.last_asked = self.last_asked, None
        before = None if asked is None else _whole(self.look(asked))
        for stream in self.streams.all:
            stream.settle(self.lengths)
        if asked is not None and before is not None:
            self._measure(before, asked)

    # -- single tokens that only the device counts, so that a step can be recorded: `huggingface/graphs.py`

    def room(self) -> int:
        """The number of single tokens after which something leaves a window."""
        self.settle()
        return min(stream.may_come for stream in self.streams.all)

    def open(self, count: int, *, anew: bool = True) -> None:
        """Let `count` tokens come one by one, no more than there is `room` for, without changing any number in Python.

        Tensors that were read before stay where they are if they have room, unless all are to be laid out `anew`.
        """
        self._take_long_road()
        assert self.opened is None, "what was opened is closed first"
        self.opened = self.seen
        for stream in self.streams.all:
            stream.open(count, anew=anew)
        lengths = self.lengths_on(self.window.ranks.view.device).clone()
        self.next_rank = self.next_rank_kept = written(self.next_rank_kept, lengths)

    def marks(self) -> object:
        """Where the tensors that a step reads lie, once this is open; while that is the same, recorded steps go on."""
        return marks_of(self.next_rank), [stream.marks() for stream in self.streams.all]

    def read_beside(self) -> list[object]:
        """What else a step reads: whoever records the step must keep it alive."""
        return [stream.read_beside() for stream in self.streams.all]

    def without_room(self) -> None:
        """Give back the room that only recorded steps need."""
        self.next_rank_kept = None
        for stream in self.streams.all:
            stream.without_room()

    def close(self) -> None:
        """Hold the tokens that were counted, and no room for more; also works if `open` or this was interrupted."""
        if self.opened is None:
            return
        for stream in self.streams.all:
            stream.close(self.seen - self.opened, ragged=self.ragged)
        self.opened = self.next_rank = None

    def budget_of_layer(self, other: "LayerCache") -> Budget:
        """What a head may hold on average, in a layer whose tensors are like those of `other`."""
        held = other.window.columns
        rows, heads, _, width = held.keys.shape
        every = heads * other.part.parts
        return self.budget_for(rows, every * (width + held.values.shape[-1]) * held.keys.element_size())

    def _start(self, new: NewTokens) -> None:
        rows, heads, _, width = new.keys.shape
        self.part = HeadPart() if self.part_of is None else self.part_of(self.layer, heads)
        every = heads * self.part.parts
        budget = self.budget_for(rows, every * (width + new.values.shape[-1]) * new.keys.element_size())
        shares = equal(every) if self.shares is None else self.shares(self.layer, every, budget)
        spans = None if self.spans_of is None else self.spans_of(rows)
        self.begin(rows, budgets_of(budget, shares, self.part.first, heads), spans)
        if self.row_shares is not None:  # set before any token came
            self.share(self.row_shares)
        self.kind = (heads, width, new.keys.dtype)

    def forget_start(self) -> None:
        """Be as before the first tokens, if these were refused."""
        if not self.seen:
            shares = self.row_shares
            self.reset()
            self.row_shares = shares

    def budget_for(self, rows: int, token_bytes: int) -> Budget:
        """What each head may hold, for so many rows and bytes of keys and values per token; refuses too little.

        It is what the row with the most protected tokens may hold.
        """
        entry_bytes = rows * (token_bytes + 12)  # its rank and its weight too
        share = None if self.layer_bytes is None else self.layer_bytes(rows, entry_bytes)
        spans = [] if self.spans_of is None else self.spans_of(rows)
        beside = max((own.beside(self.config.sinks) for own in spans), default=0)
        return budget_of(self.config, share, entry_bytes, rows, beside)

    def _count(self, new: NewTokens) -> None:
        """Count new tokens."""
        if self.next_rank is not None:
            return
        rows, _, count, _ = new.keys.shape
        if new.valid is None:
            self.add([count] * rows, count)
        else:
            added = new.valid.sum(1, keepdim=True)
            self.add(added[:, 0].tolist(), added)
            self.ragged = True  # rows of unequal lengths leave the window at different times
        self.seen += count

    def _ranks(self, new: NewTokens) -> Int64[Tensor, "b q"]:
        """How many tokens of its row come before each new one; -1 for padding."""
        if self.next_rank is not None:
            return self.next_rank
        (rows, _, count, _), device = new.keys.shape, new.keys.device
        if new.valid is None and not self.ragged:
            if count == 1:
                return torch.full((rows, 1), self.seen, device=device)
            return torch.arange(self.seen, self.seen + count, device=device).expand(rows, -1)
        first = self.lengths_on(device)
        if new.valid is None:
            return (first + torch.arange(count, device=device)).expand(rows, -1)
        return (first + new.valid.cumsum(1) - 1).masked_fill(~new.valid, -1)

    def _measure(self, before: Partial, asked: Query) -> None:
        """Note how far the answers of a prompt's last queries are from exact ones, now that it is held."""
        asked = replace(asked.part(-PROBES, asked.queries.shape[2]), in_full=False)
        with torch.no_grad():
            answer = self.look(asked)
            whole = _whole(answer)
            assert whole is not None, "the call's tokens are held"
            self.error = relative_error(whole, before)
            if self._looks_up and answer.attended is not None:
                # Tokens that are looked up are a part of all that was seen.
                self.recall = torch.exp(answer.attended.lse - before.lse).mean(2)
                self._observe(asked, answer, whole)
        self.measured_at = self.seen

    def _note_no_error(self, asked: Query) -> None:
        """Note an error of zero: nothing has left, so all that a call's queries saw is read again."""
        self.error = asked.queries.new_zeros(asked.queries.shape[:2], dtype=torch.float32)
        if self._looks_up:
            self.recall = torch.ones_like(self.error)
        self.measured_at = self.seen

    # -- tail

    def check_crop(self, count: int, dropped: Sequence[int]) -> None:
        """Refuse to take back tokens that have left the window."""
        sinks = self.config.sinks
        left = self.left
        there = [length - (gone + sinks if gone else 0) for length, gone in zip(self.lengths, left, strict=True)]
        stuck = [most for less, most in zip(dropped, there, strict=True) if less > most]
        if stuck or count > self.seen:
            most = min(stuck or there, default=0)
            raise ValueError(f"cannot take back {count} tokens: only the last {most} of {self.seen} are uncompressed")

    def go_back(self, seen: int, lengths: Sequence[int]) -> None:
        """Be as after `seen` tokens, whatever an interruption left here; of later tokens none has left the window."""
        self._take_long_road()
        self.seen, self.lengths = seen, list(lengths)
        for stream in self.streams.all:
            stream.crop(self.lengths)

    def crop(self, count: int, dropped: Sequence[int] | None = None) -> None:
        """Take back the last `count` columns, of which `dropped` were tokens of each row (default: all)."""
        dropped = [count] * len(self.lengths) if dropped is None else dropped
        self.check_crop(count, dropped)
        if count:
            self.go_back(self.seen - count, [n - less for n, less in zip(self.lengths, dropped, strict=True)])


def _learns(*tensors: Tensor) -> bool:
    """Whether any of these needs a gradient."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling() and any(x.requires_grad for x in tensors)


def _whole(answer: Answer) -> Partial | None:
    """Attention over what was read, with the estimate of the rest if there is one."""
    if answer.attended is None or answer.estimated is None:
        return answer.attended
    return merge(answer.attended, answer.estimated)
