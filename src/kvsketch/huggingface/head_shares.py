"""How a model's KV heads share a budget, as the option `heads` says: a layer asks for its shares when it begins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsketch.caches.core.budget import MOST, Budget
from kvsketch.caches.core.config import BudgetedConfig
from kvsketch.caches.core.profile import HOW, find_profile
from kvsketch.caches.core.shares import LENGTH, PYRAMID, Shares, pyramid
from kvsketch.huggingface.model import ModelLink


@dataclass(frozen=True)
class HeadShares:
    """The shares of full-attention layers; `layers` has their numbers of KV heads. Copies of a cache share this."""

    config: BudgetedConfig
    model: ModelLink
    layers: Mapping[int, int]
    length: int = LENGTH  # of the texts for which a number of heads is chosen
    found: dict[float | None, Shares] = field(default_factory=dict)  # by fraction: the same for all layers

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeadShares":
        return self

    def __call__(self, layer: int, heads: int, budget: Budget) -> Sequence[float]:
        """The shares of a layer that turns out to have `heads` KV heads, in all processes together."""
        if budget.fraction not in self.found:
            self.found[budget.fraction] = self._divided(budget)
        shares = self.found[budget.fraction].get(layer, ())
        if self.config.heads == PYRAMID:
            return list(shares[:1]) * heads
        if len(shares) != heads:
            raise ValueError(f"the profile {self.config.heads} lacks the {heads} KV heads of layer {layer}. {HOW}")
        return shares

    def _divided(self, budget: Budget) -> Shares:
        """The shares of all layers."""
        if self.config.heads == PYRAMID:
            return pyramid(self.layers, MOST if budget.fraction is None else 1 / budget.fraction)
        shares = find_profile(self.config.heads, self.model.facts()).shares(budget)
        if others := sorted(set(shares) - set(self.layers)):  # the budget that they would leave is not theirs
            raise ValueError(f"the profile {self.config.heads} also has layers that share no budget: {others}. {HOW}")
        return self.config.divided(shares, budget.beside, self.length)
