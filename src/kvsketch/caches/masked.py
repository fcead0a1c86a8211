"""A past in which every query says token by token what it reads: by definition, over all of them, with a mask.

For comparisons: the numbers are those of a method that reads few tokens, the time is that of reading all.
"""

from abc import abstractmethod

import torch
from jaxtyping import Bool
from torch import Tensor

from kvsketch.attention import WeightedTokens
from kvsketch.caches.question import LookedUp, Question
from kvsketch.caches.slots import SlotsPast
from kvsketch.kernels.indexed_attention.reference import MASK_AT_ONCE
from kvsketch.kernels.weighted_attention.reference import attend_where


class MaskedPast(SlotsPast):
    """Slots in the order in which they came."""

    @abstractmethod
    def visible(self, question: Question) -> Bool[Tensor, "b h q n"]:
        """The slots that the queries of a group read together."""

    def find(self, question: Question) -> LookedUp:
        read = list[Tensor]()

        def seen(start: int, stop: int) -> Tensor:
            visible = self.visible(question.part(start, stop))
            read.append(visible.sum(3))
            return visible

        tokens = WeightedTokens(self.keys, self.values)
        softcap = question.softcap
        part = attend_where(question.queries, tokens, question.scale, seen, softcap=softcap, at_once=MASK_AT_ONCE)
        return LookedUp(part, torch.cat(read, 2))
