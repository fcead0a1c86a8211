"""Methods that keep the tokens with the best scores, each standing for itself."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.chooser import Chooser, Entries, Kept, check_vectors
from kvsketch.caches.core.config import WindowedConfig
from kvsketch.caches.core.tokens import Arriving
from kvsketch.kernels.distances import rounded


@dataclass(frozen=True, kw_only=True)
class ScoredConfig(WindowedConfig):
    """The window is short, and leaves in short blocks, for which there is room at any time."""

    leaving: ClassVar[int] = 8

    window: int = 16

    def floor(self) -> int:
        return self.exact_entries()

    def least_entries(self) -> int:
        return self.exact_entries()

    def room(self, budget: Budget, count: int) -> int:
        """How many entries of the past the budget leaves when `count` tokens have left the window."""
        exact = self.exact_entries()
        return budget.entries(count + exact) - exact


class Best(Chooser):
    """The entries with the largest scores; of equal ones the earlier."""

    bits: ClassVar[int] = 24  # of a score that are compared: the order in which sums were taken must not decide

    def __init__(self, config: ScoredConfig) -> None:
        self.config = config

    @abstractmethod
    def scores(self, pool: Entries, per_lane: dict[str, Tensor]) -> Float[Tensor, "l n"]:
        """Of all entries there are to choose from, in float64; `per_lane` is as it is now."""

    def lanes_after(self, held: Entries, new: Arriving) -> dict[str, Tensor]:
        """What is known of each lane once these tokens have come."""
        return {}

    def choose(self, held: Entries, new: Arriving, budget: Budget) -> Kept:
        pool, per_lane = held.with_new(new), self.lanes_after(held, new)
        room = self.config.room(budget, new.after)
        if pool.count <= room:
            return Kept(None, held.count, per_lane=per_lane)
        order = rounded(self.scores(pool, per_lane), self.bits).sort(dim=1, descending=True, stable=True).indices
        return Kept(order[:, :room].sort(dim=1).values, pool=pool, per_lane=per_lane)

    def check(self, held: Entries, count: int, budget: Budget) -> None:
        most = min(count, self.config.room(budget, count))
        if held.count > most:
            raise ValueError(f"{held.count} entries of {count} tokens, and there is room for {most}")
        check_vectors(held)
