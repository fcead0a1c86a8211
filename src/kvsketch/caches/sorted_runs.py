"""A past whose slots are sorted by label, so that what has one label lies side by side.

    [ run | run | run | staging ]

New tokens wait in the staging, which every query reads in full; as soon as there are `staging` of them they are sorted
in. The runs are as long as the digits of the number of stagings say, written in base 4: 27 of them are 16 + 8 + 3. So
there are few runs, a token is moved a few times in its life and not at every step, and what lies where depends on how
many tokens came, not on how.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Int64
from torch import Tensor

from kvsketch.caches.base import LeavingTokens, check_count
from kvsketch.caches.lookup import LookupConfig
from kvsketch.caches.question import LookedUp, Question
from kvsketch.caches.slots import SlotsPast
from kvsketch.caches.storage import chosen
from kvsketch.kernels.indexed_attention import Segments, indexed_attention

BASE = 4


@dataclass(frozen=True, kw_only=True)
class SortedConfig(LookupConfig):
    """`staging`: how many tokens wait until they are sorted in; every query reads those that wait."""

    staging: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("staging", self.staging, least=1)


class SortedPast(SlotsPast):
    """Slots in runs, each sorted by the first label."""

    def __init__(self, staging: int) -> None:
        super().__init__()
        self.staging = staging
        self.runs: list[int] = []  # where each run begins
        self.sorted_to = 0  # where the staging begins

    def read_places(self, question: Question, places: Segments | None) -> LookedUp:
        """Attention over these places of the runs, and over what waits in the staging."""
        segments = self._waiting(question)
        if places is not None:
            segments = places.join(segments)
        part = indexed_attention(question.queries, self.pairs.view, segments, question.scale, softcap=question.softcap)
        return LookedUp(part, segments.rows)

    def _waiting(self, question: Question) -> Segments:
        """The tokens in the staging, for every query."""
        shape = (*self.keys.shape[:2], question.queries.shape[2], 1)
        begin = torch.full(shape, self.sorted_to, device=question.queries.device)
        return Segments(begin, torch.full_like(begin, self.count - self.sorted_to))

    def write(self, tokens: LeavingTokens) -> None:
        super().write(tokens)
        due = self.count // self.staging * self.staging
        if due > self.sorted_to:
            self._sort_in(due)

    def _sort_in(self, stop: int) -> None:
        """Have runs up to here; those that are as they should be stay."""
        for start in range(self.sorted_to, stop, self.staging):
            self.count_in(start, start + self.staging)
        before, wanted = (
            [*pairwise([*runs, to])] for runs, to in ((self.runs, self.sorted_to), (self._wanted(stop), stop))
        )
        for start, end in wanted:
            if (start, end) not in before:
                self._sort(start, end)
        self.runs, self.sorted_to = [start for start, _ in wanted], stop
        self.sorted_in()

    def _wanted(self, stop: int) -> list[int]:
        """Where the runs of so many tokens begin: one for every digit that is not 0."""
        starts, count, digit = [], stop // self.staging, 1
        while digit <= count:
            if count // digit % BASE:
                starts.append(count // (digit * BASE) * digit * BASE * self.staging)
            digit *= BASE
        return starts[::-1]

    def _sort(self, start: int, stop: int) -> None:
        order = self.labels.view[:, :, start:stop, 0].sort(dim=2, stable=True).indices
        for held in (self.pairs, self.labels):
            held.make_writable()
            held.view[:, :, start:stop] = chosen(held.view[:, :, start:stop], order)

    def count_in(self, start: int, stop: int) -> None:
        """Called before the tokens start…stop-1 are sorted in."""

    def sorted_in(self) -> None:
        """Called when runs have changed."""

    def labels_of_runs(self) -> Iterator[tuple[int, Int64[Tensor, "b h n"]]]:
        """Where every run begins, and its labels."""
        for start, stop in pairwise([*self.runs, self.sorted_to]):
            yield start, self.labels.view[:, :, start:stop, 0].contiguous()

    def tensors(self) -> dict[str, Tensor]:
        found = super().tensors()
        if found:
            runs = torch.tensor([*self.runs, self.sorted_to], device=found["labels"].device)
            found["runs"] = runs.expand(len(found["labels"]), -1)  # the same for every row: tensors are moved by rows
        return found

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, list[int]]) -> None:
        super().restore(tensors, numbers)
        *self.runs, self.sorted_to = tensors["runs"][0].tolist() if tensors else [0]
        if self.runs != self._wanted(self.sorted_to) or self.sorted_to != self.count // self.staging * self.staging:
            raise ValueError(f"runs of {self.count} tokens that begin at {self.runs!s:.60} and end at {self.sorted_to}")
        if self.runs:
            self.sorted_in()
