"""Tokens that are held exactly for as long as they fit, for a method that is never exact by itself."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens, log_mass_of
from kvsketch.caches.base import LeavingTokens, Past
from kvsketch.caches.storage import check_groups, columns, in_front, made_of, storage_bytes, with_prefix
from kvsketch.kernels.weighted_attention import weighted_attention

HELD = -1  # the group of a row whose tokens are still held


@dataclass(frozen=True)
class Held:
    """Tokens of some rows, each row's to the left in their order."""

    keys: Float[Tensor, "b h n d"]
    values: Float[Tensor, "b h n e"]
    valid: Bool[Tensor, "b n"]

    @cached_property
    def log_mass(self) -> Float[Tensor, "b 1 n"] | None:
        """0 where there is a token and `-inf` where there is none; None where there are no such places."""
        return None if bool(self.valid.all()) else log_mass_of(self.valid)

    def join(self, other: "Held") -> "Held":
        """These and later ones."""
        return Held(
            torch.cat([self.keys, other.keys], 2),
            torch.cat([self.values, other.values], 2),
            torch.cat([self.valid, other.valid], 1),
        )

    def select(self, rows: list[int]) -> "Held":
        """The rows with these numbers."""
        return Held(self.keys[rows], self.values[rows], self.valid[rows]).pack()

    def pack(self) -> "Held":
        """No more columns than the fullest row needs."""
        width = int(self.valid.sum(1).max())
        if width == self.valid.shape[1]:
            return self
        index = in_front(self.valid)[:, :width]
        return Held(columns(self.keys, index), columns(self.values, index), self.valid.gather(1, index))


class ExactFirst(Past):
    """Holds each row's tokens while there is room; when there is none, hands them to a past of the method, in order.

    Rows that overflow in the same call share a past and form a group: some rows of a batch may be held exactly.
    """

    def __init__(self, room: Callable[[int], int], new_past: Callable[[], Past]) -> None:
        """`room(count)` tokens may be held when `count` were written."""
        self.room, self.new_past = room, new_past
        self.counts: list[int] = []  # tokens written, per row
        self.groups: list[int] = []  # number of each row's past, or HELD
        self.pasts: list[Past] = []
        self.held: Held | None = None  # the rows that are held, in their order

    def write(self, tokens: LeavingTokens) -> None:
        """Hold the tokens, or hand them on."""
        before = self.groups or [HELD] * len(tokens.counts)
        self.counts = list(tokens.counts)
        if HELD in before:
            self._hold(tokens, self._rows_of(HELD, before))
        for number, past in enumerate(self.pasts):
            rows = self._rows_of(number, before)
            past.write(_some_rows(tokens, rows))
        self.groups = self._hand_over(before)

    def _hold(self, tokens: LeavingTokens, rows: list[int]) -> None:
        new = _some_rows(tokens, rows)
        none = Held(new.keys[:, :, :0], new.values[:, :, :0], new.ranks[:, :0] >= 0)
        held = none if self.held is None else self.held
        self.held = held.join(Held(new.keys, new.values, new.ranks >= 0)).pack()

    def _hand_over(self, groups: list[int]) -> list[int]:
        """Move the rows for which there is no room any more to a past of their own; the groups afterwards."""
        rows = self._rows_of(HELD, groups)
        full = [i for i, row in enumerate(rows) if self.counts[row] > self.room(self.counts[row])]
        if not full:
            return groups
        assert self.held is not None, "a row that overflows was held"
        leaving = self.held.select(full)
        ranks = (leaving.valid.cumsum(1) - 1).masked_fill(~leaving.valid, -1)
        past = self.new_past()
        past.write(LeavingTokens(leaving.keys, leaving.values, ranks, tuple(self.counts[rows[i]] for i in full)))
        self.pasts.append(past)
        stay = [i for i in range(len(rows)) if i not in full]
        self.held = self.held.select(stay) if stay else None
        moved = {rows[i] for i in full}
        return [len(self.pasts) - 1 if row in moved else group for row, group in enumerate(groups)]

    @staticmethod
    def _rows_of(group: int, groups: list[int]) -> list[int]:
        return [row for row, number in enumerate(groups) if number == group]

    def attend(self, query: Float[Tensor, "b hg q d"], scale: float, softcap: float | None) -> Partial | None:
        """Attention over what is held, or what the method gives, row by row."""
        if not self.groups:
            return None
        if len(set(self.groups)) == 1:
            return self._attend_group(self.groups[0], query, scale, softcap)
        parts = list[tuple[list[int], Partial]]()
        for group in sorted(set(self.groups)):
            rows = self._rows_of(group, self.groups)
            parts.append((rows, self._attend_group(group, query[rows], scale, softcap)))
        order = torch.tensor([row for rows, _ in parts for row in rows], device=query.device).argsort()
        out = torch.cat([part.out.float() for _, part in parts])[order]
        return Partial(out, torch.cat([part.lse for _, part in parts])[order])

    def _attend_group(self, group: int, query: Tensor, scale: float, softcap: float | None) -> Partial:
        if group == HELD:
            assert self.held is not None
            tokens = WeightedTokens(self.held.keys, self.held.values, self.held.log_mass)
            return weighted_attention(query, tokens, scale, softcap=softcap)
        answer = self.pasts[group].attend(query, scale, softcap)
        assert answer is not None, "a past is made when tokens come"
        return answer

    def count_entries(self) -> Int64[Tensor, "b h"] | None:
        if not self.groups:
            return None
        found = dict[int, Tensor]()
        if self.held is not None:
            entries = self.held.valid.sum(1)[:, None].expand(-1, self.held.keys.shape[1])
            found |= dict(zip(self._rows_of(HELD, self.groups), entries, strict=True))
        for number, past in enumerate(self.pasts):
            counted = past.count_entries()
            assert counted is not None
            found |= dict(zip(self._rows_of(number, self.groups), counted, strict=True))
        return torch.stack([found[row] for row in range(len(self.groups))])

    def details(self) -> dict[str, float]:
        """Those of the pasts, each with the number of its rows as weight."""
        weights = [len(self._rows_of(number, self.groups)) for number in range(len(self.pasts))]
        found = dict[str, float]()
        for weight, past in zip(weights, self.pasts, strict=True):
            for name, value in past.details().items():
                found[name] = found.get(name, 0.0) + value * weight / sum(weights)
        return found

    def warning(self) -> str | None:
        return next(filter(None, (past.warning() for past in self.pasts)), None)

    @property
    def nbytes(self) -> int:
        held = [] if self.held is None else [self.held.keys, self.held.values, self.held.valid]
        return storage_bytes(held) + sum(past.nbytes for past in self.pasts)

    def tensors(self) -> dict[str, Tensor]:
        """What is held, and what the pasts hold under their numbers; each has the rows of its group."""
        found = dict[str, Tensor]()
        if self.held is not None:
            found |= {"keys": self.held.keys, "values": self.held.values, "valid": self.held.valid}
        for number, past in enumerate(self.pasts):
            found |= {f"{number}.{name}": tensor for name, tensor in past.tensors().items()}
        return found

    def numbers(self) -> dict[str, list[int]]:
        found = {"counts": self.counts, "groups": self.groups}
        for number, past in enumerate(self.pasts):
            found |= {f"{number}.{name}": values for name, values in past.numbers().items()}
        return found

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, list[int]]) -> None:
        self.counts, self.groups = list(numbers["counts"]), list(numbers["groups"])
        held: dict[str, Tensor] = {name: tensors[name] for name in ("keys", "values", "valid") if name in tensors}
        self.held = made_of(Held, held) if HELD in self.groups else None
        there = [] if self.held is None else self.held.valid.sum(1).tolist()
        if there != [self.counts[row] for row in self._rows_of(HELD, self.groups)]:
            raise ValueError(f"{self.counts!s:.60} tokens were written, and rows of {there!s:.60} are held exactly")
        self.pasts = []
        for number in range(check_groups(self.groups, len(self.counts), HELD)):
            past = self.new_past()
            prefix = f"{number}."
            past.restore(with_prefix(tensors, prefix), with_prefix(numbers, prefix))
            counts = [self.counts[row] for row in self._rows_of(number, self.groups)]
            entries = past.count_entries()
            if numbers[f"{prefix}counts"] != counts or entries is None or len(entries) != len(counts):
                raise ValueError(f"{counts!s:.60} tokens were written, and group {number} has others")
            self.pasts.append(past)

    def map_rows(self, move: Callable[[Tensor], Tensor], rows: list[int]) -> None:
        """Every group moves by itself: its tensors have its own rows, which `move` does not know."""
        if not self.groups:
            return
        place = {row: i for group in set(self.groups) for i, row in enumerate(self._rows_of(group, self.groups))}
        groups = [self.groups[row] for row in rows]
        held = [place[row] for row in rows if self.groups[row] == HELD]
        self.held = self.held.select(held) if self.held is not None and held else None
        left = list[Past]()
        for number, past in enumerate(self.pasts):
            theirs = [place[row] for row in rows if self.groups[row] == number]
            if theirs:
                _move(past, theirs)
                groups = [len(left) if group == number else group for group in groups]
                left.append(past)
        self.pasts, self.groups = left, groups
        self.counts = [self.counts[row] for row in rows]


def _move(past: Past, rows: list[int]) -> None:
    past.map_rows(lambda tensor: tensor[rows], rows)


def _some_rows(tokens: LeavingTokens, rows: list[int]) -> LeavingTokens:
    if len(rows) == len(tokens.counts):
        return tokens
    return LeavingTokens(
        tokens.keys[rows], tokens.values[rows], tokens.ranks[rows], tuple(tokens.counts[row] for row in rows)
    )
