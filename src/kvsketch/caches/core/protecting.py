"""A stream with protected tokens: they leave the window as all tokens do, and go to lanes where everything stays."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.chooser import Chooser, Held, Kept
from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.core.lanes import Lanes
from kvsketch.caches.core.method import Method
from kvsketch.caches.core.part import Heads
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.spans import Spans, among
from kvsketch.caches.core.storage import with_prefix
from kvsketch.caches.core.stream import Stream
from kvsketch.caches.core.tokens import Arriving, Columns


class Everything(Chooser):
    """All that comes stays."""

    def choose(self, held: Held, new: Arriving, budget: Budget) -> Kept:
        return Kept(None, held.count)

    def check(self, held: Held, count: int, budget: Budget) -> None:
        if held.count != count:
            raise ValueError(f"{held.count} entries of {count} protected tokens")


class ProtectingStream(Stream):
    """Sinks, past and window, and beside them the protected tokens that have left the window.

    The past gets all other tokens: to a method it is as if the protected ones had not come. The past's budgets, row by
    row, are what the protected tokens leave.
    """

    def __init__(
        self,
        config: MethodConfig,
        method: Method | None,
        budgets: Sequence[Sequence[Budget]],
        spans: Sequence[Spans],
        heads: Heads,
    ) -> None:
        """`spans` are those of each row."""
        self.spans = list(spans)
        super().__init__(config, method, self._charged(budgets, config.sinks), heads)
        counts = [own.beside(config.sinks) for own in spans]
        self.kept = Lanes(Everything(), [[Budget(None, count, count)] * len(budgets[0]) for count in counts], heads)

    def _charged(self, budgets: Sequence[Sequence[Budget]], sinks: int) -> list[list[Budget]]:
        """These budgets of each row's KV heads, less what the row's protected tokens take."""
        return [
            [replace(budget, beside=own.beside(sinks)) for budget in row]
            for own, row in zip(self.spans, budgets, strict=True)
        ]

    def share(self, budgets: Sequence[Sequence[Budget]]) -> None:
        super().share(self._charged(budgets, self.config.sinks))

    def window_size(self, row: int, length: int) -> int | None:
        return super().window_size(row, length - self.spans[row].within(self.config.sinks, length))

    def _protected_of(self, left: Sequence[int]) -> list[int]:
        """How many of the tokens that have left the window are protected, row by row."""
        sinks = self.config.sinks
        return [own.within(sinks, sinks + count) for own, count in zip(self.spans, left, strict=True)]

    def of_past(self, left: Sequence[int]) -> list[int]:
        return [count - kept for count, kept in zip(left, self._protected_of(left), strict=True)]

    def _write(self, tokens: Columns, left: list[int]) -> None:
        kept, before = self._protected_of(left), self.of_past(self.left)
        if kept != self.kept.counts:
            protected = among(self.spans, tokens.ranks)
            own = replace(tokens, ranks=tokens.ranks.masked_fill(~protected, -1), notes=None)
            self.kept.write(own, kept, [False] * len(kept))
            tokens = replace(tokens, ranks=tokens.ranks.masked_fill(protected, -1))
        if self.of_past(left) == before:
            self.left = left
        else:
            super()._write(tokens, left)

    def look(self, query: Query) -> Answer:
        found = super().look(query)
        return replace(found, unread=(*self.kept.look(query).unread, *found.unread))

    @property
    def lanes(self) -> list[Lanes]:
        return [self.kept, *super().lanes]

    def map_rows(self, rows: list[int]) -> None:
        super().map_rows(rows)
        self.spans = [self.spans[row] for row in rows]
        self.kept.map_rows(rows)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, numbers = super().state()
        tensors |= {f"kept.{name}": tensor for name, tensor in self.kept.tensors().items()}
        return tensors, numbers | {"kept": self.kept.numbers()}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any], *, ragged: bool) -> None:
        super().restore(tensors, numbers, ragged=ragged)
        self.kept.restore(with_prefix(tensors, "kept."), numbers["kept"])
        if self.kept.counts != self._protected_of(self.left):
            raise ValueError(f"{self.kept.counts!s:.60} protected tokens of {self.left!s:.60} that were written")

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.kept.nbytes

    def count_entries(self) -> Tensor:
        entries = super().count_entries()
        return entries + self.kept.count_entries().to(entries.device)
