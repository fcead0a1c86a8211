"""The tokens that a layer holds exactly: its sinks and its latest ones, one column per token.

Rows of unequal lengths meet in one buffer, so a column may be one row's and not another's: its rank
is -1 where it is not. The log weight of such a place is `-inf`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.attention import WeightedTokens, log_mass_of
from kvsketch.caches.base import BLOCK
from kvsketch.caches.question import Arriving, LookupPast
from kvsketch.caches.storage import Rows, columns, storage_bytes


@dataclass(frozen=True)
class Columns:
    """Tokens side by side, with their ranks: how many tokens of their row came before them."""

    keys: Float[Tensor, "b h n d"]
    values: Float[Tensor, "b h n e"]
    ranks: Int64[Tensor, "b n"]
    labels: Int64[Tensor, "b h n t"] | None = None  # what the past noted about them, if it does

    def part(self, start: int, stop: int) -> "Columns":
        """Columns start…stop-1."""
        labels = None if self.labels is None else self.labels[:, :, start:stop]
        return Columns(self.keys[:, :, start:stop], self.values[:, :, start:stop], self.ranks[:, start:stop], labels)

    def select(self, index: Tensor) -> "Columns":
        """The columns with these numbers."""
        keys, values = self.keys.index_select(2, index), self.values.index_select(2, index)
        labels = None if self.labels is None else self.labels.index_select(2, index)
        return Columns(keys, values, self.ranks.index_select(1, index), labels)


class Window:
    """Sinks and latest tokens, in the order in which they came."""

    def __init__(self) -> None:
        self.keys, self.values, self.ranks = Rows(dim=2), Rows(dim=2), Rows(dim=1)
        self.labels: Rows | None = None  # until columns come that have some
        self.unlabelled: list[Arriving] = []  # the last columns, if they came one by one
        self.labeller: LookupPast | None = None  # by which those will get labels
        self.ragged = False  # whether there may be columns that are not all rows' own

    @property
    def length(self) -> int:
        """Number of columns."""
        return self.ranks.length

    @property
    def columns(self) -> Columns:
        """All columns, as views, with their labels."""
        self._label()
        labels = None if self.labels is None else self.labels.view
        return Columns(self.keys.view, self.values.view, self.ranks.view, labels)

    def tokens(self) -> WeightedTokens:
        """What attention sees."""
        held = self.ranks.view >= 0 if self.ragged else None
        return WeightedTokens(self.keys.view, self.values.view, log_mass_of(held))

    def append(self, new: Columns) -> None:
        """Add columns at the end."""
        self._label()
        self._append(new)
        self._append_labels(new.labels)

    def append_unlabelled(self, new: Columns, arriving: Arriving, labeller: LookupPast) -> None:
        """Add columns that get their labels together with later ones: one by one costs more."""
        self._append(new)
        self.unlabelled.append(arriving)
        self.labeller = labeller
        if len(self.unlabelled) == BLOCK:
            self._label()

    def _append(self, new: Columns) -> None:
        self.keys.append(new.keys)
        self.values.append(new.values)
        self.ranks.append(new.ranks)

    def _append_labels(self, labels: Int64[Tensor, "b h n t"] | None) -> None:
        if labels is not None:
            self.labels = self.labels or Rows(dim=2)
            self.labels.append(labels)

    def _label(self) -> None:
        """Have labels for all columns."""
        if self.unlabelled and self.labeller is not None:
            labels = self.labeller.label(Arriving.joined(self.unlabelled))
            self.unlabelled = []
            self._append_labels(labels)

    def remove(self, start: int, stop: int) -> None:
        """Take out columns whose tokens have left."""
        for rows in self._all:
            rows.remove(start, stop)

    def crop(self, lengths: Sequence[int]) -> None:
        """Take back all tokens of each row but the first so many."""
        kept = self.ranks.view < torch.tensor(lengths, device=self.ranks.view.device)[:, None]
        if self.ragged:
            self.ranks.make_writable()
            self.ranks.view.masked_fill_(~kept, -1)
            self.compact()
        else:
            count = int(kept[0].sum())
            for rows in self._all:
                rows.remove(count, rows.length)

    def compact(self) -> None:
        """Have no more columns than the fullest row needs, each row's tokens to the right in their order."""
        held = self.ranks.view >= 0
        width = int(held.sum(1).max()) if held.numel() else 0
        spare = self.length - width
        if spare == 0:
            return
        index = held.long().sort(dim=1, stable=True).indices[:, spare:]  # empty places first
        for rows in self._all:
            moved = rows.view.gather(1, index) if rows.dim == 1 else columns(rows.view, index)
            rows.make_writable()
            rows.view.narrow(rows.dim, 0, width).copy_(moved)
            rows.remove(width, rows.length)

    def map_rows(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `move` of it."""
        for rows in self._all:
            rows.map(move)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the state by name."""
        self._label()
        found = {"keys": self.keys.view, "values": self.values.view, "ranks": self.ranks.view}
        return found if self.labels is None else found | {"labels": self.labels.view}

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        waiting = [x for tokens in self.unlabelled for x in (tokens.keys, tokens.unrotated, tokens.ranks)]
        return storage_bytes([*(rows.buffer for rows in self._held), *waiting])

    @property
    def _all(self) -> tuple[Rows, ...]:
        """Those of all columns, with their labels."""
        self._label()
        return self._held

    @property
    def _held(self) -> tuple[Rows, ...]:
        exact = (self.keys, self.values, self.ranks)
        return exact if self.labels is None else (*exact, self.labels)
