"""Where a token goes: stream → window → past, and how a query reads all three.

A layer's stream of tokens is held as

    [ sinks | past | window ]
      exact  method  exact

Every token has a rank: how many tokens of its row came before it, padding not counted. The first
`sinks` ranks stay. The rest stay until `window` later tokens have come, then they are written to the
past, a block at a time. All of this is decided by ranks, row by row, so a row of a padded batch is
treated as if it were alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvsketch.attention import NO_MASS, Partial, WeightedTokens, merge
from kvsketch.caches.base import BLOCK, LeavingTokens, MethodConfig, Past
from kvsketch.caches.budget import Budget, fixed_entries
from kvsketch.caches.storage import Rows, storage_bytes
from kvsketch.kernels.weighted_attention import causal_attention, weighted_attention

PROBES = 8  # queries of a prompt that are answered twice, to see how far the cache is from exact attention


@dataclass(frozen=True)
class NewTokens:
    """Tokens of one call: keys and values, and which of them are real (None: all)."""

    keys: Float[Tensor, "b h q d"]
    values: Float[Tensor, "b h q e"]
    valid: Bool[Tensor, "b q"] | None = None

    def part(self, start: int, stop: int) -> "NewTokens":
        """Tokens start…stop-1."""
        valid = None if self.valid is None else self.valid[:, start:stop]
        return NewTokens(self.keys[:, :, start:stop], self.values[:, :, start:stop], valid)

    def detached(self) -> "NewTokens":
        """The same numbers without their history: what is held must not keep a call's activations alive."""
        return NewTokens(self.keys.detach(), self.values.detach(), self.valid)


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
        self.config, self.layer, self.layer_bytes = config, layer, layer_bytes
        self.recording = False  # hold back all writing to the past until the next `crop`
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.seen = 0  # tokens per row, padding included: the logical length
        self.lengths: list[int] = []  # real tokens per row
        self.left: list[int] = []  # tokens per row that went to the past
        self.keys, self.values, self.ranks = Rows(dim=2), Rows(dim=2), Rows(dim=1)  # sinks and window
        self.ragged = False  # whether the window may hold columns that are not all rows' (rank -1)
        self.tail = 0  # columns at the end of the window none of whose tokens has left: what `crop` can take
        self.budget: Budget | None = None
        self.past: Past | None = None
        self.error: Float[Tensor, "b hg"] | None = None  # relative error of the answers, per query head
        self.measured_at = 0  # tokens seen when it was measured

    # -- reading

    def read(
        self, query: Float[Tensor, "b hg q d"], new: NewTokens, scale: float, softcap: float | None = None
    ) -> Partial:
        """Attention of the new tokens' queries over all that is held and the new tokens; then they are held too."""
        if not self.started:
            self._start(new)
        count = new.keys.shape[2]
        if self.config.prefill == "exact" or count <= self.config.chunk:
            return self._read_chunk(query, new, scale, softcap)
        parts = [
            self._read_chunk(query[:, :, start:stop], new.part(start, stop), scale, softcap)
            for start, stop in chunks(count, self.config.chunk)
        ]
        return Partial(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))

    def attend(self, query: Float[Tensor, "b hg q d"], scale: float, softcap: float | None = None) -> Partial | None:
        """Attention over all that is held, all of it visible; None if nothing is."""
        parts = []
        if self.past is not None and (past := self.past.attend(query, scale, softcap)) is not None:
            parts.append(past)
        if self.keys.length:
            parts.append(weighted_attention(query, self._window_tokens(), scale, softcap=softcap))
        return merge(*parts) if parts else None

    def _read_chunk(self, query: Tensor, new: NewTokens, scale: float, softcap: float | None) -> Partial:
        if new.keys.shape[2] == 1 and new.valid is None:
            # The new token sees all that is held and itself: with it in the window, that is one call less.
            self._append(new.detached(), self._ranks_of(new))
            answer = self.attend(query, scale, softcap)
            assert answer is not None, "the new token itself is held"
            self.settle()
            return answer
        held = self.attend(query, scale, softcap)
        among = causal_attention(query, new.keys, new.values, scale, valid=new.valid, softcap=softcap)
        answer = among if held is None else merge(held, among)
        before = self._probe(query, new, scale, softcap)
        self.hold(new)
        self._measure(before, query, scale, softcap)
        return answer

    def _window_tokens(self) -> WeightedTokens:
        held = self.ranks.view >= 0 if self.ragged else None
        return WeightedTokens(self.keys.view, self.values.view, _mass_of(held))

    # -- writing

    def _start(self, new: NewTokens) -> None:
        rows, heads, _, width = new.keys.shape
        entry_bytes = (
            rows * heads * (width + new.values.shape[-1]) * new.keys.element_size() + rows * 12
        )  # rank, weight
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
        self.budget = Budget(fraction, fixed, least)
        self.past = self.config.new_past(self.budget, self.layer)
        self.lengths, self.left = [0] * rows, [0] * rows

    @property
    def started(self) -> bool:
        """Whether any token came."""
        return self.past is not None

    def hold(self, new: NewTokens) -> None:
        """Put new tokens where they belong, without an answer; those that leave at once never enter the window."""
        if not self.started:
            self._start(new)
        new = new.detached()
        ranks = self._ranks_of(new)
        if self.recording:
            self._append(new, ranks)
        elif self.ragged or new.valid is not None:
            self._hold_ragged(new, ranks)
        else:
            self._hold_even(new, ranks)

    def settle(self) -> None:
        """Write to the past what is due to leave the window."""
        if self.recording or self._due() == self.left:
            return
        if self.ragged:
            self._leave_ragged(self.keys.view, self.values.view, self.ranks.view)
            self._compact()
        else:
            self._leave_window(self._due()[0] - self.left[0])

    def _append(self, new: NewTokens, ranks: Tensor) -> None:
        """Put new tokens into the window."""
        self._count(new)
        self.keys.append(new.keys)
        self.values.append(new.values)
        self.ranks.append(ranks)

    def _ranks_of(self, new: NewTokens) -> Tensor:
        rows, _, count, _ = new.keys.shape
        device = new.keys.device
        if new.valid is None and not self.ragged:
            return torch.arange(self.seen, self.seen + count, device=device).expand(rows, -1)
        first = torch.tensor(self.lengths, device=device)[:, None]
        if new.valid is None:
            return first + torch.arange(count, device=device)
        return (first + new.valid.cumsum(1) - 1).masked_fill(~new.valid, -1)

    def _count(self, new: NewTokens) -> None:
        count = new.keys.shape[2]
        added = [count] * len(self.lengths) if new.valid is None else new.valid.sum(1).tolist()
        self.lengths = [length + more for length, more in zip(self.lengths, added, strict=True)]
        # Rows of unequal lengths leave the window at different times.
        self.ragged = self.ragged or new.valid is not None
        self.seen += count
        self.tail += count

    def _hold_even(self, new: NewTokens, ranks: Tensor) -> None:
        """All rows stand at the same rank: what leaves is a slice."""
        held, first, count = self.keys.length, self.seen, new.keys.shape[2]
        self._count(new)
        leaving = self._due()[0] - self.left[0]
        from_window = min(leaving, max(0, held - self.config.sinks))
        self._leave_window(from_window)
        start = max(0, self.config.sinks - first)  # new tokens before this one are sinks
        stop = start + leaving - from_window
        if stop > start:
            part = slice(start, stop)
            left = [self.left[0] + stop - start] * len(self.left)
            self._write(new.keys[:, :, part], new.values[:, :, part], ranks[:, part], left)
            self.tail = min(self.tail, count - stop)
        for rows, tensor in ((self.keys, new.keys), (self.values, new.values), (self.ranks, ranks)):
            rows.append(tensor.narrow(rows.dim, 0, start if stop > start else count))
            if stop > start:
                rows.append(tensor.narrow(rows.dim, stop, count - stop))

    def _leave_window(self, count: int) -> None:
        """Write the oldest tokens after the sinks to the past; all rows stand at the same rank."""
        if count == 0:
            return
        part = slice(self.config.sinks, self.config.sinks + count)
        left = [self.left[0] + count] * len(self.left)
        self._write(self.keys.view[:, :, part], self.values.view[:, :, part], self.ranks.view[:, part], left)
        for rows in (self.keys, self.values, self.ranks):
            rows.remove(part.start, part.stop)
        self.tail = min(self.tail, self.seen - self.config.sinks - self.left[0])

    def _hold_ragged(self, new: NewTokens, ranks: Tensor) -> None:
        """Rows stand at different ranks: a column may leave one row and stay in another."""
        self._count(new)
        if self._due() == self.left:
            parts = new.keys, new.values, ranks
        else:
            if self.keys.length:
                self._leave_ragged(self.keys.view, self.values.view, self.ranks.view)
            ranks = ranks.clone()
            self._leave_ragged(new.keys, new.values, ranks)
            kept = (ranks >= 0).any(0).nonzero()[:, 0]
            parts = new.keys.index_select(2, kept), new.values.index_select(2, kept), ranks.index_select(1, kept)
        for rows, tensor in zip((self.keys, self.values, self.ranks), parts, strict=True):
            rows.append(tensor)
        self._compact()

    def _leave_ragged(self, keys: Tensor, values: Tensor, ranks: Tensor) -> None:
        """Write to the past what is due among these columns; its ranks become -1."""
        sinks = self.config.sinks
        stop = torch.tensor(self._due(), device=ranks.device)[:, None] + sinks
        leaving = (ranks >= sinks) & (ranks < stop)  # what left before has rank -1
        columns = leaving.any(0).nonzero()[:, 0]
        if columns.numel() == 0:
            return
        part = slice(int(columns[0]), int(columns[-1]) + 1)
        left = [before + more for before, more in zip(self.left, leaving.sum(1).tolist(), strict=True)]
        due_ranks = ranks.masked_fill(~leaving, -1)[:, part]
        self._write(keys[:, :, part], values[:, :, part], due_ranks, left)
        ranks.masked_fill_(leaving, -1)

    def _compact(self) -> None:
        """Have no more columns than the fullest row needs, each row's tokens to the right in their order."""
        held = self.ranks.view >= 0
        # The last columns that are all rows' stay in place: those are what `crop` can take.
        self.tail = min(self.tail, int(held.all(0).flip(0).cumprod(0).sum()))
        old = held[:, : held.shape[1] - self.tail]
        width = int(old.sum(1).max()) if old.numel() else 0
        if width == old.shape[1]:
            return
        index = old.long().sort(dim=1, stable=True).indices[:, old.shape[1] - width :]  # empty ones first
        for rows in (self.keys, self.values, self.ranks):
            front = rows.view.narrow(rows.dim, 0, old.shape[1])
            where = index if rows.dim == 1 else index[:, None, :, None].expand(-1, front.shape[1], -1, front.shape[3])
            moved = front.gather(rows.dim, where)
            rows.remove(0, old.shape[1] - width)
            rows.view.narrow(rows.dim, 0, width).copy_(moved)

    def _due(self) -> list[int]:
        """How many tokens of each row should have left sinks and window by now: a whole number of blocks."""
        assert self.budget is not None
        due = []
        for length, left in zip(self.lengths, self.left, strict=True):
            window = self.config.window_size(self.budget, length)
            beyond = 0 if window is None else max(0, length - self.config.sinks - window)
            due.append(max(left, beyond // BLOCK * BLOCK))
        return due

    def _write(self, keys: Tensor, values: Tensor, ranks: Tensor, left: list[int]) -> None:
        """Give tokens to the past; afterwards `left` of each row went there."""
        assert self.past is not None
        self.left = list(left)
        past_ranks = (ranks - self.config.sinks).clamp_min(-1)  # -1 stays -1: it is no rank
        self.past.write(LeavingTokens(keys, values, past_ranks, tuple(self.left)))

    # -- how far from exact

    @torch.no_grad()
    def _probe(self, query: Tensor, new: NewTokens, scale: float, softcap: float | None) -> Partial | None:
        """What the last queries of a first call would see if nothing were dropped; None where that is not known."""
        first_and_whole = self.seen == 0 and self.config.prefill == "exact" and not self.recording
        padded_end = new.valid is not None and not bool(new.valid[:, -PROBES:].all())
        if not first_and_whole or padded_end or self.config.window_size(self._budget, 0) is None:
            return None
        everything = WeightedTokens(new.keys, new.values, _mass_of(new.valid))
        return weighted_attention(query[:, :, -PROBES:], everything, scale, softcap=softcap)

    @torch.no_grad()
    def _measure(self, before: Partial | None, query: Tensor, scale: float, softcap: float | None) -> None:
        if before is None:
            return
        after = self.attend(query[:, :, -PROBES:], scale, softcap)
        assert after is not None, "the call's tokens are held"
        exact = before.out.float()
        self.error = (after.out.float() - exact).norm(dim=(2, 3)) / exact.norm(dim=(2, 3)).clamp_min(1e-30)
        self.measured_at = self.seen

    @property
    def _budget(self) -> Budget:
        assert self.budget is not None, "no token came yet"
        return self.budget

    # -- rows, tail, state

    def check_crop(self, count: int) -> None:
        """Refuse to take back tokens that have left the window."""
        if count > self.tail:
            raise ValueError(
                f"cannot take back {count} tokens: only the last {self.tail} of {self.seen} are still uncompressed"
            )

    def crop(self, count: int) -> None:
        """Take back the last `count` tokens; they must not have left the window."""
        self.check_crop(count)
        if count:
            dropped = (self.ranks.view[:, self.keys.length - count :] >= 0).sum(1).tolist()
            self.lengths = [length - less for length, less in zip(self.lengths, dropped, strict=True)]
            for rows in (self.keys, self.values, self.ranks):
                rows.remove(rows.length - count, rows.length)
            self.seen -= count
            self.tail -= count

    def map_rows(self, move: Callable[[Tensor], Tensor], rows: list[int]) -> None:
        """Replace every tensor by `move` of it, which brings row `rows[i]` to row i."""
        if self.past is None:
            return
        for stored in (self.keys, self.values, self.ranks):
            stored.map(move)
        self.past.map_rows(move, rows)
        self.lengths = [self.lengths[row] for row in rows]
        self.left = [self.left[row] for row in rows]
        self.error = None if self.error is None else move(self.error)

    def state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Everything that `restore` needs, as tensors and as JSON."""
        if self.past is None:
            return {}, {}
        tensors = {"keys": self.keys.view, "values": self.values.view, "ranks": self.ranks.view}
        tensors |= {f"past.{name}": tensor for name, tensor in self.past.tensors().items()}
        if self.error is not None:
            tensors["error"] = self.error
        numbers: dict[str, object] = {
            "seen": self.seen,
            "lengths": self.lengths,
            "left": self.left,
            "ragged": self.ragged,
            "tail": self.tail,
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
        self.budget = Budget(*numbers["budget"])
        self.past = self.config.new_past(self.budget, self.layer)
        for name, rows in (("keys", self.keys), ("values", self.values), ("ranks", self.ranks)):
            rows.append(tensors[name])
        for name in ("seen", "lengths", "left", "ragged", "tail", "measured_at"):
            setattr(self, name, numbers[name])
        held = {name.removeprefix("past."): tensor for name, tensor in tensors.items() if name.startswith("past.")}
        self.past.restore(held, numbers["past"])
        self.error = tensors.get("error")

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        past = 0 if self.past is None else self.past.nbytes
        return storage_bytes([self.keys.buffer, self.values.buffer, self.ranks.buffer]) + past

    def count_entries(self) -> Tensor | None:
        """Entries held per row and KV head."""
        if self.past is None:
            return None
        window = (self.ranks.view >= 0).sum(1)[:, None].expand(-1, self.keys.view.shape[1])
        past = self.past.count_entries()
        return window if past is None else window + past


def _mass_of(held: Tensor | None) -> Tensor | None:
    """Log weights of the columns that a row holds: 0 where it does, `-inf` where not. [b, n] → [b, 1, n]"""
    if held is None:
        return None
    return torch.zeros(held.shape, device=held.device).masked_fill(~held, NO_MASS)[:, None]
