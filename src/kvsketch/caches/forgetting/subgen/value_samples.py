"""SubGen's samples of values for all rows and heads: UpdateMatrixProduct, lines 24-28.

One head: `algorithms/subgen.py`. Tokens that are gone cannot be sampled later, so a budget that grows has strata, each
with samples and a mass of its own (see `algorithms/sampling.Plan`).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.algorithms.sampling import Plan, place
from kvsketch.attention import NO_MASS
from kvsketch.caches.core.tokens import Arriving
from kvsketch.caches.forgetting.subgen.slots import Draws, Slots

VALUE = 1  # what random numbers are drawn for


@dataclass
class ValueSamples(Slots):
    """Slots of all strata, one stratum after the other."""

    keys: Float[Tensor, "l s d"]
    values: Float[Tensor, "l s e"]
    norms: Float[Tensor, "l s"]  # squared, of the values; 0 where a slot is empty
    mass: Float[Tensor, "l strata"]  # μ: the sum of squared norms of all values that came

    @classmethod
    def none(cls, keys: Float[Tensor, "l n d"], values: Float[Tensor, "l n e"]) -> "ValueSamples":
        """No slots yet, for tokens like these."""
        lanes = len(keys)
        return cls(
            keys=keys.new_zeros(lanes, 0, keys.shape[2]),
            values=values.new_zeros(lanes, 0, values.shape[2]),
            norms=torch.zeros(lanes, 0, dtype=torch.float32, device=keys.device),
            mass=torch.zeros(lanes, 0, dtype=torch.float64, device=keys.device),
        )

    def make_slots(self, strata: int, slots: int) -> None:
        """Have at least `strata` strata, of `slots` each."""
        self.resize({"mass": strata} | dict.fromkeys(("keys", "values", "norms"), strata * slots))

    def take(self, block: Arriving, plan: Plan, draws: Draws) -> None:
        """Let each sample adopt each token with probability ‖v‖² / (μ + ‖v‖²). Lines 24-28, and line 6."""
        strata, _ = place(plan, block.ranks)
        norms = block.values.double().square().sum(2)
        drawn = draws.numbers(block.ranks[None], VALUE, plan.slots)
        first, last = plan.stratum_of(block.before)[0], plan.stratum_of(block.after - 1)[0]
        for stratum in range(first, last + 1):
            self._take_into(block, stratum, norms.masked_fill(strata != stratum, 0), drawn)

    def _take_into(
        self, block: Arriving, stratum: int, norms: Float[Tensor, "l n"], drawn: Float[Tensor, "l n s"]
    ) -> None:
        """Let a stratum's samples adopt tokens, never those with norm 0: another stratum's, or with a value of zero."""
        totals = torch.cat([self.mass[:, stratum, None], norms], 1).cumsum(1)
        self.mass[:, stratum] = totals[:, -1]
        adopts = drawn * totals[:, 1:, None] < norms[..., None]
        numbered = torch.arange(norms.shape[1], device=norms.device)[:, None]
        last = torch.where(adopts, numbered, -1).amax(1)  # [l, s]: the last token that each slot adopts
        lanes, slots = (last >= 0).nonzero(as_tuple=True)
        tokens = last[lanes, slots]
        slots = slots + stratum * drawn.shape[2]
        self.keys[lanes, slots] = block.keys[lanes, tokens]
        self.values[lanes, slots] = block.values[lanes, tokens]
        self.norms[lanes, slots] = norms[lanes, tokens].float()

    def log_weights(self) -> Float[Tensor, "l s"]:
        """log μ/(s‖v‖²); -inf where a slot is empty. Line 29."""
        slots = self.norms.shape[1] // self.mass.shape[1]
        mass = self.mass.repeat_interleave(slots, 1)
        return (mass / (slots * self.norms.double())).log().masked_fill(self.norms == 0, NO_MASS).float()
