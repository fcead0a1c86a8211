"""What a query will read, and what chooses it, described beforehand: so one kernel can read all of it in one call."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.attention import WeightedTokens


@dataclass(frozen=True)
class Segments:
    """Runs of rows for every row of the batch, KV head and query. Runs may be empty; a query's do not overlap."""

    begin: Int64[Tensor, "b h q s"]
    length: Int64[Tensor, "b h q s"]

    @property
    def rows(self) -> Int64[Tensor, "b h q"]:
        """How many rows each query reads."""
        return self.length.sum(-1)

    def join(self, other: "Segments") -> "Segments":
        """These runs and the other ones."""
        return Segments(torch.cat([self.begin, other.begin], -1), torch.cat([self.length, other.length], -1))

    def part(self, start: int, stop: int) -> "Segments":
        """The runs of queries start…stop-1."""
        return Segments(self.begin[:, :, start:stop], self.length[:, :, start:stop])

    def mask(self, count: int) -> Bool[Tensor, "b h q {count}"]:
        """Which of `count` rows each query reads."""
        steps = self.begin.new_zeros(*self.begin.shape[:3], count + 1)
        ones = (self.length > 0).long()
        steps.scatter_add_(3, self.begin, ones)
        steps.scatter_add_(3, self.begin + self.length, -ones)
        return steps.cumsum(3)[..., :count] > 0


@dataclass(frozen=True)
class Choice:
    """Runs that a kernel chooses when it reads them; `made` chooses them at once, for other ways of reading."""

    made: Callable[[], Segments]
    asked: Any  # what that kernel chooses by
    tables: tuple[Tensor, ...] = ()  # tensors whose addresses are in `asked`


@dataclass(frozen=True)
class Entries:
    """Entries of some KV heads of some rows, and which of them are read: all, or those of `segments` or of a `choice`.

    `lanes` says which KV heads, counted row by row; None: all of the batch, in order. `pairs`: each key followed by its
    value, where they lie so in memory.
    """

    tokens: WeightedTokens
    lanes: Int64[Tensor, " l"] | None = None
    segments: Segments | None = None
    pairs: Float[Tensor, "b h n de"] | None = None
    choice: Choice | None = None
    noted: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)  # by a kernel for its next call

    def __reduce__(self) -> tuple[Any, ...]:
        known = self.chosen()  # a copy has other addresses
        return Entries, (known.tokens, known.lanes, known.segments, known.pairs)

    def by(self, choice: Choice) -> "Entries":
        """Those of all entries that a choice picks; the note of where they lie stays."""
        return Entries(self.tokens, pairs=self.pairs, choice=choice, noted=self.noted)

    def chosen(self) -> "Entries":
        """The same with its runs chosen now."""
        if self.choice is None:
            return self
        return Entries(self.tokens, self.lanes, self.choice.made(), self.pairs)


Source = tuple[Entries, ...]  # no lane is in two of them
Layer = tuple[Float[Tensor, "h _ _"], Float[Tensor, "h 1 _"]]  # of a classifier: weights and biases of every head


@dataclass(frozen=True, eq=False)
class Classifier:
    """The attention that queries expect in each bucket: two layers with ReLU between them, or the last one alone."""

    inner: Layer | None
    last: Layer
    noted: dict[str, Any] = field(default_factory=dict, init=False, repr=False)  # by a kernel, for its next call

    def __reduce__(self) -> tuple[Any, ...]:
        return Classifier, (self.inner, self.last)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of all layers."""
        return (*(self.inner or ()), *self.last)


class Staged(NamedTuple):
    """Entries that wait: where they begin, how many they are, and both on the device, perhaps with more after them."""

    begin: int
    number: int
    at: Int64[Tensor, " n"]

    @classmethod
    def on(cls, device: torch.device, begin: int, number: int) -> "Staged":
        """So many entries, on this device."""
        return cls(begin, number, torch.tensor([begin, number], device=device))

    def runs(self, lanes: int, queries: int) -> Segments:
        """All of them, as one run for every query of so many lanes."""
        return Segments(*(number.repeat(1, lanes, queries, 1) for number in self.at[:2]))


@dataclass(frozen=True)
class Limits:
    """How many buckets a query visits; `per_token`: the buckets with the highest scores per token."""

    probes: int
    visit: int | float | None = None
    mass: float | None = None
    per_token: bool = False
