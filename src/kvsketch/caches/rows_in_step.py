"""Rows of a batch in groups that are in step: all rows of a group have written as many tokens.

Rows of a padded batch reach their limits at different times. Each group has a past of its own, so that a row is treated
as if it were alone. A group is divided when some of its rows write more than the others.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.attention import NO_MASS, Partial
from kvsketch.caches.base import LeavingTokens
from kvsketch.caches.question import Arriving, LookedUp, LookupPast, Question
from kvsketch.caches.slots import SlotsPast
from kvsketch.caches.storage import check_groups, columns, in_front, with_prefix


class RowsInStep(LookupPast):
    """Groups of rows, each with slots of its own."""

    def __init__(self, new_slots: Callable[[], SlotsPast]) -> None:
        self.new_slots = new_slots
        self.labeller = new_slots()  # holds nothing
        self.counts: list[int] = []  # tokens written, per row
        self.groups: list[int] = []  # the number of each row's group
        self.pasts: list[SlotsPast] = []

    def label(self, arriving: Arriving) -> Int64[Tensor, "b h n t"]:
        return self.labeller.label(arriving)

    def check_labels(self, labels: Int64[Tensor, "b h n t"]) -> None:
        self.labeller.check_labels(labels)

    def write(self, tokens: LeavingTokens) -> None:
        """Give every group its tokens, holes between them closed; a group that is not in step any more is divided."""
        if not self.groups:
            self.counts, self.groups = [0] * len(tokens.counts), [0] * len(tokens.counts)
            self.pasts = [self.new_slots()]
        added = [count - before for count, before in zip(tokens.counts, self.counts, strict=True)]
        self.counts = list(tokens.counts)
        self._divide(added)
        for group, past in enumerate(self.pasts):
            rows = self._rows_of(group)
            if added[rows[0]]:
                past.write(_tokens_of(tokens, rows, added[rows[0]]))

    def _divide(self, added: list[int]) -> None:
        """Groups of rows that have equal numbers to add."""
        for group in range(len(self.pasts)):
            rows = self._rows_of(group)
            first, *others = dict.fromkeys(added[row] for row in rows)
            for number in others:
                moved = [row for row in rows if added[row] == number]
                self.pasts.append(_with_rows(self.pasts[group], [rows.index(row) for row in moved], self.new_slots))
                self.groups = [len(self.pasts) - 1 if row in moved else old for row, old in enumerate(self.groups)]
            if others:
                stay = [place for place, row in enumerate(rows) if added[row] == first]
                self.pasts[group] = _with_rows(self.pasts[group], stay, self.new_slots)

    @property
    def empty(self) -> bool:
        return not any(self.counts)

    def look_up(self, question: Question) -> LookedUp:
        if len(self.pasts) == 1:
            return self.pasts[0].look_up(question)
        read, estimated = list[Tensor](), False
        parts, rests = list[Partial](), list[Partial]()
        for group, past in enumerate(self.pasts):
            asking = question.of_rows(self._rows_of(group))
            found = past.look_up(asking) if past.count else None
            parts.append(self._of_nothing(asking.queries) if found is None else found.part)
            rests.append(self._of_nothing(asking.queries) if found is None or found.rest is None else found.rest)
            read.append(self._none_read(asking.queries) if found is None else found.read)
            estimated = estimated or (found is not None and found.rest is not None)
        order = self._order(question.queries)
        rest = _joined(rests, order) if estimated else None
        return LookedUp(_joined(parts, order), torch.cat(read)[order], rest)

    def attend(self, query: Float[Tensor, "b hg q d"], scale: float, softcap: float | None) -> Partial | None:
        """Attention over everything, group by group."""
        if self.empty:
            return None
        if len(self.pasts) == 1:
            return self.pasts[0].attend(query, scale, softcap)
        parts = [
            past.attend(query[self._rows_of(group)], scale, softcap) or self._of_nothing(query[self._rows_of(group)])
            for group, past in enumerate(self.pasts)
        ]
        return _joined(parts, self._order(query))

    def _order(self, like: Tensor) -> Int64[Tensor, " b"]:
        """Where each row of the batch is when groups are put one behind the other."""
        rows = [row for group in range(len(self.pasts)) for row in self._rows_of(group)]
        return torch.tensor(rows, device=like.device).argsort()

    def _some(self) -> SlotsPast:
        """A group that holds tokens."""
        return next(past for past in self.pasts if past.count)

    def _of_nothing(self, query: Float[Tensor, "b hg q d"]) -> Partial:
        """The attention of queries that see no tokens."""
        out = query.new_zeros(*query.shape[:3], self._some().values.shape[3], dtype=torch.float32)
        return Partial(out, out.new_full(query.shape[:3], NO_MASS))

    def _none_read(self, query: Float[Tensor, "b hg q d"]) -> Int64[Tensor, "b h q"]:
        heads = self._some().keys.shape[1]
        return torch.zeros(query.shape[0], heads, query.shape[2], dtype=torch.int64, device=query.device)

    def _rows_of(self, group: int) -> list[int]:
        return [row for row, number in enumerate(self.groups) if number == group]

    def _by_row(self, of_past: Callable[[SlotsPast], Tensor | None]) -> Tensor | None:
        """A tensor of every group's past, its rows in the order of the batch; 0 where a group has none."""
        found = {group: of_past(past) for group, past in enumerate(self.pasts)}
        known = next((tensor for tensor in found.values() if tensor is not None), None)
        if known is None:
            return None
        rows = dict[int, Tensor]()
        for group, tensor in found.items():
            numbers = self._rows_of(group)
            found_here = known.new_zeros(len(numbers), *known.shape[1:]) if tensor is None else tensor
            rows |= dict(zip(numbers, found_here, strict=True))
        return torch.stack([rows[row] for row in range(len(self.groups))])

    def count_entries(self) -> Int64[Tensor, "b h"] | None:
        return self._by_row(lambda past: past.count_entries())

    def selectivity(self) -> Float[Tensor, "b h"] | None:
        return self._by_row(lambda past: past.selectivity())

    @property
    def nbytes(self) -> int:
        return sum(past.nbytes for past in self.pasts)

    def tensors(self) -> dict[str, Tensor]:
        """Those of the groups under their numbers; each has the rows of its group."""
        named = [(f"{group}.{name}", x) for group, past in enumerate(self.pasts) for name, x in past.tensors().items()]
        return dict(named)

    def numbers(self) -> dict[str, list[int]]:
        return {"counts": self.counts, "groups": self.groups}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, list[int]]) -> None:
        self.counts, self.groups = list(numbers["counts"]), list(numbers["groups"])
        self.pasts = []
        for group in range(check_groups(self.groups, len(self.counts), 0)):
            past = self.new_slots()
            past.restore(with_prefix(tensors, f"{group}."), {})
            rows = self._rows_of(group)
            if any(self.counts[row] != past.count for row in rows) or (past.count and len(past.keys) != len(rows)):
                raise ValueError(
                    f"rows {rows!s:.60} wrote {self.counts!s:.60} tokens, and group {group} has {past.count}"
                )
            self.pasts.append(past)

    def map_rows(self, move: Callable[[Tensor], Tensor], rows: list[int]) -> None:
        """Every group moves by itself: its tensors have its own rows, which `move` does not know."""
        if not self.groups:
            return
        groups, left = [self.groups[row] for row in rows], list[SlotsPast]()
        for group, past in enumerate(self.pasts):
            own = self._rows_of(group)
            wanted = [own.index(row) for row in rows if self.groups[row] == group]
            if wanted:
                groups = [len(left) if number == group else number for number in groups]
                left.append(_with_rows(past, wanted, self.new_slots))
        self.counts = [self.counts[row] for row in rows]
        self.groups, self.pasts = groups, left


def _with_rows(past: SlotsPast, rows: list[int], new_slots: Callable[[], SlotsPast]) -> SlotsPast:
    """Slots with these of the rows alone, or with some of them several times."""
    chosen = new_slots()
    chosen.restore({name: tensor[rows] for name, tensor in past.tensors().items()}, {})
    return chosen


def _tokens_of(tokens: LeavingTokens, rows: list[int], count: int) -> LeavingTokens:
    """What these rows have to write, without holes: they have equally many."""
    counts = tuple(tokens.counts[row] for row in rows)
    keys, values, ranks, labels = tokens.keys, tokens.values, tokens.ranks, tokens.labels
    assert labels is not None, "tokens have labels before they leave the window"
    if len(rows) < len(tokens.counts):
        keys, values, ranks, labels = (x[rows] for x in (keys, values, ranks, labels))
    if ranks.shape[1] > count:
        index = in_front(ranks >= 0)[:, :count]
        keys, values, labels = (columns(x, index) for x in (keys, values, labels))
        ranks = ranks.gather(1, index)
    return LeavingTokens(keys, values, ranks, counts, labels)


def _joined(parts: list[Partial], order: Int64[Tensor, " b"]) -> Partial:
    """Rows of several answers, in this order."""
    return Partial(
        torch.cat([part.out.float() for part in parts])[order], torch.cat([part.lse.float() for part in parts])[order]
    )
