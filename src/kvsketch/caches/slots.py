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
        self.pairs, self.labels = Rows(dim=2), Rows(dim=2)  # a pair: a token's key, and its value behind it
        self.key_width = 0
        self.read: Float[Tensor, "b h"] | None = None  # tokens read, over all queries that looked up
        self.asked: Float[Tensor, "b h"] | None = None  # tokens that they could have read

    @property
    def count(self) -> int:
        """Tokens of every row."""
        return self.pairs.length

    @property
    def keys(self) -> Float[Tensor, "b h n d"]:
        """Those of all tokens; a view."""
        return self.pairs.view[..., : self.key_width]

    @property
    def values(self) -> Float[Tensor, "b h n e"]:
        """Those of all tokens; a view."""
        return self.pairs.view[..., self.key_width :]

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
        assert tokens.labels is not None, "tokens have labels before they leave the window"
        self.key_width = tokens.keys.shape[3]
        self.pairs.append_beside(tokens.keys, tokens.values)
        self.labels.append(tokens.labels)

    def attend(self, query: Float[Tensor, "b hg q d"], scale: float, softcap: float | None) -> Partial | None:
        """Attention over everything."""
        if self.empty:
            return None
        return weighted_attention(query, WeightedTokens(self.keys, self.values), scale, softcap=softcap)

    def count_entries(self) -> Int64[Tensor, "b h"] | None:
        if self.empty:
            return None
        return torch.full(self.keys.shape[:2], self.count, device=self.keys.device)

    def selectivity(self) -> Float[Tensor, "b h"] | None:
        return None if self.read is None or self.asked is None else self.read / self.asked.clamp_min(1)

    @property
    def nbytes(self) -> int:
        return storage_bytes([self.pairs.buffer, self.labels.buffer, self.read, self.asked])

    def tensors(self) -> dict[str, Tensor]:
        if self.empty:
            return {}
        widths = torch.full((len(self.keys), 1), self.key_width, device=self.keys.device)  # tensors are moved by rows
        found = {"pairs": self.pairs.view, "key_widths": widths, "labels": self.labels.view}
        if self.read is not None and self.asked is not None:
            found |= {"read": self.read, "asked": self.asked}
        return found

    def numbers(self) -> dict[str, list[int]]:
        return {}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, list[int]]) -> None:
        self.pairs, self.labels = Rows(dim=2), Rows(dim=2)
        self.read, self.asked = tensors.get("read"), tensors.get("asked")
        if tensors:
            if len(tensors["pairs"]) != len(tensors["key_widths"]) or tensors["labels"].dtype != torch.int64:
                raise ValueError("pairs, their widths and their labels are not of the same rows")
            self.check_labels(tensors["labels"])
            self.key_width = int(tensors["key_widths"][0])
            self.pairs.adopt(tensors["pairs"])
            self.labels.adopt(tensors["labels"])
            if tensors["labels"].shape[:3] != tensors["pairs"].shape[:3]:
                raise ValueError(f"labels {tuple(tensors['labels'].shape)} of {tuple(tensors['pairs'].shape)} pairs")
