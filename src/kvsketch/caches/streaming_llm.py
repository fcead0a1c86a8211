"""StreamingLLM (Xiao et al. 2023, arXiv:2309.17453): the first tokens and the last, nothing between."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.attention import Partial
from kvsketch.caches.base import BLOCK, BudgetedConfig, LeavingTokens, Past
from kvsketch.caches.budget import Budget


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(BudgetedConfig):
    """Keeps the first tokens and the most recent ones, and drops the rest.

    Deviation from the paper: tokens keep the positions they had; the paper renumbers those it holds.
    """

    name: ClassVar[str] = "streaming_llm"

    def least_entries(self) -> int:
        return self.sinks + BLOCK + 1

    def window_size(self, budget: Budget, count: int) -> int | None:
        recent = budget.entries(count) - self.sinks
        return recent if budget.fixed is None else recent - BLOCK  # the window may run over by one block

    def new_past(self, budget: Budget, layer: int) -> Past:
        return Nothing()


class Nothing(Past):
    """Drops what it is given."""

    def write(self, tokens: LeavingTokens) -> None:
        """Drop the tokens."""

    def attend(self, query: Float[Tensor, "b hg q d"], scale: float, softcap: float | None) -> Partial | None:
        return None

    def count_entries(self) -> Int64[Tensor, "b h"] | None:
        return None

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def numbers(self) -> dict[str, list[int]]:
        return {}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, list[int]]) -> None:
        """There is nothing to take back."""
