"""Tokens at random: what any way to look tokens up has to beat, and what Saap's Figure 5 begins with."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from kvsketch.algorithms.draws import uniforms
from kvsketch.caches.base import check_count, check_seed
from kvsketch.caches.lookup import LookupConfig
from kvsketch.caches.masked import MaskedPast
from kvsketch.caches.question import Arriving, Question


@dataclass(frozen=True, kw_only=True)
class RandomTokens(LookupConfig):
    """Keeps everything and reads `top` tokens at random, other ones for every query and KV head."""

    name: ClassVar[str] = "random_tokens"

    top: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("top", self.top, least=1)
        check_seed(self.seed)

    def slots(self, layer: int) -> MaskedPast:
        return RandomTokensPast(self, layer)


class RandomTokensPast(MaskedPast):
    """All tokens, each with its rank."""

    def __init__(self, config: RandomTokens, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer

    def label(self, arriving: Arriving) -> Int64[Tensor, "b h n t"]:
        return arriving.ranks[:, None, :, None].expand(-1, arriving.keys.shape[1], -1, -1).contiguous()

    def visible(self, question: Question) -> Bool[Tensor, "b h q n"]:
        ranks = self.labels.view[:, :, None, :, 0]
        heads, queries = ranks.shape[1], question.queries.shape[2]
        head, query = (torch.arange(size, device=ranks.device) for size in (heads, queries))
        drawn = uniforms(self.config.seed, self.layer, head[:, None, None], query[:, None], ranks)
        least = drawn.kthvalue(min(self.config.top, drawn.shape[3]), dim=3, keepdim=True).values
        return drawn <= least
