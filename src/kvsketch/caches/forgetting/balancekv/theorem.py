"""BalanceKV as in its theorem: a set of tokens for each sum of the ratio, values in buckets by their norm.

The one-head algorithms are in `algorithms/balancekv.py`. A token is in the denominator's set, in the set of its
bucket, or in both, with a level in each; a token in neither is forgotten. At level l of a set it counts 2ˡ there:

    a = 2^l in the numerator (0 if it is not there)        b = 2^l in the denominator (0 if it is not there)

Algorithm 4 halves a batch as soon as it is full. Here a batch waits until there is no room, and the oldest of the
lowest level goes first: so any budget is used up, and nothing that fits is halved.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int8, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvsketch.attention import NO_MASS, Partial, WeightedTokens
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.method import Holding, Method
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.storage import made_of, tensors_of
from kvsketch.caches.core.tokens import Arriving
from kvsketch.caches.forgetting.balancekv.batches import (
    DENOMINATOR,
    GONE,
    NUMERATOR,
    Theorem,
    halve,
    next_batches,
)
from kvsketch.caches.forgetting.balancekv.levels import fitting
from kvsketch.kernels.draws import uniforms
from kvsketch.kernels.places import chosen_of, in_front
from kvsketch.kernels.weighted_attention import weighted_attention

LOG_2 = math.log(2)


@dataclass(frozen=True)
class Batch:
    """Tokens of one set, bucket and level that are halved together."""

    lane: int
    which: int
    places: Int64[Tensor, " n"]


@dataclass
class Sets:
    """Both sets of all lanes, and what the algorithm remembers beside them."""

    keys: Float[Tensor, "l n d"]
    values: Float[Tensor, "l n e"]
    levels: Int8[Tensor, "l 2 n"]  # in the denominator's set, and in the numerator's
    radii: Float[Tensor, "l 2"]  # the longest key and value so far
    drawn: Int64[Tensor, " l"]  # tokens halved so far, both sets together
    troubles: Int64[Tensor, "l 2"]  # walks that failed, and halvings by coins

    @property
    def held(self) -> Bool[Tensor, "l n"]:
        """Where there is a token."""
        return (self.levels > GONE).any(1)

    @property
    def buckets(self) -> Float[Tensor, "l n"]:
        """i with 2^i ≥ ‖v‖ > 2^(i-1); values of zero are in bucket -∞, which has no set."""
        return self.values.float().norm(dim=2).log2().ceil()

    @property
    def scale(self) -> float:
        """The paper's 1/√d: tokens come before any query does, and the model's own scale is not known yet."""
        return float(self.keys.shape[2] ** -0.5)

    def compact(self) -> None:
        """Close the holes that forgotten tokens leave, in tensors as wide as the fullest lane needs."""
        held = self.held
        order = in_front(held)[:, : int(held.sum(1).max())]
        self.keys, self.values = chosen_of((self.keys, self.values), order)
        self.levels = self.levels.gather(2, order[:, None].expand(-1, 2, -1))


class TheoremSets(Method):
    """Algorithm 1 in one layer."""

    def __init__(self, theorem: Theorem, room: Callable[[Budget, int], int]) -> None:
        """`room(budget, count)` is how many tokens may be held when `count` have left the window."""
        self.theorem, self.room = theorem, room

    def new_holding(self, budget: Budget) -> Holding:
        return TheoremHolding(self.theorem, lambda count: self.room(budget, count))


class TheoremHolding(Holding):
    """Algorithm 1 for the lanes of a bundle."""

    def __init__(self, theorem: Theorem, room: Callable[[int], int]) -> None:
        self.theorem, self.room = theorem, room
        self.sets: Sets | None = None

    def write(self, new: Arriving) -> None:
        """Take the tokens into both sets, erase small buckets, and halve until all fit."""
        sets = self.sets = joined(self.sets, new)
        room = self.room(new.after)
        block = fitting(self.theorem.block, room)
        self._erase(sets, new.after)
        while (excess := sets.held.sum(1).cpu() - room).max() > 0:
            self._halve(sets, list(_batches(sets, excess.tolist(), block)), new.heads)
        sets.compact()

    def _erase(self, sets: Sets, count: int) -> None:
        """Algorithm 1, line 8, where n is the number of tokens so far, and r the longest key so far."""
        longest_key, longest_value = sets.radii.unbind(1)
        tokens = torch.tensor(count, dtype=torch.float32, device=longest_key.device)
        log_least = math.log(self.theorem.epsilon) - (2 * tokens).log() - longest_key.square() * sets.scale
        least = log_least / LOG_2 + longest_value.log2()  # of i
        sets.levels[:, NUMERATOR].masked_fill_(sets.buckets <= least[:, None], GONE)

    def _halve(self, sets: Sets, batches: list[Batch], heads: Int64[Tensor, " l"]) -> None:
        """Halve all these batches: tokens that are kept rise a level in the batch's set, the others leave the set."""
        device = sets.keys.device
        lanes = torch.tensor([batch.lane for batch in batches], device=device)
        which = torch.tensor([batch.which for batch in batches], device=device)
        places = pad_sequence([batch.places for batch in batches], batch_first=True, padding_value=-1).to(device)
        real, here = places >= 0, places.clamp_min(0)
        keys, values = (x[lanes[:, None], here] for x in (sets.keys, sets.values))
        ones = torch.zeros_like(values)
        ones[..., 0] = 1.0  # the denominator's values are 1
        values = torch.where((which == NUMERATOR)[:, None, None], values, ones)
        at = _reserve(sets, batches)[:, None] + torch.arange(places.shape[1], device=device)

        def draw(some: Tensor, attempt: int) -> Tensor:
            return uniforms(self.theorem.seed, self.theorem.layer, heads[lanes[some], None], at[some], attempt)

        halved = halve(keys, values, real, draw, sets.scale, self.theorem)
        index = tuple(x.expand_as(places)[real] for x in (lanes[:, None], which[:, None], here))
        sets.levels[index] = torch.where(halved.kept[real], sets.levels[index] + 1, GONE)
        sets.troubles = sets.troubles.index_add(0, lanes, torch.stack([halved.failed, halved.tossed], 1))

    # -- reading and state

    def answer(self, query: Query, asked: Tensor | None) -> Answer:
        """The ratio of the two sums, at most as long as the longest value: the true answer is a mean of values."""
        assert self.sets is not None, "tokens came"
        dtype, tokens = query.queries.dtype, self.tokens()
        if dtype == torch.float16:  # which cannot represent answers that are far too long
            wide = tokens.keys.float(), tokens.values.float()
            tokens, query = replace(tokens, keys=wide[0], values=wide[1]), replace(query, queries=query.queries.float())
        found = weighted_attention(query.queries, tokens, query.scale, softcap=query.softcap)
        group = query.queries.shape[1] // len(self.sets.keys)
        longest = self.sets.radii[None, :, 1].repeat_interleave(group, 1)[..., None, None]
        size = found.out.abs().amax(3, keepdim=True).clamp_min(1e-30)  # squares of huge answers would overflow
        direction = found.out / size
        lengths = direction.norm(dim=3, keepdim=True) * size
        out = torch.where(lengths > longest, direction * (longest * size / lengths), found.out)
        return Answer(Partial(out.to(dtype), found.lse))

    def tokens(self) -> WeightedTokens:
        """The tokens held, with the log of what each counts in each sum."""
        assert self.sets is not None, "tokens came"
        weights = (self.sets.levels.float() * LOG_2).masked_fill(self.sets.levels == GONE, NO_MASS)[None]
        return WeightedTokens(
            self.sets.keys[None], self.sets.values[None], weights[:, :, DENOMINATOR], weights[:, :, NUMERATOR]
        )

    def count_entries(self) -> int | Int64[Tensor, " l"]:
        return 0 if self.sets is None else self.sets.held.sum(1)

    def details(self, count: int) -> dict[str, float]:
        """How many tokens an entry stands for, and how the walks went."""
        if self.sets is None:
            return {}
        failed, tossed = self.sets.troubles.float().mean(0).tolist()
        tokens = count * len(self.sets.keys) / max(1, int(self.sets.held.sum()))
        return {"tokens per entry": tokens, "failed walks": failed, "halved by coins": tossed}

    def warning(self) -> str | None:
        """Theorem 3.4 asks for batches of √s·e^(2r²·scale)/ε tokens; as queries are not known, r is the longest key."""
        if self.sets is None:
            return None
        exponent = 2 * float(self.sets.radii[:, 0].max()) ** 2 * self.sets.scale
        if exponent <= math.log(self.theorem.block):
            return None
        return (
            f"keys are too long for BalanceKV's theorem: it asks for blocks of more than e^{exponent:.0f} tokens, and "
            f"these have {self.theorem.block}. Numerator and denominator may miss different tokens, and answers be "
            'off by any factor: use mode="practical"'
        )

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.sets is None else tensors_of(self.sets)

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any], count: int) -> None:
        self.sets = made_of(Sets, tensors)


def joined(sets: Sets | None, new: Arriving) -> Sets:
    """The sets with the new tokens at level 0 of both; a value of zero is in no bucket."""
    norms = torch.stack([x.float().norm(dim=2) for x in (new.keys, new.values)], 1)
    levels = torch.where(torch.stack([torch.ones_like(norms[:, 1], dtype=torch.bool), norms[:, 1] > 0], 1), 0, GONE)
    levels = levels.to(torch.int8)
    if sets is None:
        drawn = torch.zeros(len(new.keys), dtype=torch.int64, device=new.keys.device)
        sets = Sets(
            new.keys[:, :0], new.values[:, :0], levels[..., :0], torch.zeros_like(norms[..., 0]),
            drawn, drawn[:, None].repeat(1, 2),
        )  # fmt: skip
    return Sets(
        torch.cat([sets.keys, new.keys], 1),
        torch.cat([sets.values, new.values], 1),
        torch.cat([sets.levels, levels], 2),
        torch.cat([sets.radii[..., None], norms], 2).amax(2),
        sets.drawn,
        sets.troubles,
    )


def _batches(sets: Sets, excess: list[int], block: int) -> Iterator[Batch]:
    """The batches to halve next, in every lane that holds too much."""
    levels, values = sets.levels.cpu(), sets.buckets.cpu()
    buckets = torch.stack([torch.zeros_like(values), values], 1)  # the denominator has one
    for lane, over in enumerate(excess):
        if over > 0:
            for which, places in next_batches(levels[lane], buckets[lane], block, over):
                yield Batch(lane, which, places)


def _reserve(sets: Sets, batches: list[Batch]) -> Int64[Tensor, " l"]:
    """Where each batch's random numbers begin: a lane uses each of its numbers once."""
    drawn, starts = sets.drawn.tolist(), list[int]()
    for batch in batches:
        starts.append(drawn[batch.lane])
        drawn[batch.lane] += len(batch.places)
    sets.drawn = torch.tensor(drawn, device=sets.drawn.device)
    return torch.tensor(starts, device=sets.drawn.device)
