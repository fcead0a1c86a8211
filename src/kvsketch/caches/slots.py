"""All tokens that left the window, side by side, for rows of a batch that hold as many."""

from abc import abstractmethod

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens
from kvsketch.caches.base import LeavingTokens
from kvsketch.caches.question import LookedUp, LookupPast, Question
from kvsketch.caches.storage import Rows, storage_bytes
from kvsketch.kernels.weighted_attention import weighted_attention


class SlotsPast(LookupPast):
    """A slot for every token, with its labels."""

    def __init__(self) -> None:
        self.keys, self.values, self.labels = Rows(dim=2), Rows(dim=2), Rows(dim=2)
        self.read: Float[Tensor, "b h"] | None = None  # tokens read, over all queries that looked up
        self.asked: Float[Tensor, "b h"] | None = None  # tokens that they could have read

    @property
    def count(self) -> int:
        """Tokens of every row."""
        return self.keys.length

    @property
    def empty(self) -> bool:
        return not self.count

    @abstractmethod
    def find(self, question: Question) -> LookedUp:
        """Attention of every query over the tokens that it looks at."""

    def look_up(self, question: Question) -> LookedUp:
        """What `find` finds, counted for the report."""
        found = self.find(question)
        if self.read is None or self.asked is None:
            self.read = torch.zeros(found.read.shape[:2], dtype=torch.float64, device=found.read.device)
            self.asked = torch.zeros_like(self.read)
        read, asked = found.read, torch.full_like(found.read, self.count)
        if question.ranks is not None:
            real = question.ranks[:, None] >= 0
            read, asked = read * real, asked * real
        self.read, self.asked = self.read + read.sum(2), self.asked + asked.sum(2)
        return found

    def write(self, tokens: LeavingTokens) -> None:
        assert tokens.labels is not None, "labels are made when tokens come"
        for held, new in zip(self._held, (tokens.keys, tokens.values, tokens.labels), strict=True):
            held.append(new)

    def attend(self, query: Float[Tensor, "b hg q d"], scale: float, softcap: float | None) -> Partial | None:
        """Attention over everything."""
        if self.empty:
            return None
        return weighted_attention(query, WeightedTokens(self.keys.view, self.values.view), scale, softcap=softcap)

    def count_entries(self) -> Int64[Tensor, "b h"] | None:
        if self.empty:
            return None
        keys = self.keys.view
        return torch.full(keys.shape[:2], self.count, device=keys.device)

    def selectivity(self) -> Float[Tensor, "b h"] | None:
        return None if self.read is None or self.asked is None else self.read / self.asked.clamp_min(1)

    @property
    def nbytes(self) -> int:
        return storage_bytes([*(rows.buffer for rows in self._held), self.read, self.asked])

    def tensors(self) -> dict[str, Tensor]:
        if self.empty:
            return {}
        found = {"keys": self.keys.view, "values": self.values.view, "labels": self.labels.view}
        if self.read is not None and self.asked is not None:
            found |= {"read": self.read, "asked": self.asked}
        return found

    def numbers(self) -> dict[str, list[int]]:
        return {}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, list[int]]) -> None:
        self.keys, self.values, self.labels = Rows(dim=2), Rows(dim=2), Rows(dim=2)
        self.read, self.asked = tensors.get("read"), tensors.get("asked")
        if tensors:
            for held, name in zip(self._held, ("keys", "values", "labels"), strict=True):
                held.adopt(tensors[name])

    @property
    def _held(self) -> tuple[Rows, Rows, Rows]:
        return self.keys, self.values, self.labels
