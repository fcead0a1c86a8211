"""BalanceKV as in its theorem: a set of tokens for each sum of the ratio, values in buckets by their norm.

The one-head algorithms are in `algorithms/balancekv.py`. A token is in the denominator's set at some level, in the
set of its bucket at some level, in both or in one; in neither it is forgotten. At level l it counts 2ˡ there:

    a = 2^above (0 if it is not above)        b = 2^below (0 if it is not below)

Algorithm 4 halves a batch as soon as it is full. Here it waits until there is no room, oldest batch of the lowest
level first, so that any budget is used and nothing is halved that fits.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int8, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvsketch.algorithms.draws import uniforms
from kvsketch.attention import NO_MASS, Partial, WeightedTokens
from kvsketch.caches.base import BLOCK, EntriesPast, LeavingTokens
from kvsketch.caches.storage import chosen, columns, in_front, made_of
from kvsketch.kernels.balanced_walk import keep_smaller

LOG_2 = 0.6931471805599453
RETRIES = 3  # walks with fresh numbers after one that failed; then coins are tossed
GONE = -1  # the level of what is not in a set
SETS = BELOW, ABOVE = 0, 1  # the denominator's, the numerator's


@dataclass(frozen=True)
class Theorem:
    """What Algorithm 1 is told: t, the factor of c = constant · log(n/δ), δ and ε; and where its numbers come from."""

    block: int
    constant: float | int
    failure: float
    epsilon: float | int
    seed: int
    layer: int


@dataclass(frozen=True)
class Batch:
    """Tokens of one set, bucket and level that are halved together."""

    lane: int
    which: int
    places: Int64[Tensor, " n"]


@dataclass
class Sets:
    """Both sets of all rows and heads, and what the algorithm remembers beside them."""

    keys: Float[Tensor, "b h n d"]
    values: Float[Tensor, "b h n e"]
    levels: Int8[Tensor, "b h 2 n"]  # in the denominator's set, and in the numerator's
    radii: Float[Tensor, "b h 2"]  # the longest key and value so far
    drawn: Int64[Tensor, "b h"]  # tokens halved so far, both sets together
    troubles: Int64[Tensor, "b h 2"]  # walks that failed, and halvings by coins

    @property
    def held(self) -> Bool[Tensor, "b h n"]:
        """Where there is a token."""
        return (self.levels > GONE).any(2)

    @property
    def buckets(self) -> Float[Tensor, "b h n"]:
        """i with 2^i ≥ ‖v‖ > 2^(i-1); values of zero are in bucket -∞, and in no set."""
        return self.values.float().norm(dim=3).log2().ceil()

    @property
    def scale(self) -> float:
        """The paper's 1/√d: a past is written before it is asked, and does not know the model's own scale."""
        return float(self.keys.shape[3] ** -0.5)

    def compact(self) -> None:
        """Close the holes that forgotten tokens leave, in buffers as wide as the fullest row and head needs."""
        held = self.held
        order = in_front(held)[:, :, : int(held.sum(2).max())]
        self.keys, self.values = (chosen(x, order) for x in (self.keys, self.values))
        self.levels = self.levels.gather(3, order[:, :, None].expand(-1, -1, 2, -1))


class TheoremPast(EntriesPast):
    """Algorithm 1 for all rows and heads, a row and a head being a lane of its own."""

    def __init__(self, theorem: Theorem, room: Callable[[int], int]) -> None:
        """`room(count)` is how many tokens may be held when `count` have left the window."""
        self.theorem, self.room = theorem, room
        self.counts: list[int] = []  # tokens written, per row
        self.sets: Sets | None = None

    def write(self, tokens: LeavingTokens) -> None:
        """Take the tokens into both sets, erase small buckets, and halve until all fit."""
        earlier = self.counts or [0] * len(tokens.counts)
        self.counts = list(tokens.counts)
        most = max(now - before for now, before in zip(self.counts, earlier, strict=True))
        sets = self.sets = joined(self.sets, tokens, most)
        self._erase(sets)
        rooms = torch.tensor([self.room(count) for count in self.counts])
        while (excess := sets.held.sum(2).cpu() - rooms[:, None]).max() > 0:
            self._halve(sets, list(self._batches(sets, excess.flatten().tolist())))
        sets.compact()

    def _erase(self, sets: Sets) -> None:
        """Algorithm 1, line 8, with the tokens so far for n and the longest key so far for r."""
        longest_key, longest_value = sets.radii.unbind(2)
        counts = torch.tensor(self.counts, device=longest_key.device)[:, None].clamp_min(1)
        log_least = math.log(self.theorem.epsilon) - (2 * counts).log() - longest_key.square() * sets.scale
        least = log_least / LOG_2 + longest_value.log2()  # of i
        sets.levels[:, :, ABOVE].masked_fill_(sets.buckets <= least[..., None], GONE)

    def _batches(self, sets: Sets, excess: list[int]) -> Iterator[Batch]:
        """What is halved next, in every lane that holds too much."""
        levels, values = sets.levels.flatten(0, 1).cpu(), sets.buckets.flatten(0, 1).cpu()
        buckets = torch.stack([torch.zeros_like(values), values], 1)  # the denominator has one
        heads = sets.keys.shape[1]
        for lane, over in enumerate(excess):
            if over > 0:
                block = fitting(self.theorem.block, self.room(self.counts[lane // heads]))
                for which, places in next_batches(levels[lane], buckets[lane], block, over):
                    yield Batch(lane, which, places)

    def _halve(self, sets: Sets, batches: list[Batch]) -> None:
        """Halve all these batches: what is kept rises a level in its set, the rest leaves it."""
        device, heads = sets.keys.device, sets.keys.shape[1]
        lanes = torch.tensor([batch.lane for batch in batches], device=device)
        which = torch.tensor([batch.which for batch in batches], device=device)
        places = pad_sequence([batch.places for batch in batches], batch_first=True, padding_value=-1).to(device)
        real, here = places >= 0, places.clamp_min(0)
        keys, values = (x.flatten(0, 1)[lanes[:, None], here] for x in (sets.keys, sets.values))
        ones = torch.zeros_like(values)
        ones[..., 0] = 1.0  # the denominator's values are 1
        values = torch.where((which == ABOVE)[:, None, None], values, ones)
        at = _reserve(sets, batches)[:, None] + torch.arange(places.shape[1], device=device)

        def draw(some: Tensor, attempt: int) -> Tensor:
            return uniforms(self.theorem.seed, self.theorem.layer, lanes[some, None] % heads, at[some], attempt)

        halved = halve(keys, values, real, draw, sets.scale, self.theorem)
        index = tuple(x.expand_as(places)[real] for x in (lanes[:, None], which[:, None], here))
        levels = sets.levels.flatten(0, 1)  # a view, of what `joined` has made for this call
        levels[index] = torch.where(halved.kept[real], levels[index] + 1, GONE)
        troubles = sets.troubles.flatten(0, 1).index_add(0, lanes, torch.stack([halved.failed, halved.tossed], 1))
        sets.troubles = troubles.view_as(sets.troubles)

    # -- reading and state

    def attend(self, query: Float[Tensor, "b hg q d"], scale: float, softcap: float | None) -> Partial | None:
        """The ratio of both sums, not longer than the longest value: the true answer is a mean of values."""
        found = super().attend(query, scale, softcap)
        if found is None or self.sets is None:
            return found
        group = query.shape[1] // self.sets.keys.shape[1]
        longest = self.sets.radii[..., 1].repeat_interleave(group, 1)[..., None, None]
        size = found.out.abs().amax(3, keepdim=True).clamp_min(1e-30)  # squares of what exploded would be no numbers
        direction = found.out / size
        lengths = direction.norm(dim=3, keepdim=True) * size
        return Partial(torch.where(lengths > longest, direction * (longest * size / lengths), found.out), found.lse)

    def entries(self) -> WeightedTokens | None:
        """The tokens held, with the log of what they count in each sum."""
        if self.sets is None:
            return None
        weights = (self.sets.levels * LOG_2).masked_fill(self.sets.levels == GONE, NO_MASS)
        return WeightedTokens(self.sets.keys, self.sets.values, weights[:, :, BELOW], weights[:, :, ABOVE])

    def count_entries(self) -> Int64[Tensor, "b h"] | None:
        return None if self.sets is None else self.sets.held.sum(2)

    def details(self) -> dict[str, float]:
        """How many tokens an entry stands for, and how the walks went."""
        if self.sets is None:
            return {}
        failed, tossed = self.sets.troubles.flatten(0, 1).float().mean(0).tolist()
        tokens = sum(self.counts) * self.sets.keys.shape[1] / max(1, int(self.sets.held.sum()))
        return {"tokens per entry": tokens, "failed walks": failed, "halved by coins": tossed}

    def warning(self) -> str | None:
        """Theorem 3.4 asks for batches of √s·e^(2r²·scale)/ε tokens; r is the longest key, for want of queries."""
        if self.sets is None:
            return None
        exponent = 2 * float(self.sets.radii[..., 0].max()) ** 2 * self.sets.scale
        if exponent <= math.log(self.theorem.block):
            return None
        return (
            f"keys are too long for BalanceKV's theorem: it asks for blocks of more than e^{exponent:.0f} tokens, and "
            f"these have {self.theorem.block}. Numerator and denominator may miss different tokens, and answers be "
            'off by any factor: use mode="practical"'
        )

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.sets is None else dict(vars(self.sets))

    def numbers(self) -> dict[str, list[int]]:
        return {"counts": self.counts}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, list[int]]) -> None:
        self.counts = list(numbers["counts"])
        self.sets = made_of(Sets, tensors) if tensors else None


def joined(sets: Sets | None, tokens: LeavingTokens, most: int) -> Sets:
    """The sets with all that is real at level 0 of both; a value of zero is in no bucket."""
    rows, heads = tokens.keys.shape[:2]
    order = in_front(tokens.ranks >= 0)[:, :most]
    keys, values = (columns(x, order) for x in (tokens.keys, tokens.values))
    real = (tokens.ranks.gather(1, order) >= 0)[:, None].expand(-1, heads, -1)
    norms = torch.stack([x.float().norm(dim=3).masked_fill(~real, 0.0) for x in (keys, values)], 2)
    levels = torch.where(torch.stack([real, real & (norms[:, :, 1] > 0)], 2), 0, GONE).to(torch.int8)
    if sets is None:
        drawn = torch.zeros(rows, heads, dtype=torch.int64, device=keys.device)
        sets = Sets(
            keys[:, :, :0], values[:, :, :0], levels[..., :0], keys.new_zeros(rows, heads, 2, dtype=torch.float32),
            drawn, drawn[..., None].repeat(1, 1, 2),
        )  # fmt: skip
    return Sets(
        torch.cat([sets.keys, keys], 2),
        torch.cat([sets.values, values], 2),
        torch.cat([sets.levels, levels], 3),
        torch.cat([sets.radii[..., None], norms], 3).amax(3),
        sets.drawn,
        sets.troubles,
    )


def _reserve(sets: Sets, batches: list[Batch]) -> Int64[Tensor, " l"]:
    """The first number of every batch: a lane uses each of its numbers once."""
    drawn, starts = sets.drawn.flatten().tolist(), list[int]()
    for batch in batches:
        starts.append(drawn[batch.lane])
        drawn[batch.lane] += len(batch.places)
    sets.drawn = torch.tensor(drawn, device=sets.drawn.device).view_as(sets.drawn)
    return torch.tensor(starts, device=sets.drawn.device)


@dataclass(frozen=True)
class Halved:
    """What is kept of every batch, how many of its walks failed, and whether coins decided."""

    kept: Bool[Tensor, "l n"]
    failed: Int64[Tensor, " l"]
    tossed: Int64[Tensor, " l"]


def halve(
    keys: Float[Tensor, "l n d"],
    values: Float[Tensor, "l n e"],
    real: Bool[Tensor, "l n"],
    draw: Callable[[Tensor, int], Tensor],
    scale: float,
    theorem: Theorem,
) -> Halved:
    """Halve batches of real tokens by the walk; `draw(batches, attempt)` are numbers [batches, n].

    A walk that fails begins again with fresh numbers, RETRIES times; after that a random half is kept. So it is of
    fewer than BLOCK tokens: a walk as short tosses coins, and the smaller half of them has far too little mass.
    """
    sizes = real.sum(1)
    bounds = theorem.constant * torch.log(sizes / theorem.failure)
    kept, failed, open_ = torch.zeros_like(real), torch.zeros_like(sizes), sizes >= BLOCK
    for attempt in range(1 + RETRIES):
        todo = open_.nonzero()[:, 0]
        if todo.numel():
            found, lost = keep_smaller(keys[todo], values[todo], real[todo], draw(todo, attempt), scale, bounds[todo])
            kept[todo] = found & ~lost[:, None]
            failed[todo] += lost.long()
            open_[todo] = lost
    tossed = open_ | (sizes < BLOCK)
    coins = draw(torch.arange(len(keys), device=keys.device), 1 + RETRIES)
    return Halved(torch.where(tossed[:, None], random_half(coins, real), kept), failed, tossed.long())


def random_half(numbers: Float[Tensor, "l n"], real: Bool[Tensor, "l n"]) -> Bool[Tensor, "l n"]:
    """Those with the smaller numbers; of an odd count the middle one with a chance of one half."""
    order = numbers.masked_fill(~real, 2.0).sort(dim=1)
    rank = order.indices.sort(dim=1).indices
    sizes = real.sum(1)
    # The last digits of the first number decide over the middle one: its first digits decide over its place.
    extra = (numbers[:, 0] * (1 << 20)) % 1 < 0.5
    return rank < (sizes // 2 + (extra & (sizes % 2 == 1)))[:, None]


def next_batches(
    levels: Int8[Tensor, "2 n"], buckets: Float[Tensor, "2 n"], block: int, excess: int
) -> list[tuple[int, Int64[Tensor, " m"]]]:
    """What to halve next in one row and head that holds `excess` tokens too many: sets, and places in them.

    Full batches of the lowest level that has any, the oldest first, twice as many tokens as have to go: a token goes
    only if it is in neither set any more. Where no batch is full, all of the largest.
    """
    groups = dict[tuple[int, int, float], Tensor]()  # by level, set and bucket
    for which in SETS:
        for level in levels[which].unique().tolist():
            here = levels[which] == level
            if level != GONE:
                for bucket in buckets[which][here].unique().tolist():
                    groups[level, which, bucket] = (here & (buckets[which] == bucket)).nonzero()[:, 0]
    full = [level for (level, _, _), places in groups.items() if len(places) >= block]
    if not full:
        (_, which, _), places = max(groups.items(), key=lambda group: len(group[1]))
        return [(which, places)]
    batches = [
        (which, batch)
        for (level, which, _), places in groups.items()
        if level == min(full)
        for batch in places[: len(places) // block * block].split(block)
        if len(batch)
    ]
    return sorted(batches, key=lambda batch: int(batch[1][-1]))[: -(-2 * excess // block)]


def fitting(block: int, room: int) -> int:
    """The largest power of two of which eight fit, up to `block`: tokens that wait for a whole one need room too."""
    return min(block, max(BLOCK, 1 << (max(1, room // 8).bit_length() - 1)))
