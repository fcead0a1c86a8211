"""KVzip (Kim et al. 2025, arXiv:2505.23416): what a model looks at when it reads the prompt a second time."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.caches.core.asking import MAX, SECOND
from kvsketch.caches.core.chooser import Chooser
from kvsketch.caches.core.shares import THRESHOLD
from kvsketch.caches.forgetting.noted import Pooled, QueriesConfig

TELLS = 0.7  # a weight below that says how much a token matters


@dataclass(frozen=True, kw_only=True)
class KVzip(QueriesConfig):
    """Keeps sinks, window and the tokens that are looked at when the model reads the prompt a second time.

    A token's score is the largest weight that it gets from any query of the second reading, which follows the first,
    out of all that this query sees; for later text, from any query while the token is in the window. Deviations from
    the paper: the text is read again as it is, in pieces, without a prompt that asks to repeat it. And a weight of
    TELLS or more, which most tokens get where a text is copied word by word, says no more than that: such tokens are
    told apart by the mean over neighbours, `pooled` tokens in all (1: as published). `queries` has others asked:
    questions, those given to `make_cache`; or the prompt's own, all of them ("context") or the last `observed`
    ("window").
    """

    name: ClassVar[str] = "kvzip"
    noted: ClassVar[str] = MAX

    heads: str = THRESHOLD
    queries: str = SECOND

    def new_method(self, layer: int) -> Chooser:
        return LookedAt(self)


class LookedAt(Pooled):
    """A choice by the largest weight; where that does not tell tokens apart, by the mean with their neighbours'."""

    def arriving(self, notes: Int64[Tensor, "*l n t"]) -> Float[Tensor, "*l n"]:
        own = super().arriving(notes)
        if self.pooled == 1:
            return own
        return own.where(own < TELLS, TELLS + (1 - TELLS) * self.averaged(own, zeros=False))
