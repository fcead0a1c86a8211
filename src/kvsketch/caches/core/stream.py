"""Where a token goes: stream → window → past. A stream has all KV heads of a layer that have the same window.

    [ sinks | past | window ]
      exact  method  exact

Every token has a rank: how many tokens of its row came before it, padding not counted. The first `sinks` ranks stay.
The rest stay until `window` later tokens have come, then they are written to the past, a block at a time. All of this
is decided by ranks, row by row, so a row of a padded batch is treated as if it were alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.attention import Partial
from kvsketch.caches.core.answers import in_one_row
from kvsketch.caches.core.asking import Asking, Notes, attention_got, note_one, weights
from kvsketch.caches.core.budget import MOST, Budget
from kvsketch.caches.core.buffers import Window
from kvsketch.caches.core.config import BLOCK, MANY, MethodConfig
from kvsketch.caches.core.lanes import Lanes
from kvsketch.caches.core.method import Method
from kvsketch.caches.core.part import Heads
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.storage import listed_on, storage_bytes, with_prefix
from kvsketch.caches.core.tokens import Columns, Seen
from kvsketch.kernels.sources import Entries, Source

AT_ONCE = 512  # queries of a call whose weights are computed together: none of them sees tokens after these


class Stream:
    """Sinks, past and window."""

    def __init__(
        self, config: MethodConfig, method: Method | None, budgets: Sequence[Sequence[Budget]], heads: Heads
    ) -> None:
        """`budgets` are those of each row's KV heads; the window follows from the first head's."""
        self.config, self.method, self.budgets, self.heads = config, method, [own[0] for own in budgets], heads
        self.askings = config.askings
        self.window = Window(config.leaving)
        self.past = None if method is None else Lanes(method, budgets, heads)
        self.left = [0] * len(budgets)  # tokens of each row that left the window
        self.few = [False] * len(budgets)  # per row, whether the present call has a few tokens: neither one nor many
        self.may_come = 0  # at least so many tokens may come before one is due to leave
        self.numbered: dict[torch.device, Tensor] = {}  # the numbers of its lanes, among all lanes of the layer
        self.waiting: list[Seen] = []  # the last columns, if they came one by one and nothing was noted about them yet

    @property
    def looks_up(self) -> bool:
        """Whether a query may read only a part of what is held."""
        return self.method is not None and self.method.looks_up

    @property
    def takes_notes(self) -> bool:
        """Whether something is noted about tokens when they come."""
        return self.method is not None and self.method.takes_notes

    @property
    def is_due(self) -> bool:
        """Whether a block may be due to leave the window; no token is looked at for this."""
        return self.may_come < 1

    @property
    def observes(self) -> bool:
        """Whether the past wants to take note of queries."""
        return self.past is not None and bool(self.past.method.observes) and not self.past.empty

    def share(self, budgets: Sequence[Sequence[Budget]]) -> None:
        """Set these budgets, for each KV head of each row, before anything has left the window."""
        assert self.method is not None, "a method chooses"
        assert not any(self.left), "nothing has been chosen yet"
        self.past = Lanes(self.method, budgets, self.heads)

    # -- reading

    def of_window(self) -> Source:
        """The window's tokens: every query reads them."""
        if not self.window.length:
            return ()
        tokens = self.window.tokens()
        if self.heads.all_here:
            return (Entries(tokens),)
        device = tokens.keys.device
        if device not in self.numbered:
            rows, places = torch.arange(len(self.left), device=device), listed_on(device, self.heads.places)
            self.numbered[device] = (rows[:, None] * self.heads.here + places).flatten()
        return (Entries(in_one_row(tokens), self.numbered[device]),)

    def look(self, query: Query) -> Answer:
        """The answer from what left the window, or what of it is still to be read."""
        return Answer(None) if self.past is None else self.past.look(query)

    def observe(self, query: Query, answer: Answer, whole: Partial) -> None:
        """Let the past take note of queries that were answered, and of what they saw."""
        assert self.past is not None, "nothing else observes"
        if "mass" not in self.past.method.observes:
            self.past.observe(query, answer, None)
            return
        lse = whole.lse.detach()
        asking, several = self.config.asking, query.queries.shape[2] > 1
        if asking is not None and query.ranks is not None and (several or self.window.ragged):
            wanted = asking.wanted(query.ranks, one=not several)
            lse = lse.masked_fill(~wanted[:, None], torch.inf)  # the other queries' weights are zero then
        self.past.observe(query, answer, lse)

    @torch.no_grad()
    def note_step(self, asked: Query, lse: Float[Tensor, "b hg 1"], asking: Asking, place: slice) -> None:
        """Note how much attention the window's tokens got from a single new token, which is one of them."""
        keys = self.window.keys.view
        if not self.window.ragged and note_one(asking, asked, lse, keys, weights(self.window.to_note(place))):
            return
        ranks = self.window.ranks.view if self.window.ragged else None
        more = attention_got(asking, asked, lse, keys, ranks)
        self.window.renote(asking.with_more(self.window.noted[..., place], more), place)

    def note_call(
        self, asked: Query, lse: Float[Tensor, "b hg q"], new: Columns, asking: Asking, place: slice, *, anew: bool
    ) -> Notes:
        """Notes about a call's own tokens; what the window's tokens got from the call's queries is noted as well.

        `anew`: in rows that ask, whatever was noted before is forgotten.
        """
        ranks = asked.ranks_in_row
        wanted = asking.wanted(ranks, one=ranks.shape[1] == 1)
        asks = wanted.any(1)
        first = int(wanted.any(0).long().argmax())  # no query before this one is asked
        asked, lse, wanted = asked.part(first, wanted.shape[1]), lse[:, :, first:], wanted[:, first:]
        if self.window.length:
            held = self.window.columns
            more = attention_got(asking, asked, lse, held.keys, held.ranks, wanted)
            before = self.window.noted[..., place]
            before = before.masked_fill(asks[:, None, None, None], 0) if anew else before
            self.window.renote(asking.with_more(before, more, asks), place)
        notes = asking.none(new.keys)
        for start in range(0, wanted.shape[1], AT_ONCE):
            stop = min(start + AT_ONCE, wanted.shape[1])
            seen, now = first + stop, wanted[:, start:stop]
            keys, ranks, own = new.keys[:, :, :seen], new.ranks[:, :seen], notes[:, :, :seen]
            more = attention_got(asking, asked.part(start, stop), lse[:, :, start:stop], keys, ranks, now)
            own.copy_(asking.with_more(own, more, now.any(1)))
        return notes

    # -- writing

    def append_one(self, new: Columns, seen: Seen) -> None:
        """Add one token to the window. What is to be noted about it is noted later, together with the next tokens."""
        if self.window.place is not None:
            self.window.put(replace(new, notes=self._notes_of(new, seen)))
            return
        notes = self.no_notes(new.keys)
        self.window.append(new if notes is None else replace(new, notes=notes))
        self.may_come -= 1
        if self.method is not None and self.method.takes_notes:
            self.waiting.append(seen)
            if self.method.notes_at_once or len(self.waiting) >= BLOCK:
                self.take_notes()

    def _notes_of(self, new: Columns, seen: Seen) -> Notes | None:
        if self.method is not None and self.method.takes_notes:
            return self.method.note(seen)
        return self.no_notes(new.keys)

    def no_notes(self, keys: Float[Tensor, "b h n d"]) -> Notes | None:
        """Empty notes, for tokens about which nothing was noted yet; None if nothing will be."""
        return self.askings.none(keys) if self.askings else None

    def take_notes(self) -> None:
        """Make the notes that are missing for some columns, all at once: one by one costs more."""
        if self.waiting and self.method is not None:
            if self.window.not_noted:  # after an interruption they may still be waiting, though they were noted
                self.window.append_notes(self.method.note(Seen.joined(self.waiting)))
            self.waiting = []

    def hold(
        self, new: Columns, seen: Seen, lengths: Sequence[int], came: Sequence[int], *, leave: bool = True
    ) -> None:
        """Put new tokens where they belong; those that leave at once never enter the window.

        `lengths` are the rows' lengths with the new tokens, of which there are `came`; without `leave` all tokens stay.
        """
        self.few = [1 < count < MANY for count in came]
        self.take_notes()
        notes = self._notes_of(new, seen) if new.notes is None else None
        if notes is not None:
            new = replace(new, notes=notes)
        if not leave:
            self.window.append(new)
            self.may_come = 0
        elif self.window.ragged:
            self._hold_ragged(new, self.due(lengths))
        else:
            self._hold_even(new, lengths[0])

    def settle(self, lengths: Sequence[int]) -> None:
        """Write to the past what is due to leave the window."""
        if not self.is_due:
            return
        self.few, due = [False] * len(lengths), self.due(lengths)
        if due == self.left:
            return
        self.take_notes()
        if self.window.ragged:
            self.window.take_out(self._leave_ragged(self.window.columns, due))
            self.window.compact()
        else:
            self._leave_window(due[0] - self.left[0])

    def leaves(self, lengths: Sequence[int]) -> bool:
        """Whether anything is due to leave the window: then `settle` writes it to the past."""
        if not self.is_due or self.due(lengths) == self.left:
            return False
        self.may_come = 0  # until `settle` is called
        return True

    def due(self, lengths: Sequence[int]) -> list[int]:
        """How many tokens of each row should have left by now: a whole number of blocks."""
        due: list[int] = []  # `list[int]()` is more than the compiler can read
        self.may_come = MOST  # what is found is a lower bound: a window only grows
        for row, (length, left) in enumerate(zip(lengths, self.left, strict=True)):
            window = self.window_size(row, length)
            due.append(left if window is None else max(left, self.config.leave(length, window)))
            if window is not None:
                more = self.config.sinks + window + due[-1] + self.config.leaving - length
                self.may_come = more if more < self.may_come else self.may_come  # the compiler breaks at min()
        return due

    def window_size(self, row: int, length: int) -> int | None:
        """How many of the latest tokens stay exact in a row of this length; None: all of them."""
        return self.config.window_size(self.budgets[row], length)

    def _hold_even(self, new: Columns, length: int) -> None:
        """All rows stand at the same rank: what leaves is a slice."""
        sinks, seen = self.config.sinks, length - new.count
        leaving = self.due([length] * len(self.left))[0] - self.left[0]
        from_window = min(leaving, max(0, self.window.length - sinks))
        self._leave_window(from_window)
        if leaving == from_window:
            self.window.append(new)
            return
        start = max(0, sinks - seen)  # new tokens before this one are sinks
        stop = start + leaving - from_window
        self._write(new.part(start, stop), [self.left[0] + stop - start] * len(self.left))
        self.window.append(new.part(0, start), new.part(stop, new.count))

    def _leave_window(self, count: int) -> None:
        """Write the oldest tokens after the sinks to the past; all rows stand at the same rank."""
        if count == 0:
            return
        start, stop = self.config.sinks, self.config.sinks + count
        self._write(self.window.columns.part(start, stop), [self.left[0] + count] * len(self.left))
        self.window.remove(start, stop)

    def _hold_ragged(self, new: Columns, due: list[int]) -> None:
        """Rows stand at different ranks: a column may leave one row and stay in another."""
        if due != self.left:
            if self.window.length:
                self.window.take_out(self._leave_ragged(self.window.columns, due))
            left = self._leave_ragged(new, due)
            new = replace(new, ranks=new.ranks.masked_fill(left, -1))
            new = new.select((new.ranks >= 0).any(0).nonzero()[:, 0])
        self.window.append(new)
        self.window.compact()

    def _leave_ragged(self, columns: Columns, due: list[int]) -> Tensor:
        """Write to the past what is due among these columns; a mask [b, n] of what was written."""
        sinks, ranks = self.config.sinks, columns.ranks
        stop = listed_on(ranks.device, due)[:, None] + sinks
        leaving = (ranks >= sinks) & (ranks < stop)  # what left before has rank -1
        where = leaving.any(0).nonzero()[:, 0]
        if where.numel():
            first, last = int(where[0]), int(where[-1]) + 1
            part = columns.part(first, last)
            part = replace(part, ranks=part.ranks.masked_fill(~leaving[:, first:last], -1))
            self._write(part, [a + b for a, b in zip(self.left, leaving.sum(1).tolist(), strict=True)])
        return leaving

    def _write(self, tokens: Columns, left: list[int]) -> None:
        """Give tokens to the past, after which `left` of each row have left the window."""
        self.left = left
        if self.past is not None:
            self.past.write(tokens, self.of_past(left), self.few)

    def of_past(self, left: Sequence[int]) -> list[int]:
        """How many of the tokens that left the window the past gets, row by row."""
        return list(left)

    # -- while steps are recorded

    @property
    def lanes(self) -> list[Lanes]:
        """All that a query reads beside the window."""
        return [] if self.past is None else [self.past]

    def open(self, count: int, *, anew: bool) -> None:
        """Let `count` tokens come one by one, without changing any number in Python."""
        self.take_notes()
        self.window.open(count, self._most_columns())
        self.window.ragged = True
        for lanes in self.lanes:
            lanes.open(anew=anew)

    def close(self, came: int, *, ragged: bool) -> None:
        """Hold the tokens that came, and be as before `open`."""
        self.window.close(came)
        self.window.ragged = ragged
        for lanes in self.lanes:
            lanes.close()

    def marks(self) -> object:
        """Where the tensors that a step reads lie."""
        return self.window.marks(), [lanes.marks() for lanes in self.lanes]

    def read_beside(self) -> list[object]:
        """What else a step reads, see `Lanes.read_beside`."""
        return [lanes.read_beside() for lanes in self.lanes]

    def without_room(self) -> None:
        """Give back the room that only recorded steps need."""
        self.window.without_room()
        for lanes in self.lanes:
            lanes.without_room()

    def _most_columns(self) -> int | None:
        """How many columns the window has at most, sinks included; None where it grows with the text."""
        most = 0
        for row in range(len(self.left)):
            now, later = (self.window_size(row, length) for length in (MOST // 2, MOST))
            if now is None or now != later:
                return None
            most = max(most, self.config.sinks + now + self.config.leaving)
        return most

    # -- rows, tail, state

    def crop(self, lengths: Sequence[int]) -> None:
        """Take back all tokens of each row but the first `lengths[row]`."""
        self.take_notes()
        self.window.crop(lengths)
        self.may_come = 0

    def map_rows(self, rows: list[int]) -> None:
        """Row i becomes what row `rows[i]` was."""
        self.take_notes()
        self.window.map_rows(torch.tensor(rows, device="cpu"))
        self.left, self.budgets = [self.left[row] for row in rows], [self.budgets[row] for row in rows]
        self.may_come, self.numbered = 0, {}
        if self.past is not None:
            self.past.map_rows(rows)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that `restore` needs, as tensors and as JSON."""
        self.take_notes()
        tensors, past = self.window.tensors(), self.past
        if past is not None:
            tensors |= {f"past.{name}": tensor for name, tensor in past.tensors().items()}
        return tensors, {"left": self.left, "past": [] if past is None else past.numbers()}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any], *, ragged: bool) -> None:
        """Restore what `state` gave."""
        self.window = Window(self.config.leaving)
        self.window.append(Columns(tensors["keys"], tensors["values"], tensors["ranks"], tensors.get("notes")))
        self.window.ragged = ragged
        self.left = numbers["left"]
        if self.method is not None and self.method.takes_notes:
            self.method.check_notes(tensors["notes"])
            if tensors["notes"].shape[:3] != tensors["keys"].shape[:3]:
                raise ValueError(f"notes of {tuple(tensors['notes'].shape[:3])} for {tuple(tensors['keys'].shape[:3])}")
        if self.askings:
            self.askings.check(tensors["notes"], tensors["keys"])
        if self.past is not None:
            self.past.restore(with_prefix(tensors, "past."), numbers["past"])
            if self.past.counts != self.of_past(self.left):
                raise ValueError(f"{self.left!s:.60} tokens were written, and the past has {self.past.counts!s:.60}")

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        waiting = [x for seen in self.waiting for x in (seen.keys, seen.unrotated, seen.ranks, seen.queries)]
        return self.window.nbytes + storage_bytes(waiting) + (0 if self.past is None else self.past.nbytes)

    def count_entries(self) -> Tensor:
        """Entries held per row and KV head."""
        entries = (self.window.ranks.view >= 0).sum(1)[:, None].expand(-1, self.window.keys.view.shape[1])
        return entries if self.past is None else entries + self.past.count_entries().to(entries.device)
