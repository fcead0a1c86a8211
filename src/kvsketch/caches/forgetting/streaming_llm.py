"""StreamingLLM (Xiao et al. 2023, arXiv:2309.17453): the first tokens and the last, nothing between."""

from dataclasses import dataclass
from typing import ClassVar

from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.config import BLOCK, BudgetedConfig


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(BudgetedConfig):
    """Keeps the first tokens and the most recent ones, and drops the rest.

    Deviation from the paper: tokens keep the positions they had; the paper renumbers those it holds.
    """

    name: ClassVar[str] = "streaming_llm"
    window_by_budget: ClassVar[bool] = True

    def floor(self) -> int:
        return self.sinks + 1

    def window_size(self, budget: Budget, count: int) -> int | None:
        recent = budget.entries(count) - self.sinks
        return recent if budget.fixed is None else recent - BLOCK  # the window may run over by one block

    def new_method(self, layer: int) -> None:
        """Nothing remains of what leaves the window."""
