"""Exact retrieval: the tokens that matter most, found by looking at all of them."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from kvsketch.attention import logits_of
from kvsketch.caches.base import check_count
from kvsketch.caches.lookup import LookupConfig
from kvsketch.caches.masked import MaskedPast
from kvsketch.caches.question import Arriving, Question


@dataclass(frozen=True, kw_only=True)
class Retrieval(LookupConfig):
    """Keeps everything and reads the tokens with the largest attention: the upper bound of looking few up.

    `top`: so many of them (256), or such a share of the past (0.05). Queries of a group choose together, by their
    mean attention over the past. To find them all keys are read, so nothing is saved.
    """

    name: ClassVar[str] = "retrieval"

    top: int | float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.top, float):
            check_count("top", self.top, least=1)
        elif not 0 < self.top <= 1:
            raise ValueError(f"top must be a number of tokens or a share of the past in (0, 1], got {self.top!r}")

    def slots(self, layer: int) -> MaskedPast:
        return RetrievalPast(self)


class RetrievalPast(MaskedPast):
    """All tokens; a query reads those of which its group has the largest attention."""

    def __init__(self, config: Retrieval) -> None:
        super().__init__()
        self.config = config

    def label(self, arriving: Arriving) -> Int64[Tensor, "b h n t"]:
        return torch.zeros(*arriving.keys.shape[:3], 1, dtype=torch.int64, device=arriving.keys.device)

    def visible(self, question: Question) -> Bool[Tensor, "b h q n"]:
        logits = logits_of(question.queries, self.keys, question.scale, question.softcap)
        shares = torch.softmax(logits, 3).unflatten(2, (-1, question.queries.shape[2])).mean(2)
        order = shares.argsort(dim=3, descending=True, stable=True)
        top = self.config.top
        most = math.ceil(top * self.count) if isinstance(top, float) else top
        return torch.zeros_like(order, dtype=torch.bool).scatter_(3, order[..., :most], True)
