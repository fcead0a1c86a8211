"""Tokens on their way: as they come, as they leave the window, and as they reach the lanes that hold them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.caches.core.storage import listed_on


@dataclass(frozen=True)
class Ahead:
    """How the tokens that follow a call's tokens will be rotated.

    `mean(first, count)` is the mean rotation of `count` positions from `first` on: row i is what becomes of the i-th
    unit vector.
    """

    positions: Int64[Tensor, "b q"]  # of the call's tokens
    mean: Callable[[int, int], Float[Tensor, "d d"]]


class Unrotated(NamedTuple):
    """Queries and keys of a call as they were before rotation; without `ahead` nothing is rotated."""

    queries: Float[Tensor, "b hg q d"]
    keys: Float[Tensor, "b h q d"]
    ahead: Ahead | None = None  # where the method asks for it

    def part(self, start: int, stop: int) -> "Unrotated":
        """Tokens start…stop-1."""
        ahead = self.ahead
        ahead = None if ahead is None else replace(ahead, positions=ahead.positions[:, start:stop])
        return Unrotated(self.queries[:, :, start:stop], self.keys[:, :, start:stop], ahead)


class NewTokens(NamedTuple):
    """Tokens of one call: keys and values, and which of them are real (None: all)."""

    keys: Float[Tensor, "b h q d"]
    values: Float[Tensor, "b h q e"]
    valid: Bool[Tensor, "b q"] | None = None
    unrotated: Unrotated | None = None  # where the method asks for it

    def part(self, start: int, stop: int) -> "NewTokens":
        """Tokens start…stop-1."""
        valid = None if self.valid is None else self.valid[:, start:stop]
        unrotated = None if self.unrotated is None else self.unrotated.part(start, stop)
        return NewTokens(self.keys[:, :, start:stop], self.values[:, :, start:stop], valid, unrotated)


def without_history(x: Tensor) -> Tensor:
    """The tensor without its autograd history: that would keep activations alive."""
    return x.detach() if x.requires_grad else x


def ranks_of_latest(new: NewTokens, lengths: Sequence[int]) -> Int64[Tensor, "b q"]:
    """How many tokens of its row come before each token of a call, whose tokens are last in rows of these lengths."""
    last = listed_on(new.keys.device, lengths)[:, None]
    if new.valid is None:
        return last + torch.arange(-new.keys.shape[2], 0, device=new.keys.device)
    behind = new.valid.flip(1).cumsum(1).flip(1)  # how many tokens there are from each one on
    return (last - behind).masked_fill(~new.valid, -1)


@dataclass(frozen=True)
class Seen:
    """Tokens that a method may note something about: their keys, and how many tokens of its row came before each.

    If the method looks ahead, also their queries before rotation, and how later tokens will be rotated.
    """

    keys: Float[Tensor, "b h n d"]
    unrotated: Float[Tensor, "b h n d"] | None
    ranks: Int64[Tensor, "b n"]
    queries: Float[Tensor, "b hg n d"] | None = None
    ahead: Ahead | None = None

    @classmethod
    def of(cls, new: NewTokens, ranks: Int64[Tensor, "b n"], *, ahead: bool) -> "Seen":
        """A call's tokens, without their autograd history; `ahead`: the method looks ahead."""
        keys, found = without_history(new.keys), new.unrotated
        if found is None:
            return cls(keys, None, ranks)
        asked = (without_history(found.queries), found.ahead) if ahead else ()
        return cls(keys, without_history(found.keys), ranks, *asked)

    @classmethod
    def joined(cls, each: Sequence["Seen"]) -> "Seen":
        """Tokens that came one after another, as one."""
        keys, ranks = torch.cat([tokens.keys for tokens in each], 2), torch.cat([tokens.ranks for tokens in each], 1)
        unrotated = [tokens.unrotated for tokens in each if tokens.unrotated is not None]
        queries = [tokens.queries for tokens in each if tokens.queries is not None]
        if unrotated and len(unrotated) < len(each):
            raise ValueError(f"keys before rotation came with {len(unrotated)} of {len(each)} tokens, not with all")
        ahead = each[-1].ahead
        if ahead is not None:
            positions = torch.cat([tokens.ahead.positions for tokens in each if tokens.ahead is not None], 1)
            ahead = replace(ahead, positions=positions)
        before, asked = (torch.cat(parts, 2) if parts else None for parts in (unrotated, queries))
        return cls(keys, before, ranks, asked, ahead)


@dataclass(frozen=True)
class Columns:
    """Tokens side by side, with their ranks: how many tokens of their row came before them.

    Rows of unequal lengths share one buffer, so a column may belong to one row and not to another: there its rank is
    -1.
    """

    keys: Float[Tensor, "b h n d"]
    values: Float[Tensor, "b h n e"]
    ranks: Int64[Tensor, "b n"]
    notes: Int64[Tensor, "b h n t"] | None = None  # what the method noted about them, if it does

    @property
    def count(self) -> int:
        """Number of columns."""
        return self.ranks.shape[1]

    def part(self, start: int, stop: int) -> "Columns":
        """Columns start…stop-1."""
        notes = None if self.notes is None else self.notes[:, :, start:stop]
        return Columns(self.keys[:, :, start:stop], self.values[:, :, start:stop], self.ranks[:, start:stop], notes)

    def select(self, index: Int64[Tensor, " m"]) -> "Columns":
        """The columns with these numbers."""
        keys, values = self.keys.index_select(2, index), self.values.index_select(2, index)
        notes = None if self.notes is None else self.notes.index_select(2, index)
        return Columns(keys, values, self.ranks.index_select(1, index), notes)


@dataclass(frozen=True)
class Arriving:
    """Tokens that reach the lanes of a bundle, in order: every lane gets the same number, and none is padding."""

    keys: Float[Tensor, "l n d"]
    values: Float[Tensor, "l n e"]
    before: int  # tokens that came to each lane earlier
    heads_on: Callable[[torch.device], Int64[Tensor, " l"]]  # the KV head of each lane: few methods ask for it
    notes: Int64[Tensor, "l n t"] | None = None
    scores: Float[Tensor, "l n"] | None = None  # what the method has made of the notes, if it has
    few: bool = False  # the call that pushed these out of the window had a few tokens: neither one nor many

    @property
    def count(self) -> int:
        """Tokens of each lane."""
        return self.keys.shape[1]

    @property
    def heads(self) -> Int64[Tensor, " l"]:
        """The KV head of each lane."""
        return self.heads_on(self.keys.device)

    @property
    def after(self) -> int:
        """Tokens that have come to each lane, these included."""
        return self.before + self.count

    @property
    def ranks(self) -> Int64[Tensor, " n"]:
        """How many tokens of its lane came before each."""
        return torch.arange(self.before, self.after, device=self.keys.device)

    def part(self, start: int, stop: int) -> "Arriving":
        """Tokens start…stop-1."""
        notes, scores = (None if x is None else x[:, start:stop] for x in (self.notes, self.scores))
        keys, values = self.keys[:, start:stop], self.values[:, start:stop]
        return Arriving(keys, values, self.before + start, self.heads_on, notes, scores, self.few)


def chunks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Bounds of chunks of `size` tokens, the first one shorter if need be.

    Chunks are counted from the end, where the rows of a left-padded batch agree: each row is cut as if it were alone.
    """
    first = count % size or size
    yield 0, min(first, count)
    for start in range(first, count, size):
        yield start, start + size
