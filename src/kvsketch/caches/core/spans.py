"""Spans of tokens that are protected: never dropped, and charged to the budget before anything else is divided."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from kvsketch.caches.core.budget import MOST

Given = Sequence[Sequence[Any]]  # as a user writes them, see `read_spans`
HOW = (
    "protect is (start, stop) pairs of whole numbers for all rows, as in [(0, 20)], or a list of such pairs for each "
    "row, as in [[(0, 20)], []]"
)


@dataclass(frozen=True)
class Spans:
    """Protected ranks of a row: half-open spans in their order, with other ranks between them."""

    each: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.each)

    def within(self, start: int, stop: int) -> int:
        """How many of the ranks start…stop-1 are protected."""
        found = 0
        for first, behind in self.each:
            more = (behind if behind < stop else stop) - (first if first > start else start)
            found += more if more > 0 else 0
        return found

    def beside(self, sinks: int) -> int:
        """How many protected tokens are held beside what every lane holds anyway, which includes `sinks` sinks."""
        return self.within(sinks, MOST)

    @property
    def end(self) -> int:
        """The rank after the last protected one."""
        return self.each[-1][1] if self.each else 0

    def among(self, ranks: Int64[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Which of these are protected."""
        bounds = torch.tensor([x for span in self.each for x in span], dtype=torch.int64, device=ranks.device)
        return torch.searchsorted(bounds, ranks.contiguous(), right=True) % 2 == 1


def among(each: Sequence[Spans], ranks: Int64[Tensor, "b n"]) -> Bool[Tensor, "b n"]:
    """Which of the tokens of each row are protected."""
    return torch.stack([spans.among(own) for spans, own in zip(each, ranks, strict=True)])


@dataclass(frozen=True)
class Protected:
    """The spans of each row of a batch; or the same spans for every row, however many there are."""

    rows: tuple[Spans, ...] = (Spans(),)
    alike: bool = True

    def __bool__(self) -> bool:
        return any(self.rows)

    def of(self, rows: int) -> list[Spans]:
        """The spans of each of so many rows."""
        if self.alike:
            return list(self.rows) * rows
        if len(self.rows) != rows:
            raise ValueError(
                f"protect has spans for {len(self.rows)} rows, and the batch has {rows}: give one list for all rows, "
                "or one for each (beams come as rows of their own: read the prompt with kvsketch.prefill, and then "
                "call cache.batch_repeat_interleave)"
            )
        return list(self.rows)


def read_spans(given: Given) -> Protected:
    """What a user has protected: a list of (start, stop) pairs is for all rows, a list of such lists has one per row.

    Spans that overlap or touch become one.
    """
    if not _is_list(given) or not all(map(_is_list, given)):
        raise ValueError(f"{HOW}, got {given!r:.60}")
    if all(map(_is_pair, given)):
        return Protected((_merged(given),))
    if not all(_is_pair(span) for row in given for span in row):
        raise ValueError(f"{HOW}, got {given!r:.60}")
    return Protected(tuple(map(_merged, given)), alike=False)


def _is_list(given: object) -> bool:
    return isinstance(given, list | tuple)


def _is_pair(given: Any) -> bool:
    return _is_list(given) and len(given) == 2 and all(type(number) is int for number in given)


def _merged(given: Sequence[Sequence[int]]) -> Spans:
    """These spans in order, joined if they overlap or touch; refuses what is no span."""
    found = list[tuple[int, int]]()
    for start, stop in sorted(map(tuple, given)):
        if not 0 <= start < stop <= MOST:
            raise ValueError(
                f"a span of protected tokens is (start, stop), the first token and the one after the last, counted "
                f"from 0, got ({start!s:.30}, {stop!s:.30})"
            )
        first, last = found.pop() if found and start <= found[-1][1] else (start, stop)
        found.append((first, max(last, stop)))
    return Spans(tuple(found))
