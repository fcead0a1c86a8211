"""SnapKV (Li et al. 2024, arXiv:2404.14469): what the last tokens of a prompt look at; and PyramidKV."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.caches.core.asking import MEAN
from kvsketch.caches.core.chooser import Chooser
from kvsketch.caches.core.shares import PYRAMID
from kvsketch.caches.forgetting.noted import Pooled, QueriesConfig


@dataclass(frozen=True, kw_only=True)
class SnapKV(QueriesConfig):
    """Keeps sinks, window and the tokens that the last queries of a prompt look at most, with their neighbours.

    A token's score is its mean weight over the last `observed` queries of a call (of a chunk, if a prompt is read in
    chunks; over all queries, if there are fewer) and over the query heads of its group, averaged with its neighbours',
    `pooled` tokens in all. For text that comes token by token the mean is over all queries while the token is in the
    window; the paper drops nothing of such text. `queries` has others asked: all of the prompt's ("context"), those of
    its second reading, or questions.
    """

    name: ClassVar[str] = "snapkv"
    noted: ClassVar[str] = MEAN

    window: int | float = 32

    def new_method(self, layer: int) -> Chooser:
        return Observed(self)


class Observed(Pooled):
    """A choice by the mean over neighbours that leave the window together."""

    def arriving(self, notes: Int64[Tensor, "*l n t"]) -> Float[Tensor, "*l n"]:
        return self.averaged(super().arriving(notes), zeros=True)


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """Keeps what snapkv keeps, more of it in the first layers than in the last (Cai et al. 2024, arXiv:2406.02069)."""

    name: ClassVar[str] = "pyramidkv"

    heads: str = PYRAMID
