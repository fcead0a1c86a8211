"""Uniform sampling without replacement: the method's one-head form is `algorithms/sampling.py`."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int64
from torch import Tensor

from kvsketch.algorithms.draws import uniforms
from kvsketch.algorithms.sampling import Plan, choose_slots, log_weights
from kvsketch.attention import NO_MASS, WeightedTokens
from kvsketch.caches.base import (
    BLOCK,
    WEIGHTS,
    EntriesPast,
    LeavingTokens,
    Past,
    WindowedConfig,
    check_choice,
    check_seed,
)
from kvsketch.caches.budget import Budget
from kvsketch.caches.storage import Rows, storage_bytes


@dataclass(frozen=True, kw_only=True)
class Uniform(WindowedConfig):
    """Keeps sinks, window and a uniform sample of the rest; each sampled token stands for those it was drawn from.

    `weights="none"` lets every sampled token stand for itself alone, as libraries without entry
    weights do, to show what that costs.
    """

    name: ClassVar[str] = "uniform"

    weights: str = "count"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)
        check_choice("weights", self.weights, WEIGHTS)

    def new_past(self, budget: Budget, layer: int) -> Past:
        return UniformPast(self.plan(budget), self, layer)

    def plan(self, budget: Budget) -> Plan:
        """One reservoir for a fixed number of entries; for a fraction, strata of a block of slots each."""
        if budget.fixed is not None:
            return Plan(self.room(budget, 0))
        assert budget.fraction is not None
        return Plan(BLOCK, *self.strata(budget.fraction, BLOCK, BLOCK))


class UniformPast(EntriesPast):
    """Reservoirs of all rows and heads: slot j of `keys` and `values` is slot j of every head's sample."""

    def __init__(self, plan: Plan, config: Uniform, layer: int) -> None:
        self.plan, self.config, self.layer = plan, config, layer
        self.keys, self.values = Rows(dim=2), Rows(dim=2)
        self.counts: list[int] = []  # tokens written, per row
        self.log_mass: Tensor | None = None  # [b, 1, slots]: all heads of a row saw the same number of tokens

    def write(self, tokens: LeavingTokens) -> None:
        """Offer the tokens to every head's reservoir, each head with draws of its own."""
        heads = tokens.keys.shape[1]
        device = tokens.keys.device
        head = torch.arange(heads, device=device)[None, :, None]
        ranks = tokens.ranks[:, None]  # [b, 1, n]
        drawn = uniforms(self.config.seed, self.layer, head, ranks)
        slot = choose_slots(self.plan, ranks.expand_as(drawn), drawn).masked_fill(ranks < 0, -1)

        first_slot = self._first_open_slot()
        self.counts = list(tokens.counts)
        slots = self._slots()
        most = self.plan.slots if self.plan.first is None else None
        first_new = self.keys.length
        for rows, new in ((self.keys, tokens.keys), (self.values, tokens.values)):
            rows.resize(slots, new, most)
            rows.view[:, :, first_new:] = 0  # a row that is behind has empty slots; 0 · weight 0 stays 0
        last = _last_writer((slot - first_slot).clamp_min(-1), slots - first_slot)
        _overwrite(self.keys.view[:, :, first_slot:], tokens.keys, last)
        _overwrite(self.values.view[:, :, first_slot:], tokens.values, last)
        self._weigh(device)

    def entries(self) -> WeightedTokens | None:
        """The sampled tokens, each with the log of the number it stands for."""
        if self.log_mass is None:
            return None
        return WeightedTokens(self.keys.view, self.values.view, self.log_mass)

    def count_entries(self) -> Int64[Tensor, "b h"] | None:
        if self.log_mass is None:
            return None
        return (self.log_mass > NO_MASS).sum(-1).expand(-1, self.keys.view.shape[1])

    @property
    def nbytes(self) -> int:
        return storage_bytes([self.keys.buffer, self.values.buffer, self.log_mass])

    def tensors(self) -> dict[str, Tensor]:
        if self.log_mass is None:
            return {}
        return {"keys": self.keys.view, "values": self.values.view}

    def numbers(self) -> dict[str, list[int]]:
        return {"counts": self.counts}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, list[int]]) -> None:
        self.counts = list(numbers["counts"])
        self.keys, self.values, self.log_mass = Rows(dim=2), Rows(dim=2), None
        if tensors:
            slots = self._slots()  # a row that has gone may have had more
            self.keys.append(tensors["keys"][:, :, :slots])
            self.values.append(tensors["values"][:, :, :slots])
            if self.keys.length != slots:
                raise ValueError(f"{self.keys.length} entries of rows that have {slots}")
            self._weigh(tensors["keys"].device)

    def _slots(self) -> int:
        """As many as the longest row needs."""
        return max(self.plan.slots_for(count) for count in self.counts)

    def _first_open_slot(self) -> int:
        """The first slot that a coming token may still take: those of finished strata are settled."""
        return min((self.plan.stratum_of(count)[0] for count in self.counts), default=0) * self.plan.slots

    def _weigh(self, device: torch.device) -> None:
        counts = torch.tensor(self.counts, device=device)
        weights = log_weights(self.plan, counts, self.keys.length)
        if self.config.weights == "none":
            weights = weights.clamp_max(0.0)
        self.log_mass = weights[:, None]


def _last_writer(slot: Int64[Tensor, "b h n"], slots: int) -> Int64[Tensor, "b h slots"]:
    """For each slot the last token that took it, or -1."""
    rows, heads, count = slot.shape
    order = torch.arange(count, device=slot.device).expand_as(slot)
    last = torch.full((rows, heads, slots + 1), -1, device=slot.device)
    # Tokens that were passed over write to a slot behind the last, which is cut off.
    last.scatter_reduce_(2, slot.masked_fill(slot < 0, slots), order, "amax")
    return last[:, :, :slots]


def _overwrite(held: Tensor, new: Tensor, last: Int64[Tensor, "b h slots"]) -> None:
    """Copy to each slot the token that took it last, if one did."""
    index = last.clamp_min(0)[..., None].expand(*last.shape, new.shape[-1])
    held.copy_(torch.where((last >= 0)[..., None], new.gather(2, index), held))
