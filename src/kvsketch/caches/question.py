"""What a query asks of a past that looks things up, and what it is told."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.attention import Partial
from kvsketch.caches.base import Past


@dataclass(frozen=True)
class Unrotated:
    """Queries and keys of a call as they were before rotation."""

    queries: Float[Tensor, "b hg q d"]
    keys: Float[Tensor, "b h q d"]

    def part(self, start: int, stop: int) -> "Unrotated":
        """Tokens start…stop-1."""
        return Unrotated(self.queries[:, :, start:stop], self.keys[:, :, start:stop])


@dataclass(frozen=True)
class Arriving:
    """Tokens that come: by what they may be found later."""

    keys: Float[Tensor, "b h n d"]
    unrotated: Float[Tensor, "b h n d"] | None
    ranks: Int64[Tensor, "b n"]

    @classmethod
    def joined(cls, each: Sequence["Arriving"]) -> "Arriving":
        """Those that came one after another."""
        keys, ranks = torch.cat([tokens.keys for tokens in each], 2), torch.cat([tokens.ranks for tokens in each], 1)
        unrotated = [tokens.unrotated for tokens in each if tokens.unrotated is not None]
        if unrotated and len(unrotated) < len(each):
            raise ValueError(f"keys before rotation came with {len(unrotated)} of {len(each)} tokens, not with all")
        return cls(keys, torch.cat(unrotated, 2) if unrotated else None, ranks)


@dataclass(frozen=True)
class Question:
    """Queries that look something up: as attention takes them, and before rotation where the method asks for that."""

    queries: Float[Tensor, "b hg q d"]
    unrotated: Float[Tensor, "b hg q d"] | None
    scale: float
    softcap: float | None = None
    ranks: Int64[Tensor, "b q"] | None = None  # how many tokens of its row came before; -1: padding asks

    def part(self, start: int, stop: int) -> "Question":
        """Queries start…stop-1."""
        unrotated = None if self.unrotated is None else self.unrotated[:, :, start:stop]
        ranks = None if self.ranks is None else self.ranks[:, start:stop]
        return Question(self.queries[:, :, start:stop], unrotated, self.scale, self.softcap, ranks)

    def of_rows(self, rows: list[int]) -> "Question":
        """What these rows of the batch ask."""
        unrotated = None if self.unrotated is None else self.unrotated[rows]
        ranks = None if self.ranks is None else self.ranks[rows]
        return Question(self.queries[rows], unrotated, self.scale, self.softcap, ranks)


@dataclass(frozen=True)
class LookedUp:
    """What was found: attention over the tokens read, how many those were, and an estimate of the others' if made."""

    part: Partial
    read: Int64[Tensor, "b h q"]
    rest: Partial | None = None


class LookupPast(Past):
    """A past of which every query reads a part; `attend` is over all of it."""

    @abstractmethod
    def label(self, arriving: Arriving) -> Int64[Tensor, "b h n t"]:
        """What to note about tokens that come, so that they can be found; it comes back with them in `write`."""

    def check_labels(self, labels: Int64[Tensor, "b h n t"]) -> None:
        """Refuse what `label` cannot have given."""

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Whether no token was written yet."""

    @abstractmethod
    def look_up(self, question: Question) -> LookedUp:
        """Attention of every query over the tokens that it looks at."""

    @abstractmethod
    def selectivity(self) -> Float[Tensor, "b h"] | None:
        """The share of what had left the window that queries read, over all that looked up; None if none did."""
