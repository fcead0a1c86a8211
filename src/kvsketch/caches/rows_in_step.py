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
from kvsketch.caches.question import LookedUp, LookupPast, Question
from kvsketch.caches.slots import SlotsPast
from kvsketch.caches.storage import columns, in_front, with_prefix


class RowsInStep(LookupPast):
    """Groups of rows, each with slots of its own."""

    def __init__(self, new_slots: Callable[[], SlotsPast]) -> None:
        self.new_slots = new_slots
        self.labels = new_slots()  # holds nothing: it makes the labels
        self.counts: list[int] = []  # tokens written, per row
        self.groups: list[int] = []  # the number of each row's group
        self.pasts: list[SlotsPast] = []

    def label(
        self,
        keys: Float[Tensor, "b h n d"],
        unrotated: Float[Tensor, "b h n d"] | None,
        ranks: Int64[Tensor, "b n"],
    ) -> Int64[Tensor, "b h n t"]:
        return self.labels.label(keys, unrotated, ranks)

    def write(self, tokens: LeavingTokens) -> None:
        """Give every group its tokens, holes between them closed; a group that is not in step any more is divided."""
        if not self.groups:
            self.counts, self.groups, self.pasts = (
                [0] * len(tokens.counts),
                [0] * len(tokens.counts),
                [self.new_slots()],
            )
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

    def look_up(self, question: Question) -> LookedUp:
        if len(self.pasts) == 1:
            return self.pasts[0].look_up(question)
        heads = next(past.keys.view.shape[1] for past in self.pasts if past.count)
        found = [self._look_up_rows(group, question, heads) for group in range(len(self.pasts))]
        order = torch.tensor([row for group in range(len(self.pasts)) for row in self._rows_of(group)]).argsort()
        order = order.to(question.queries.device)
        part = _joined([looked.part for looked in found], order)
        rest = [looked.rest for looked in found if looked.rest is not None]
        if rest and len(rest) < len(found):  # rows too short for an estimate have nothing in theirs
            rest = [_nothing(looked.part) if looked.rest is None else looked.rest for looked in found]
        return LookedUp(
            part, torch.cat([looked.read for looked in found])[order], _joined(rest, order) if rest else None
        )

    def _look_up_rows(self, group: int, question: Question, heads: int) -> LookedUp:
        asking = question.of_rows(self._rows_of(group))
        if self.pasts[group].count:
            return self.pasts[group].look_up(asking)
        out = asking.queries.new_zeros(*asking.queries.shape[:3], self._value_width(), dtype=torch.float32)
        nothing = _nothing(Partial(out, out[..., 0]))
        return LookedUp(nothing, torch.zeros(len(out), heads, out.shape[2], dtype=torch.int64, device=out.device))

    def attend(self, query: Float[Tensor, "b hg q d"], scale: float, softcap: float | None) -> Partial | None:
        """Attention over everything, group by group."""
        if self.count_entries() is None:
            return None
        if len(self.pasts) == 1:
            return self.pasts[0].attend(query, scale, softcap)
        parts, order = list[Partial](), list[int]()
        for group, past in enumerate(self.pasts):
            rows = self._rows_of(group)
            found = past.attend(query[rows], scale, softcap)
            if found is None:
                out = query.new_zeros(len(rows), *query.shape[1:3], self._value_width(), dtype=torch.float32)
                found = _nothing(Partial(out, out[..., 0]))
            parts.append(found)
            order += rows
        return _joined(parts, torch.tensor(order, device=query.device).argsort())

    def _value_width(self) -> int:
        return next(past.values.view.shape[3] for past in self.pasts if past.count)

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
        for group in range(max(self.groups, default=-1) + 1):
            past = self.new_slots()
            past.restore(with_prefix(tensors, f"{group}."), {})
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
    assert labels is not None, "labels are made when tokens come"
    if len(rows) < len(tokens.counts):
        keys, values, ranks, labels = (x[rows] for x in (keys, values, ranks, labels))
    if ranks.shape[1] > count:
        index = in_front(ranks >= 0)[:, :count]
        keys, values, labels = (columns(x, index) for x in (keys, values, labels))
        ranks = ranks.gather(1, index)
    return LeavingTokens(keys, values, ranks, counts, labels)


def _nothing(like: Partial) -> Partial:
    """Attention over no tokens."""
    return Partial(torch.zeros_like(like.out), torch.full_like(like.lse, NO_MASS))


def _joined(parts: list[Partial], order: Int64[Tensor, " b"]) -> Partial:
    """Rows of several answers, in this order."""
    return Partial(
        torch.cat([part.out.float() for part in parts])[order], torch.cat([part.lse.float() for part in parts])[order]
    )
