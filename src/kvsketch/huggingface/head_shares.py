"""How the KV heads of a model share a budget, as the option `heads` says: a layer asks for its own when it begins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsketch.caches.core.budget import MOST, Budget
from kvsketch.caches.core.config import BudgetedConfig
from kvsketch.caches.core.profile import HOW, Profile, find_profile
from kvsketch.caches.core.shares import PYRAMID, pyramid
from kvsketch.huggingface.model import ModelLink


@dataclass(frozen=True)
class HeadShares:
    """For the full-attention layers of a model, each with so many KV heads. Copies of a cache share it."""

    config: BudgetedConfig
    model: ModelLink
    layers: Mapping[int, int]
    read: list[Profile] = field(default_factory=list)  # when it is asked for

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeadShares":
        return self

    def __call__(self, layer: int, heads: int, budget: Budget) -> Sequence[float]:
        """Those of a layer that turns out to have so many heads."""
        if self.config.heads == PYRAMID:
            most = MOST if budget.fraction is None else 1 / budget.fraction
            return pyramid({**self.layers, layer: heads}, most)[layer]
        if not self.read:
            self.read.append(find_profile(self.config.heads, self.model.facts()))
        found = self.read[0].shares(budget).get(layer, ())
        if len(found) != heads:
            raise ValueError(f"the profile {self.read[0].path} lacks the {heads} KV heads of layer {layer}. {HOW}")
        return found
