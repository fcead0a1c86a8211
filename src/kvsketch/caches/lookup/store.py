"""The one store of methods that look tokens up: all tokens of a bundle of lanes, those with one label side by side.

    [ run | run | run | staging ]

New tokens wait in the staging, which every query reads in full; as soon as there are `staging` of them, they are sorted
in by label. The lengths of the runs are given by the digits, in base 32, of the number of stagings: 1,100 stagings are
runs of 1,024, 64 and 12. So there are few runs, of which a query reads long pieces; a token is moved tens of times in
its life, not at every step; and what lies where depends on how many tokens came, not on how they came.

A method says what a token's labels are (`note`), what queries look for (`ask`), and which index finds that.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.attention import WeightedTokens
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.buffers import Growing, marks_of, roomy, writable, written
from kvsketch.caches.core.config import BLOCK
from kvsketch.caches.core.method import Holding, Method
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.storage import listed_on, storage_bytes, with_prefix
from kvsketch.caches.core.tokens import Arriving, Seen
from kvsketch.kernels.indexed_attention.reference import MASK_AT_ONCE
from kvsketch.kernels.places import chosen
from kvsketch.kernels.sources import Choice, Entries, Segments, Staged
from kvsketch.kernels.weighted_attention.reference import attend_where

BASE = 32  # with base 4, 170,000 tokens are five runs, not two, and a step takes a twentieth longer
BEFORE = 4  # the base of earlier files, which do not name it


class Lookup(Method):
    """A method that looks tokens up: a labeller of keys, a router of queries, and an index of the store."""

    observes = frozenset({"read"})
    looks_up = True
    takes_notes = True

    @abstractmethod
    def note(self, seen: Seen) -> Int64[Tensor, "b h n t"]:
        """The labels of tokens, by which they are sorted: the first label decides the place."""

    @abstractmethod
    def new_index(self) -> "Index":
        """What finds the tokens that queries look for."""

    def new_holding(self, budget: Budget) -> "Store":
        return Store(self.new_index())


class Index(ABC):
    """What is known about the runs of a store; it decides which tokens a query reads."""

    staging: int | None = None  # tokens that wait until they are sorted in; None: nothing is sorted

    ready = True  # whether it matters what queries look for

    @abstractmethod
    def find(self, store: "Store", query: Query, asked: Tensor | None) -> Answer:
        """Attention of every query over the tokens that it looks at; the store has some."""

    def check(self, labels: Int64[Tensor, "l n t"]) -> None:  # noqa: B027
        """Refuse labels that no token can have."""

    def sort_in(self, store: "Store", start: int, stop: int) -> None:  # noqa: B027
        """Called before the tokens start…stop-1 are sorted in."""

    def sorted_in(self, store: "Store") -> None:  # noqa: B027
        """Called when runs have changed."""

    def marks(self) -> object:
        """Where all that `find` reads lies (`Holding.marks`); never the same if it uses numbers only Python knows."""
        return object()

    def tensors(self) -> dict[str, Tensor]:
        """What cannot be made again from the tokens."""
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `tensors` gave, once runs are known; refuse anything else."""
        if tensors:
            raise ValueError(f"tensors that are not known: {list(tensors)!s:.80}")

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return storage_bytes(self.tensors().values())


class Store(Holding):
    """A place for every token, with its labels."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.pairs, self.labels = Growing(dim=1), Growing(dim=1)  # a pair: a token's key, and its value after it
        self.key_width = 0
        self.runs: list[int] = []  # where each run begins
        self.sorted_to = 0  # where the staging begins
        # On the device: where the staging begins, how many tokens are in it, and how many there are in all.
        self.at: Int64[Tensor, " 3"] | None = None
        self.room = 0  # for how many tokens there has been room since steps were recorded
        self.open_pairs: Float[Tensor, "l n de"] | None = None  # while they are recorded: pairs, then empty places
        self.entries: Entries | None = None  # all tokens, as queries read them one after another
        # How many tokens queries read, and could have read; and the same of single queries, which is added later.
        self.counted: Float[Tensor, "l 2"] | None = None
        self.to_count = list[tuple[Int64[Tensor, "1 l 1"], int]]()

    @property
    def read_from(self) -> object:
        return self.entries

    @property
    def wants_asking(self) -> bool:
        return self.index.ready

    @property
    def count(self) -> int:
        """Tokens of every lane."""
        return self.pairs.length

    @property
    def keys(self) -> Float[Tensor, "l n d"]:
        """Keys of all tokens; a view."""
        return self._parted(self.pairs.view)[0]

    @property
    def values(self) -> Float[Tensor, "l n e"]:
        """Values of all tokens; a view."""
        return self._parted(self.pairs.view)[1]

    @property
    def staged(self) -> Staged:
        """Where the staging begins, and how many tokens are in it."""
        assert self.at is not None, "there are tokens"
        return Staged(self.sorted_to, self.count - self.sorted_to, self.at)

    # -- reading

    def answer(self, query: Query, asked: Tensor | None) -> Answer:
        """Attention over what the index finds, or over everything."""
        if query.in_full:
            return Answer(None, unread=((Entries(self.tokens()),),))
        return self.index.find(self, query, asked)

    def tokens(self) -> WeightedTokens:
        """All tokens, as one row whose heads are the lanes."""
        return WeightedTokens(*(x[None] for x in self._parted(self._pairs())))

    def _pairs(self) -> Float[Tensor, "l n de"]:
        """Each key with its value after it; while the store is open, with empty places after the last."""
        return self.pairs.view if self.open_pairs is None else self.open_pairs

    def _parted(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        return pairs[..., : self.key_width], pairs[..., self.key_width :]

    def read_places(self, query: Query, places: Segments | None) -> Answer:
        """Attention over these places of the runs, and over what waits in the staging."""
        runs = self.staged.runs(len(self.pairs.view), query.queries.shape[2])
        runs = runs if places is None else places.join(runs)
        return self.read_runs(runs, runs.rows)

    def read_runs(self, runs: Segments | Choice, read: Int64[Tensor, "1 l q"], *more: Entries) -> Answer:
        """Attention over these runs, in which each query reads `read` places, and over `more` entries."""
        if isinstance(runs, Choice):
            self.entries = self.entries or Entries(self.tokens(), pairs=self._pairs()[None])
            found = self.entries.by(runs)
        else:
            found = Entries(self.tokens(), segments=runs, pairs=self._pairs()[None])
        return Answer(None, read=read, unread=((found,), *((one,) for one in more)))

    def read_where(self, query: Query, visible: Callable[[int, int], Bool[Tensor, "1 l q n"]]) -> Answer:
        """Attention over the tokens that `visible` gives for queries start…stop-1, by a mask over all tokens.

        For comparisons: the numbers are those of a method that reads few tokens, the time is that of reading all.
        """
        read = list[Tensor]()

        def seen(start: int, stop: int) -> Tensor:
            found = visible(start, stop)
            read.append(found.sum(3))
            return found

        held = WeightedTokens(self.keys[None], self.values[None])  # as many as masks cover, also while this is open
        part = attend_where(query.queries, held, query.scale, seen, softcap=query.softcap, at_once=MASK_AT_ONCE)
        return Answer(part, read=torch.cat(read, 2))

    def observe(self, query: Query, read: Int64[Tensor, "1 l q"] | None, lse: Tensor | None) -> None:
        """Count for the report how many tokens were read, and how many could have been."""
        if read is None:
            return
        alone = read.shape[2] == 1 and not query.padded
        if alone and self.open_pairs is None and not torch.compiler.is_compiling():
            self.count_read(read)
            return
        assert self.at is not None, "they read something"
        by_query = read[0]
        asked: Tensor | int = by_query.shape[1]
        if query.padded:
            real = by_query >= 0
            by_query, asked = by_query * real, real.sum(1)
        # `at[2]` is a number on the device: it is another one when a step is replayed.
        self._add(by_query.sum(1), self.at[2] * asked)

    def count_read(self, read: Int64[Tensor, "1 l 1"]) -> None:
        """Count what a single query read."""
        self.to_count.append((read, self.count))
        if len(self.to_count) >= BLOCK:  # together: adding them one by one is many calls
            self._count()

    def _count(self) -> None:
        """Add to the counts what single queries read."""
        if waiting := list(self.to_count):
            read = torch.cat([read[0] for read, _ in waiting], 1).sum(1)
            del self.to_count[: len(waiting)]
            self._add(read, sum(count for _, count in waiting))

    def _add(self, read: Int64[Tensor, " l"], could: Int64[Tensor, " l"] | Int64[Tensor, ""] | int) -> None:
        before = read.new_zeros(len(read), 2, dtype=torch.float64) if self.counted is None else self.counted
        self.counted = writable(before)  # it is written to in place
        self.counted[:, 0].add_(read)
        self.counted[:, 1].add_(could)

    @property
    def reads(self) -> Float[Tensor, "l 2"] | None:
        """How many tokens queries read, and how many they could have read, up to now."""
        self._count()
        return self.counted

    def share_read(self) -> Float[Tensor, " l"] | None:
        return None if self.reads is None else self.reads[:, 0] / self.reads[:, 1].clamp_min(1)

    # -- writing

    def write(self, new: Arriving) -> None:
        assert new.notes is not None, "tokens have labels before they leave the window"
        self.key_width, self.entries = new.keys.shape[2], None
        self.pairs.append_beside(new.keys, new.values)
        self.labels.append(new.notes)
        if self.index.staging is not None:
            due = self.count // self.index.staging * self.index.staging
            if due > self.sorted_to:
                self._sort_in(due, self.index.staging)
        self._note_places()

    def _note_places(self) -> None:
        numbers = self.sorted_to, self.count - self.sorted_to, self.count
        self.at = written(self.at, listed_on(self.pairs.view.device, numbers))

    def _sort_in(self, stop: int, staging: int) -> None:
        """Sort tokens into runs up to `stop`; runs that are as they should be stay."""
        for start in range(self.sorted_to, stop, staging):
            self.index.sort_in(self, start, start + staging)
        before, wanted = (
            [*pairwise([*runs, to])] for runs, to in ((self.runs, self.sorted_to), (_wanted(stop, staging), stop))
        )
        for start, end in wanted:
            if (start, end) not in before:
                self._sort(start, end)
        self.runs, self.sorted_to = [start for start, _ in wanted], stop
        self.index.sorted_in(self)

    def _sort(self, start: int, stop: int) -> None:
        order = self.labels.view[:, start:stop, 0].sort(dim=1, stable=True).indices
        for held in (self.pairs, self.labels):  # not shared: tokens were just added to them, or they are copies
            held.view[:, start:stop] = chosen(held.view[:, start:stop], order)

    def labels_of_runs(self) -> Iterator[tuple[int, Int64[Tensor, "l n"]]]:
        """Every run: where it begins, and its labels."""
        for start, stop in pairwise([*self.runs, self.sorted_to]):
            yield start, self.labels.view[:, start:stop, 0].contiguous()

    # -- while steps are recorded

    def open(self, *, anew: bool) -> None:
        self.room = roomy(self.count, 0 if anew else self.room)
        self.open_pairs, self.entries = self.pairs.with_room(self.room, 0.0), None

    def close(self) -> None:
        self.open_pairs = self.entries = None

    def without_room(self) -> None:
        self.room, self.entries = 0, None
        self.pairs.without_room()

    def marks(self) -> object:
        return marks_of(self._pairs(), self.reads, self.at), self.index.marks()

    # -- state

    def count_entries(self) -> int:
        return self.count

    @property
    def nbytes(self) -> int:
        return storage_bytes([self.pairs.buffer, self.labels.buffer, self.reads, self.at]) + self.index.nbytes

    def tensors(self) -> dict[str, Tensor]:
        found = {"pairs": self.pairs.view, "labels": self.labels.view}
        found |= {} if self.reads is None else {"reads": self.reads}
        return found | {f"index.{name}": tensor for name, tensor in self.index.tensors().items()}

    def numbers(self) -> dict[str, Any]:
        return {"key_width": self.key_width, "base": BASE}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any], count: int) -> None:
        pairs, labels, self.counted = tensors["pairs"], tensors["labels"], tensors.get("reads")
        self.key_width, self.to_count, self.entries = numbers["key_width"], [], None
        shaped = pairs.ndim == labels.ndim == 3 and labels.shape[:2] == pairs.shape[:2] and pairs.shape[1] == count
        if not shaped or labels.dtype != torch.int64 or not 0 < self.key_width < pairs.shape[2]:
            raise ValueError(f"labels {tuple(labels.shape)} of {tuple(pairs.shape)} pairs, {count} tokens")
        if self.counted is not None and self.counted.shape != (len(pairs), 2):
            raise ValueError(f"what was read of shape {tuple(self.counted.shape)} in {len(pairs)} lanes")
        self.index.check(labels)
        self.pairs, self.labels = Growing(1, pairs), Growing(1, labels)
        if self.index.staging is not None:
            self.sorted_to = count // self.index.staging * self.index.staging
            self.runs = _wanted(self.sorted_to, self.index.staging)
        base = numbers.get("base", BEFORE)
        if base not in (BASE, BEFORE):
            raise ValueError(f"runs cut by {base!r:.40}, not by {BASE} or {BEFORE}")
        if self.runs and base != BASE:  # a file of another version; its tensors may be shared
            self.pairs, self.labels = Growing(1, pairs.clone()), Growing(1, labels.clone())
            for start, stop in pairwise([*self.runs, self.sorted_to]):
                self._sort(start, stop)
        if self.runs:
            self.index.sorted_in(self)
        self.index.restore(with_prefix(tensors, "index."))
        self._note_places()


def _wanted(stop: int, staging: int) -> list[int]:
    """Where the runs of `stop` tokens begin: one run for every digit that is not 0."""
    starts, count, digit = [], stop // staging, 1
    while digit <= count:
        if count // digit % BASE:
            starts.append(count // (digit * BASE) * digit * BASE * staging)
        digit *= BASE
    return starts[::-1]
