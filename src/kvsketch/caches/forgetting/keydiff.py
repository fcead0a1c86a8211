"""KeyDiff (Park et al. 2025, arXiv:2504.15364): the keys that are least like all others."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.chooser import Chooser, Held, Pool, check_vectors
from kvsketch.caches.core.tokens import Arriving
from kvsketch.caches.forgetting.scored import Best, ScoredConfig
from kvsketch.kernels.directions import sum_of_directions, towards


@dataclass(frozen=True, kw_only=True)
class KeyDiff(ScoredConfig):
    """Keeps sinks, window and the tokens whose keys have the least cosine to the mean direction of all keys."""

    name: ClassVar[str] = "keydiff"

    def new_method(self, layer: int) -> Chooser:
        return LeastAlike(self)


class LeastAlike(Best):
    """The anchor is the mean of all keys that came, each of length 1; in the paper's Algorithm 1, of the keys held."""

    def __init__(self, config: KeyDiff) -> None:
        super().__init__(config)
        self.per_lane = {**self.per_lane, "direction": torch.float64}

    def lanes_after(self, held: Held, new: Arriving) -> dict[str, Tensor]:
        return {"direction": sum_of_directions(new.keys) + held.per_lane.get("direction", 0)}

    def scores(self, pool: Pool, per_lane: dict[str, Tensor], new: Arriving) -> Float[Tensor, "l n"]:
        return -pool.of_keys(lambda keys: towards(keys, per_lane["direction"]))

    def check(self, held: Held, count: int, budget: Budget) -> None:
        super().check(held, count, budget)
        check_vectors(held, "direction")
