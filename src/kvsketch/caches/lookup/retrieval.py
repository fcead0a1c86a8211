"""Exact retrieval: the tokens that matter most, found by looking at all of them."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from kvsketch.attention import logits_of
from kvsketch.caches.core.checks import check_count
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.tokens import Seen
from kvsketch.caches.lookup.config import LookupConfig
from kvsketch.caches.lookup.store import Index, Lookup, Store


@dataclass(frozen=True, kw_only=True)
class Retrieval(LookupConfig):
    """Keeps everything and reads the tokens with the largest attention: the upper bound of looking few up.

    `top`: how many of them (256), or which share of the past (0.05). Queries of a group choose together, by their
    mean attention over the past. All keys are read to find these tokens, so nothing is saved.
    """

    name: ClassVar[str] = "retrieval"

    top: int | float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.top, float):
            check_count("top", self.top, least=1)
        elif not 0 < self.top <= 1:
            raise ValueError(f"top must be a number of tokens or a share of the past in (0, 1], got {self.top!r}")

    def new_method(self, layer: int) -> Lookup:
        return RetrievalLookup(self.top)


class RetrievalLookup(Lookup):
    """Looks among all tokens; nothing needs to be noted about them."""

    def __init__(self, top: int | float) -> None:
        self.top = top

    def note(self, seen: Seen) -> Int64[Tensor, "b h n t"]:
        return torch.zeros(*seen.keys.shape[:3], 1, dtype=torch.int64, device=seen.keys.device)

    def new_index(self) -> Index:
        return Largest(self.top)


class Largest(Index):
    """A query reads the tokens that get the largest attention from its group."""

    def __init__(self, top: int | float) -> None:
        self.top = top

    def find(self, store: Store, query: Query, asked: Tensor | None) -> Answer:
        def visible(start: int, stop: int) -> Bool[Tensor, "1 l q n"]:
            logits = logits_of(query.queries[:, :, start:stop], store.keys[None], query.scale, query.softcap)
            shares = torch.softmax(logits, 3).unflatten(2, (-1, stop - start)).mean(2)
            order = shares.argsort(dim=3, descending=True, stable=True)
            most = math.ceil(self.top * store.count) if isinstance(self.top, float) else self.top
            return torch.zeros_like(order, dtype=torch.bool).scatter_(3, order[..., :most], True)

        return store.read_where(query, visible)
