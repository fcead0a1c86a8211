"""A past in which every query says token by token what it reads: by definition, over all of them, with a mask.

For comparisons: the numbers are those of a method that reads few tokens, the time is that of reading all.
"""

from abc import abstractmethod

import torch
from jaxtyping import Bool
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens, weighted_attention
from kvsketch.caches.question import LookedUp, Question
from kvsketch.caches.slots import SlotsPast

MASK_AT_ONCE = 1 << 24  # elements of a mask


class MaskedPast(SlotsPast):
    """Slots in the order in which they came."""

    @abstractmethod
    def visible(self, question: Question) -> Bool[Tensor, "b h q n"]:
        """The slots that the queries of a group read together."""

    def find(self, question: Question) -> LookedUp:
        tokens = WeightedTokens(self.keys.view, self.values.view)
        step = max(1, MASK_AT_ONCE // (question.queries[:, :, 0, 0].numel() * self.count))
        parts, read = list[Partial](), list[Tensor]()
        for start in range(0, question.queries.shape[2], step):
            some = question.part(start, start + step)
            seen = self.visible(some)
            part = weighted_attention(some.queries, tokens, some.scale, visible=seen, softcap=some.softcap)
            parts.append(part)
            read.append(seen.sum(3))
        joined = Partial(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))
        return LookedUp(joined, torch.cat(read, 2))
