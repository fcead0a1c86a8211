"""SubGen's samples of values for all rows and heads: UpdateMatrixProduct, lines 24-28.

One head: `algorithms/subgen.py`. Samples of what is gone cannot be added later: a budget that grows has strata,
each with samples and a mass of its own (see `algorithms/sampling.Plan`).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.algorithms.sampling import Plan, place
from kvsketch.attention import NO_MASS
from kvsketch.caches.lanes import Block, Draws
from kvsketch.caches.storage import Slots

VALUE = 1  # what numbers are drawn for


@dataclass
class ValueSamples(Slots):
    """Slots of all strata, one stratum after the other."""

    keys: Float[Tensor, "b h s d"]
    values: Float[Tensor, "b h s e"]
    norms: Float[Tensor, "b h s"]  # squared, of the values; 0 where a slot is empty
    mass: Float[Tensor, "b h strata"]  # μ: the sum of squared norms of all values that came

    @classmethod
    def none(cls, keys: Float[Tensor, "b h n d"], values: Float[Tensor, "b h n e"]) -> "ValueSamples":
        """No slots yet, for tokens like these."""
        lanes = keys.shape[:2]
        return cls(
            keys=keys.new_zeros(*lanes, 0, keys.shape[3]),
            values=values.new_zeros(*lanes, 0, values.shape[3]),
            norms=torch.zeros(*lanes, 0, device=keys.device),
            mass=torch.zeros(*lanes, 0, dtype=torch.float64, device=keys.device),
        )

    def make_slots(self, strata: int, slots: int) -> None:
        """Have so many strata at least, of `slots` each."""
        self.resize({"mass": strata} | dict.fromkeys(("keys", "values", "norms"), strata * slots))

    def take(self, block: Block, plan: Plan, draws: Draws) -> None:
        """Let each sample adopt each token with probability ‖v‖² / (μ + ‖v‖²). Lines 24-28, and line 6."""
        strata, _ = place(plan, block.ranks)
        norms = block.values.double().square().sum(2)
        drawn = draws.numbers(block.ranks, VALUE, plan.slots)
        first = strata[:, 0].clamp_min(0)  # of each lane; a lane without tokens has no valid ones
        for offset in range(2):  # a block is no longer than a stratum: it lies in two of them at most
            stratum = first + offset
            here = block.valid & (strata == stratum[:, None])
            if bool(here.any()):
                self._take_into(block, stratum, norms.masked_fill(~here, 0), drawn)

    def _take_into(
        self, block: Block, stratum: Int64[Tensor, " l"], norms: Float[Tensor, "l n"], drawn: Float[Tensor, "l n s"]
    ) -> None:
        """Tokens whose norm is given as 0 are of another stratum, or have values of zero: never adopted."""
        mass = self.mass.flatten(0, 1)
        lane = torch.arange(len(norms), device=norms.device)
        known = stratum < mass.shape[1]  # a shorter row may not have it yet
        at = stratum.clamp_max(mass.shape[1] - 1)
        totals = torch.cat([mass[lane, at][:, None], norms], 1).cumsum(1)
        mass[lane, at] = torch.where(known, totals[:, -1], mass[lane, at])
        adopts = drawn * totals[:, 1:, None] < norms[..., None]
        numbered = torch.arange(norms.shape[1], device=norms.device)[:, None]
        last = torch.where(adopts, numbered, -1).amax(1)  # [l, s]: the last token that each slot adopts
        lanes, slots = (last >= 0).nonzero(as_tuple=True)
        tokens = last[lanes, slots]
        slots = slots + stratum[lanes] * drawn.shape[2]
        self.keys.flatten(0, 1)[lanes, slots] = block.keys[lanes, tokens]
        self.values.flatten(0, 1)[lanes, slots] = block.values[lanes, tokens]
        self.norms.flatten(0, 1)[lanes, slots] = norms[lanes, tokens].float()

    def log_weights(self) -> Float[Tensor, "b h s"]:
        """log μ/(s‖v‖²); -inf where a slot is empty. Line 29."""
        slots = self.norms.shape[2] // self.mass.shape[2]
        mass = self.mass.repeat_interleave(slots, 2)
        return (mass / (slots * self.norms.double())).log().masked_fill(self.norms == 0, NO_MASS).float()
