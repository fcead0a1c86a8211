"""Uniform sampling without replacement: the method's one-head form is `algorithms/sampling.py`."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvsketch.algorithms.sampling import Plan, choose_slots, last_writer, log_weights
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.checks import check_choice, check_seed
from kvsketch.caches.core.chooser import Chooser, Held, Kept
from kvsketch.caches.core.config import BLOCK, WEIGHTS, WindowedConfig
from kvsketch.caches.core.storage import listed_on
from kvsketch.caches.core.tokens import Arriving
from kvsketch.kernels.draws import uniforms


@dataclass(frozen=True, kw_only=True)
class Uniform(WindowedConfig):
    """Keeps sinks, window and a uniform sample of the rest; each sampled token stands for those it was drawn from.

    `weights="none"` lets every sampled token stand for itself alone, as in libraries without entry weights, to show
    what that costs.
    """

    name: ClassVar[str] = "uniform"

    weights: str = "count"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)
        check_choice("weights", self.weights, WEIGHTS)

    def floor(self) -> int:
        return super().floor() + BLOCK  # a stratum's sample

    def least_entries(self) -> int:
        return super().floor() + BLOCK  # the window may run over by one block

    def new_method(self, layer: int) -> Chooser:
        return Reservoirs(self, layer)

    def plan(self, budget: Budget) -> Plan:
        """One reservoir for a fixed number of entries; for a fraction, strata of a block of slots each."""
        if budget.fixed is not None:
            return Plan(self.room(budget, 0))
        return Plan(BLOCK, *self.strata(budget, BLOCK, BLOCK))


class Reservoirs(Chooser):
    """A reservoir of entries for every stratum of each lane's tokens."""

    def __init__(self, config: Uniform, layer: int) -> None:
        self.config, self.layer = config, layer

    def choose(self, held: Held, new: Arriving, budget: Budget) -> Kept:
        """Offer the tokens to every lane's reservoir; each head has draws of its own."""
        plan, ranks = self.config.plan(budget), new.ranks
        drawn = uniforms(self.config.seed, self.layer, new.heads[:, None], ranks)
        slot = choose_slots(plan, ranks.expand_as(drawn), drawn)
        start = plan.stratum_of(new.before)[0] * plan.slots  # finished strata are settled
        count = plan.slots_for(new.after) - start
        taken = last_writer((slot - start).clamp_min(-1), count)
        index = torch.where(taken >= 0, held.count - start + taken, torch.arange(count, device=taken.device))
        weights = log_weights(plan, listed_on(taken.device, [new.after]), count, start)
        return Kept(index, start, weights.clamp_max(0.0) if self.config.weights == "none" else weights)

    def check(self, held: Held, count: int, budget: Budget) -> None:
        if held.count != self.config.plan(budget).slots_for(count):
            raise ValueError(f"{held.count} entries of lanes that have {self.config.plan(budget).slots_for(count)}")
