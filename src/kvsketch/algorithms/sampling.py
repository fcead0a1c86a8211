"""Uniform sampling of a stream without replacement, for one head.

Algorithm: J. S. Vitter, Random Sampling with a Reservoir, ACM TOMS 11(1), 1985, Algorithm R: the
first m tokens fill the slots; token n then takes a slot with probability m/n, each slot alike.
A sampled token stands for n/m tokens, so both sums of attention stay unbiased.

Deviation: a reservoir of m slots cannot hold a fixed fraction of an endless stream. For a fraction
the stream is cut into strata, each with a reservoir of its own; a `Plan` says where they begin.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """Strata of a stream: the first has `first` tokens, every later one `period`; each keeps `slots` of them.

    `first=None` is a single stratum without end.
    """

    slots: int
    first: int | None = None
    period: int = 1

    def stratum_of(self, rank: int) -> tuple[int, int]:
        """The stratum of the token with this rank (from 0), and the rank at which the stratum begins."""
        if self.first is None or rank < self.first:
            return 0, 0
        later = (rank - self.first) // self.period
        return 1 + later, self.first + later * self.period

    def slots_for(self, count: int) -> int:
        """How many slots `count` tokens need."""
        if count == 0:
            return 0
        stratum, begin = self.stratum_of(count - 1)
        return stratum * self.slots + min(self.slots, count - begin)


def choose_slots(plan: Plan, ranks: Int64[Tensor, "..."], uniform: Float[Tensor, "..."]) -> Int64[Tensor, "..."]:
    """The slot that each token takes, or -1 where it is passed over; a later token overwrites an earlier one.

    Vitter's Algorithm R: token number n draws a place in 1…n and takes the slot of that number, if there is one.
    """
    stratum, within = place(plan, ranks)
    drawn = (uniform * (within + 1)).long()
    slot = torch.where(within < plan.slots, within, drawn)
    return torch.where(slot < plan.slots, stratum * plan.slots + slot, -1)


def last_writer(slot: Int64[Tensor, "l n"], slots: int) -> Int64[Tensor, "l {slots}"]:
    """For each slot the last token that took it, or -1."""
    order = torch.arange(slot.shape[1], device=slot.device).expand_as(slot)
    last = torch.full((len(slot), slots + 1), -1, device=slot.device)
    # Tokens that were passed over write to a slot after the last, which is cut off.
    return last.scatter_reduce_(1, slot.masked_fill(slot < 0, slots), order, "amax")[:, :slots]


def log_weights(plan: Plan, count: Int64[Tensor, "..."], slots: int, first: int = 0) -> Float[Tensor, "... slots"]:
    """Log of how many tokens each of `slots` slots, from `first` on, stands for after `count` tokens.

    For empty slots it is -inf.
    """
    slot = torch.arange(first, first + slots, device=count.device)
    stratum, within = slot // plan.slots, slot % plan.slots
    seen = count[..., None].expand(*count.shape, slots)
    if plan.first is not None:
        begin = torch.where(stratum == 0, 0, plan.first + (stratum - 1) * plan.period)
        length = torch.where(stratum == 0, plan.first, plan.period)
        seen = torch.minimum(seen - begin, length)
    weight = (seen.to(torch.float64) / plan.slots).clamp_min(1.0).log().float()
    return weight.masked_fill(within >= seen, float("-inf"))


def place(plan: Plan, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """The stratum of each token, and its number within it from 0."""
    if plan.first is None:
        return torch.zeros_like(ranks), ranks
    later = torch.div(ranks - plan.first, plan.period, rounding_mode="floor")
    stratum = torch.where(ranks < plan.first, 0, 1 + later)
    begin = torch.where(stratum == 0, 0, plan.first + later * plan.period)
    return stratum, ranks - begin


@dataclass(frozen=True)
class Sample:
    """The tokens that one head holds of its stream."""

    plan: Plan
    keys: Float[Tensor, "m d"]
    values: Float[Tensor, "m e"]
    seen: int

    @property
    def log_weights(self) -> Float[Tensor, " m"]:
        """Log of how many tokens each entry stands for."""
        return log_weights(self.plan, torch.tensor(self.seen, device=self.keys.device), self.keys.shape[0])


def empty_sample(plan: Plan, key: Float[Tensor, " d"], value: Float[Tensor, " e"]) -> Sample:
    """A sample of no tokens, for keys and values like these."""
    return Sample(plan, key.new_empty(0, *key.shape), value.new_empty(0, *value.shape), 0)


def offer_token(
    sample: Sample, key: Float[Tensor, " d"], value: Float[Tensor, " e"], uniform: Float[Tensor, ""]
) -> Sample:
    """Let the next token of the stream in, if its draw gives it a place.

    Paper: Vitter 1985, Algorithm R, within the stratum that the token belongs to.
    """
    plan, keys, values = sample.plan, sample.keys, sample.values
    stratum, begin = plan.stratum_of(sample.seen)
    number = sample.seen - begin + 1  # of this token in its stratum, from 1
    if number <= plan.slots:
        keys, values = torch.cat([keys, key[None]]), torch.cat([values, value[None]])
    else:
        place = int(uniform * number)
        if place < plan.slots:
            keys, values = keys.clone(), values.clone()
            keys[stratum * plan.slots + place] = key
            values[stratum * plan.slots + place] = value
    return Sample(plan, keys, values, sample.seen + 1)
