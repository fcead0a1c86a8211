"""Where a token goes: stream → window → past, and how a query reads all three.

A layer's stream of tokens is held as

    [ sinks | past | window ]
      exact  method  exact

Every token has a rank: how many tokens of its row came before it, padding not counted. The first
`sinks` ranks stay. The rest stay until `window` later tokens have come, then they are written to the
past, a block at a time. All of this is decided by ranks, row by row, so a row of a padded batch is
treated as if it were alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens, join_queries, log_mass_of, merge
from kvsketch.caches.base import BLOCK, LeavingTokens, MethodConfig, Past
from kvsketch.caches.budget import MOST, Budget, fixed_entries
from kvsketch.caches.question import Arriving, LookupPast, Question, Unrotated
from kvsketch.caches.storage import with_prefix
from kvsketch.caches.window import Columns, Window
from kvsketch.kernels.weighted_attention import causal_attention, weighted_attention

PROBES = 8  # queries of a prompt that are answered twice, to see how far the cache is from exact attention


@dataclass(frozen=True)
class NewTokens:
    """Tokens of one call: keys and values, and which of them are real (None: all)."""

    keys: Float[Tensor, "b h q d"]
    values: Float[Tensor, "b h q e"]
    valid: Bool[Tensor, "b q"] | None = None
    unrotated: Unrotated | None = None  # where the method asks for it

    def part(self, start: int, stop: int) -> "NewTokens":
        """Tokens start…stop-1."""
        valid = None if self.valid is None else self.valid[:, start:stop]
        unrotated = None if self.unrotated is None else self.unrotated.part(start, stop)
        return NewTokens(self.keys[:, :, start:stop], self.values[:, :, start:stop], valid, unrotated)


def chunks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Bounds of chunks of `size` tokens, the first one shorter if need be.

    Counted from the end, where the rows of a left-padded batch agree: each is cut as if it were alone.
    """
    first = count % size or size
    yield 0, min(first, count)
    for start in range(first, count, size):
        yield start, start + size


class LayerCache:
    """What one attention layer holds of its stream, for all rows and KV heads."""

    def __init__(self, config: MethodConfig, layer: int, layer_bytes: Callable[[int, int], int] | None = None) -> None:
        """`layer_bytes(rows, bytes per token)` is the layer's share of a budget in bytes."""
        self.config, self.layer, self.layer_bytes = config.for_layer(layer), layer, layer_bytes
        self.recording = False  # hold back all writing to the past until the next `crop`
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.seen = 0  # tokens per row, padding included: the logical length
        self.lengths: list[int] = []  # real tokens per row
        self.left: list[int] = []  # tokens per row that went to the past
        self.window = Window()  # and the sinks
        self.budget: Budget | None = None
        self.past: Past | None = None
        self.error: Float[Tensor, "b hg"] | None = None  # relative error of the answers, per query head
        self.recall: Float[Tensor, "b hg"] | None = None  # share of the attention mass that was looked up
        self.measured_at = 0  # tokens seen when it was measured

    # -- reading

    def read(
        self,
        query: Float[Tensor, "b hg q d"],
        new: NewTokens,
        scale: float,
        softcap: float | None = None,
        *,
        lse: bool = True,
    ) -> Partial:
        """Attention of the new tokens' queries over all that is held and the new tokens; then they are held too.

        `lse=False`: the answer is not merged with anything else.
        """
        if not self.started:
            self._start(new)
        count = new.keys.shape[2]
        if self.config.prefill == "exact" or count <= self.config.chunk:
            return self._read_chunk(query, new, scale, softcap, lse)
        parts = [
            self._read_chunk(query[:, :, start:stop], new.part(start, stop), scale, softcap, lse)
            for start, stop in chunks(count, self.config.chunk)
        ]
        return join_queries(parts)

    def attend(
        self,
        query: Float[Tensor, "b hg q d"],
        scale: float,
        softcap: float | None = None,
        *,
        lse: bool = True,
        unrotated: Float[Tensor, "b hg q d"] | None = None,
    ) -> Partial | None:
        """Attention over all that is held, or looked up, all of it visible; None if nothing is.

        The queries are those of the latest tokens of every row.
        """
        ranks = None
        if isinstance(self.past, LookupPast):
            before = torch.arange(-query.shape[2], 0, device=query.device)
            ranks = torch.tensor(self.lengths, device=query.device)[:, None] + before
        read, rest = self._look(Question(query, unrotated, scale, softcap, ranks), lse)
        return read if read is None or rest is None else merge(read, rest)

    def _look(self, question: Question, lse: bool = True) -> tuple[Partial | None, Partial | None]:
        """Attention over the tokens that are read, the window among them; and an estimate of the others', if made."""
        past = self.past
        if not isinstance(past, LookupPast) or past.empty:
            return self._attend_all(question, lse), None
        found = past.look_up(question)
        return self._with_window(found.part, question, lse), found.rest

    @staticmethod
    def _question(query: Tensor, new: NewTokens, ranks: Tensor, scale: float, softcap: float | None) -> Question:
        """What the new tokens ask."""
        unrotated = None if new.unrotated is None else new.unrotated.queries.detach()
        return Question(query, unrotated, scale, softcap, ranks)

    def _attend_all(self, question: Question, lse: bool = True) -> Partial | None:
        """Attention over all that is held."""
        held = None if self.past is None else self.past.attend(question.queries, question.scale, question.softcap)
        return self._with_window(held, question, lse)

    def _with_window(self, past: Partial | None, question: Question, lse: bool) -> Partial | None:
        if not self.window.length:
            return past
        tokens, lse = self.window.tokens(), lse or past is not None
        window = weighted_attention(question.queries, tokens, question.scale, softcap=question.softcap, lse=lse)
        return window if past is None else merge(past, window)

    def _read_chunk(self, query: Tensor, new: NewTokens, scale: float, softcap: float | None, lse: bool) -> Partial:
        ranks = self._ranks(new)
        question = self._question(query, new, ranks, scale, softcap)
        if new.keys.shape[2] == 1 and new.valid is None:
            # The new token sees all that is held and itself: with it in the window, that is one call less.
            arrived = self._arrive(new, ranks)
            if isinstance(self.past, LookupPast):
                self.window.append_unlabelled(arrived, self._arriving(new, ranks), self.past)
            else:
                self.window.append(arrived)
            read, rest = self._look(question, lse)
            assert read is not None, "the new token itself is held"
            self.settle()
            return read if rest is None else merge(read, rest)
        # Where other rows are padding, a single token joins the window later; it looks up all the same.
        looks_up = new.keys.shape[2] == 1 or self.config.prefill == "streaming"
        held, rest = self._look(question) if looks_up else (self._attend_all(question), None)
        lse = lse or held is not None
        among = causal_attention(query, new.keys, new.values, scale, valid=new.valid, softcap=softcap, lse=lse)
        answer = merge(among, *(part for part in (held, rest) if part is not None))
        before = self._probe(query, new, scale, softcap)
        self.hold(new, ranks)
        self._measure(before, question.part(-PROBES, query.shape[2]))
        return answer

    # -- writing

    def _start(self, new: NewTokens) -> None:
        rows, heads, _, width = new.keys.shape
        self.budget = self.budget_for(rows, heads * (width + new.values.shape[-1]) * new.keys.element_size())
        self.past = self.config.new_past(self.budget, self.layer)
        self.lengths, self.left = [0] * rows, [0] * rows

    def budget_for(self, rows: int, token_bytes: int) -> Budget:
        """What so many rows may hold, whose keys and values take so many bytes a token; refuses less than is needed."""
        entry_bytes = rows * (token_bytes + 12)  # its rank and its weight too
        share = None if self.layer_bytes is None else self.layer_bytes(rows, entry_bytes)
        fixed = fixed_entries(self.config.budget_given, share, entry_bytes)
        least = self.config.least_entries()
        if fixed is not None and fixed < least:
            raise ValueError(
                f"keep={self.config.budget_given!r} leaves {fixed} entries per row and KV head in each layer, but "
                f"{self.config} needs at least {least} ({rows} rows, {least * entry_bytes:,} bytes a layer): "
                "give more bytes, or fewer sinks or a smaller window"
            )
        fraction = self.config.budget_given if isinstance(self.config.budget_given, float) else None
        return Budget(fraction, fixed, least)

    @property
    def started(self) -> bool:
        """Whether any token came."""
        return self.past is not None

    def hold(self, new: NewTokens, ranks: Int64[Tensor, "b q"] | None = None) -> None:
        """Put new tokens where they belong, without an answer; those that leave at once never enter the window."""
        if not self.started:
            self._start(new)
        seen = self.seen
        ranks = self._ranks(new) if ranks is None else ranks
        arrived = self._arrive(new, ranks)
        if isinstance(self.past, LookupPast):
            arrived = replace(arrived, labels=self.past.label(self._arriving(new, ranks)))
        if self.recording:
            self.window.append(arrived)
        elif self.window.ragged:
            self._hold_ragged(arrived)
        else:
            self._hold_even(arrived, seen)

    def settle(self) -> None:
        """Write to the past what is due to leave the window."""
        if self.recording or self._due() == self.left:
            return
        if self.window.ragged:
            self._leave_ragged_window()
            self.window.compact()
        else:
            self._leave_window(self._due()[0] - self.left[0])

    def _arrive(self, new: NewTokens, ranks: Tensor) -> Columns:
        """Count new tokens, and drop their autograd history: it would keep activations alive."""
        rows, _, count, _ = new.keys.shape
        if new.valid is None:
            added = [count] * rows
        else:
            added = new.valid.sum(1).tolist()
            self.window.ragged = True  # rows of unequal lengths leave the window at different times
        self.lengths = [length + more for length, more in zip(self.lengths, added, strict=True)]
        self.seen += count
        return Columns(new.keys.detach(), new.values.detach(), ranks)

    def _ranks(self, new: NewTokens) -> Tensor:
        """How many tokens of its row come before each new one; -1 for padding."""
        rows, _, count, _ = new.keys.shape
        even = new.valid is None and not self.window.ragged
        first = self.seen if even else torch.tensor(self.lengths, device=new.keys.device)[:, None]
        if new.valid is None:
            return (first + torch.arange(count, device=new.keys.device)).expand(rows, -1)
        return (first + new.valid.cumsum(1) - 1).masked_fill(~new.valid, -1)

    @staticmethod
    def _arriving(new: NewTokens, ranks: Tensor) -> Arriving:
        unrotated = None if new.unrotated is None else new.unrotated.keys.detach()
        return Arriving(new.keys.detach(), unrotated, ranks)

    def _hold_even(self, new: Columns, seen: int) -> None:
        """All rows stand at the same rank: what leaves is a slice."""
        leaving = self._due()[0] - self.left[0]
        from_window = min(leaving, max(0, self.window.length - self.config.sinks))
        self._leave_window(from_window)
        if leaving == from_window:
            self.window.append(new)
            return
        start = max(0, self.config.sinks - seen)  # new tokens before this one are sinks
        stop = start + leaving - from_window
        self._write(new.part(start, stop), [self.left[0] + stop - start] * len(self.left))
        self.window.append(new.part(0, start))
        self.window.append(new.part(stop, new.ranks.shape[1]))

    def _leave_window(self, count: int) -> None:
        """Write the oldest tokens after the sinks to the past; all rows stand at the same rank."""
        if count == 0:
            return
        start, stop = self.config.sinks, self.config.sinks + count
        self._write(self.window.columns.part(start, stop), [self.left[0] + count] * len(self.left))
        self.window.remove(start, stop)

    def _hold_ragged(self, new: Columns) -> None:
        """Rows stand at different ranks: a column may leave one row and stay in another."""
        if self._due() != self.left:
            if self.window.length:
                self._leave_ragged_window()
            new = replace(new, ranks=new.ranks.clone())
            self._leave_ragged(new)
            new = new.select((new.ranks >= 0).any(0).nonzero()[:, 0])
        self.window.append(new)
        self.window.compact()

    def _leave_ragged_window(self) -> None:
        self.window.ranks.make_writable()
        self._leave_ragged(self.window.columns)

    def _leave_ragged(self, columns: Columns) -> None:
        """Write to the past what is due among these columns; its ranks become -1."""
        sinks, ranks = self.config.sinks, columns.ranks
        stop = torch.tensor(self._due(), device=ranks.device)[:, None] + sinks
        leaving = (ranks >= sinks) & (ranks < stop)  # what left before has rank -1
        where = leaving.any(0).nonzero()[:, 0]
        if where.numel() == 0:
            return
        part = columns.part(int(where[0]), int(where[-1]) + 1)
        due = part.ranks.masked_fill(~leaving[:, int(where[0]) : int(where[-1]) + 1], -1)
        left = [before + more for before, more in zip(self.left, leaving.sum(1).tolist(), strict=True)]
        self._write(replace(part, ranks=due), left)
        ranks.masked_fill_(leaving, -1)

    def _due(self) -> list[int]:
        """How many tokens of each row should have left sinks and window by now: a whole number of blocks."""
        assert self.budget is not None
        due = []
        for length, left in zip(self.lengths, self.left, strict=True):
            window = self.config.window_size(self.budget, length)
            beyond = 0 if window is None else max(0, length - self.config.sinks - window)
            due.append(max(left, beyond // BLOCK * BLOCK))
        return due

    def _write(self, tokens: Columns, left: list[int]) -> None:
        """Give tokens to the past; afterwards `left` of each row went there."""
        assert self.past is not None
        self.left = left
        past_ranks = (tokens.ranks - self.config.sinks).clamp_min(-1)  # -1 stays -1: it is no rank
        self.past.write(LeavingTokens(tokens.keys, tokens.values, past_ranks, tuple(left), tokens.labels))

    # -- how far from exact

    @torch.no_grad()
    def _probe(self, query: Tensor, new: NewTokens, scale: float, softcap: float | None) -> Partial | None:
        """What the last queries of a first call would see if nothing were dropped; None where that is not known."""
        first_and_whole = self.seen == 0 and self.config.prefill == "exact" and not self.recording
        padded_end = new.valid is not None and not bool(new.valid[:, -PROBES:].all())
        if not first_and_whole or padded_end or self.config.window_size(self._budget, 0) is None:
            return None
        everything = WeightedTokens(new.keys, new.values, log_mass_of(new.valid))
        return weighted_attention(query[:, :, -PROBES:], everything, scale, softcap=softcap)

    @torch.no_grad()
    def _measure(self, before: Partial | None, question: Question) -> None:
        """Compare with what the same queries see now; tokens that are looked up are a part of all that was seen."""
        if before is None:
            return
        read, rest = self._look(question)
        assert read is not None, "the call's tokens are held"
        after = read if rest is None else merge(read, rest)
        exact = before.out.float()
        self.error = (after.out.float() - exact).norm(dim=(2, 3)) / exact.norm(dim=(2, 3)).clamp_min(1e-30)
        if isinstance(self.past, LookupPast):
            self.recall = torch.exp(read.lse - before.lse).mean(2)
        self.measured_at = self.seen

    @property
    def _budget(self) -> Budget:
        assert self.budget is not None, "no token came yet"
        return self.budget

    # -- rows, tail, state

    def check_crop(self, count: int, dropped: Sequence[int]) -> None:
        """Refuse to take back tokens that have left the window."""
        sinks = self.config.sinks
        there = [length - (left + sinks if left else 0) for length, left in zip(self.lengths, self.left, strict=True)]
        if count > self.seen or any(less > most for less, most in zip(dropped, there, strict=True)):
            most = min(there, default=0)
            raise ValueError(f"cannot take back {count} tokens: only the last {most} of {self.seen} are uncompressed")

    def crop(self, count: int, dropped: Sequence[int] | None = None) -> None:
        """Take back the last `count` columns; in each row so many of them were tokens, all where nothing is said."""
        dropped = [count] * len(self.lengths) if dropped is None else dropped
        self.check_crop(count, dropped)
        if count:
            self.lengths = [length - less for length, less in zip(self.lengths, dropped, strict=True)]
            self.seen -= count
            self.window.crop(self.lengths)

    def map_rows(self, move: Callable[[Tensor], Tensor], rows: list[int]) -> None:
        """Replace every tensor by `move` of it, which brings row `rows[i]` to row i."""
        if self.past is None:
            return
        self.window.map_rows(move)
        self.past.map_rows(move, rows)
        self.lengths = [self.lengths[row] for row in rows]
        self.left = [self.left[row] for row in rows]
        self.error = None if self.error is None else move(self.error)
        self.recall = None if self.recall is None else move(self.recall)

    def state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Everything that `restore` needs, as tensors and as JSON."""
        if self.past is None:
            return {}, {}
        tensors = self.window.tensors()
        tensors |= {f"past.{name}": tensor for name, tensor in self.past.tensors().items()}
        for name, measured in (("error", self.error), ("recall", self.recall)):
            if measured is not None:
                tensors[name] = measured
        numbers: dict[str, object] = {
            "seen": self.seen,
            "lengths": self.lengths,
            "left": self.left,
            "ragged": self.window.ragged,
            "measured_at": self.measured_at,
            "past": self.past.numbers(),
            "budget": [self._budget.fraction, self._budget.fixed, self._budget.least],
        }
        return tensors, numbers

    def restore(self, tensors: dict[str, Tensor], numbers: dict) -> None:
        """Take back what `state` gave."""
        self.reset()
        if not numbers:
            return
        _check_state(tensors, numbers, self.config.sinks)
        self.budget = self._restored_budget(*numbers["budget"])
        self.past = self.config.new_past(self.budget, self.layer)
        self.window.append(Columns(tensors["keys"], tensors["values"], tensors["ranks"], tensors.get("labels")))
        self.window.ragged = numbers["ragged"]
        for name in ("seen", "lengths", "left", "measured_at"):
            setattr(self, name, numbers[name])
        if isinstance(self.past, LookupPast) and "labels" in tensors:
            self.past.check_labels(tensors["labels"])
        self.past.restore(with_prefix(tensors, "past."), numbers["past"])
        self.error, self.recall = tensors.get("error"), tensors.get("recall")
        self._check_that_it_answers()

    def _restored_budget(self, fraction: float | None, fixed: int | None, least: int) -> Budget:
        """The budget, which follows from the config but where bytes were divided by rows."""
        given = self.config.budget_given
        if isinstance(given, str):
            right = fraction is None and type(fixed) is int and least == self.config.least_entries() <= fixed <= MOST
        else:
            expected = self.budget_for(1, 0)
            right = (fraction, fixed, least) == (expected.fraction, expected.fixed, expected.least)
        if not right:
            raise ValueError(f"a budget of {(fraction, fixed, least)!s:.80} for keep={given!r}")
        return Budget(fraction, fixed, least)

    def _check_that_it_answers(self) -> None:
        """Refuse parts that do not belong together: even no queries at all have no answer then."""
        held = self.window.columns
        rows, heads, _, width = held.keys.shape
        found = self._attend_all(Question(held.keys.new_zeros(rows, heads, 0, width), None, 1.0))
        if found is not None and found.out.shape != (rows, heads, 0, held.values.shape[3]):
            raise ValueError(f"answers of shape {tuple(found.out.shape)}")

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        return self.window.nbytes + (0 if self.past is None else self.past.nbytes)

    def count_entries(self) -> Tensor | None:
        """Entries held per row and KV head."""
        if self.past is None:
            return None
        window = (self.window.ranks.view >= 0).sum(1)[:, None].expand(-1, self.window.keys.view.shape[1])
        past = self.past.count_entries()
        return window if past is None else window + past


def _check_state(tensors: dict[str, Tensor], numbers: dict, sinks: int) -> None:
    """Refuse what no layer can be in."""
    keys, values, ranks = (tensors[name] for name in ("keys", "values", "ranks"))
    rows, lengths, left, seen = keys.shape[0], numbers["lengths"], numbers["left"], numbers["seen"]
    shaped = keys.ndim == values.ndim == 4 and keys.shape[:3] == values.shape[:3] and keys.dtype == values.dtype
    if not shaped or ranks.shape != keys.shape[::2][:2] or ranks.dtype != torch.int64:
        raise ValueError(f"keys {tuple(keys.shape)}, values {tuple(values.shape)} and ranks {tuple(ranks.shape)}")
    kinds = {name: x.dtype for name, x in tensors.items() if name.rpartition(".")[2] in ("keys", "values", "pairs")}
    if not keys.is_floating_point() or set(kinds.values()) != {keys.dtype}:
        raise ValueError(f"keys and values of several types: {kinds}")
    counted = all(map(_is_count, (*lengths, *left, seen, numbers["measured_at"])))
    if not rows or not counted or len(lengths) != rows or len(left) != rows or max(lengths) > seen:
        raise ValueError(f"{rows} rows of {lengths!s:.60} tokens, {left!s:.60} of them not in the window, {seen} seen")
    if any(gone > length for gone, length in zip(left, lengths, strict=True)) or type(numbers["ragged"]) is not bool:
        raise ValueError(f"rows of {lengths!s:.60} tokens, {left!s:.60} of them not in the window")
    for row, (length, gone) in enumerate(zip(lengths, left, strict=True)):
        there = ranks[row][ranks[row] >= 0].tolist()
        whole = len(there) == length - gone  # or they would be more than there is memory for
        if not whole or there != [*range(min(sinks, length)), *range(sinks + gone, length)]:
            raise ValueError(f"row {row} of {length} tokens, {gone} of them not in the window, has others there")
    for name, of_rows in numbers["past"].items():
        if not isinstance(of_rows, list) or len(of_rows) > rows or not all(_is_count(x + 1) for x in of_rows):
            raise ValueError(f"the past's {name} are {of_rows!s:.60}")
    if numbers["past"].get("counts") not in (None, [], left) or (numbers["past"].get("counts") == [] and any(left)):
        raise ValueError(f"{left!s:.60} tokens were written, and the past has {numbers['past']['counts']!s:.60}")
    measured = [tensors[name] for name in ("error", "recall") if name in tensors]
    if any(x.ndim != 2 or len(x) != rows or not x.is_floating_point() for x in measured):
        raise ValueError("errors that are not of these rows")


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number <= MOST
