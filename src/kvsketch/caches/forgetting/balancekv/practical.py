"""BalanceKV as in its experiments: blocks of tokens are halved, again and again, so that both halves answer alike.

The one-head algorithms are in `algorithms/balancekv.py`; `levels.py` decides what is halved, and when. The augmented
form sets some tokens apart; they lie before all levels.
"""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.chooser import Chooser, ChosenEntries, Held, Kept, Pool, check_vectors
from kvsketch.caches.core.method import Holding
from kvsketch.caches.core.storage import listed_on, sent_to
from kvsketch.caches.core.tokens import Arriving
from kvsketch.caches.forgetting.balancekv.levels import Levels, Schedule
from kvsketch.kernels.balanced_walk import gathered, keep_half, keep_half_of
from kvsketch.kernels.directions import total, towards
from kvsketch.kernels.draws import uniforms
from kvsketch.kernels.places import in_front, least_in_front

LOG_2 = math.log(2)
WALKS = {"greedy": 1e6, "fair": 0.0}  # how hard a sign leans against the sum so far, relative to a mean product


@dataclass(frozen=True)
class Halving:
    """How blocks are halved in a layer; `apart` is the share of the room for tokens that are not halved (0: none)."""

    block: int
    walk: str
    sharpness: float | int
    apart: float
    seed: int
    layer: int


@dataclass(frozen=True)
class Blocks:
    """Blocks of all lanes that are halved together, padded to the longest; see `keep_half_of`."""

    keys: Float[Tensor, "l n d"]
    values: Float[Tensor, "l n e"]
    index: Int64[Tensor, "l w"]
    numbers: Float[Tensor, "l c m"]
    sizes: Int64[Tensor, "l c"]


Steps = Generator[Blocks, Bool[Tensor, "m n"], Kept]  # asks which half of each block to keep, level by level


class Halves(Chooser):
    """Tokens in levels; how many tokens came in each call decides what is halved, and when."""

    shared = ("held", "halved", "apart")

    def __init__(self, options: Halving, room: Callable[[Budget, int], int]) -> None:
        self.options, self.room = options, room
        self.per_lane = {"key_sum": torch.float64} if options.apart else {}  # of all keys that came

    def write(self, holdings: Sequence[tuple[Holding, Arriving]]) -> None:
        """Halve the blocks of all bundles in one walk, which takes as many steps as a block has tokens."""
        going = list[tuple[ChosenEntries, Held, Arriving, Steps, Blocks]]()

        def go_on(holding: ChosenEntries, held: Held, new: Arriving, steps: Steps, kept: Tensor | None) -> None:
            try:
                going.append((holding, held, new, steps, next(steps) if kept is None else steps.send(kept)))
            except StopIteration as end:
                holding.keep(end.value, held, new)

        for holding, new in holdings:
            assert isinstance(holding, ChosenEntries), "a chooser has no others"
            held = holding.entries(new)
            go_on(holding, held, new, self.steps(held, new, holding.budget), None)
        while going:
            now, going[:] = list(going), []
            halves = self._halve([blocks for *_, blocks in now])
            for (holding, held, new, steps, _), kept in zip(now, halves, strict=True):
                go_on(holding, held, new, steps, kept)

    def choose(self, held: Held, new: Arriving, budget: Budget) -> Kept:
        """Take the tokens and halve what does not fit any more."""
        steps = self.steps(held, new, budget)
        try:
            blocks = next(steps)
            while True:
                blocks = steps.send(self._halve([blocks])[0])
        except StopIteration as end:
            kept: Kept = end.value
            return kept

    def steps(self, held: Held, new: Arriving, budget: Budget) -> Steps:
        """Level by level: tokens that remain of one level's blocks join the next, and are halved there in turn."""
        pool, known = held.with_new(new), _levels(held.numbers)
        schedule = Schedule(self.options.block, lambda count: self.room(budget, count), self.options.apart)
        numbers = torch.arange(pool.count + self.options.block, device=new.keys.device)
        every = numbers[: pool.count].expand(len(new.keys), -1)
        apart, below = every[:, : known.apart], every[:, held.count :]
        per_lane = dict[str, Tensor]()
        if self.options.apart:
            # Keys with the least ⟨k, Σk'⟩ / ‖k‖ point away from all others: the mean stands for the paper's "the rest".
            key_sum = total(new.keys)
            key_sum = held.per_lane["key_sum"] + key_sum if held.per_lane else key_sum
            per_lane = {"key_sum": key_sum}
            along = towards(new.keys, key_sum)
            if known.apart:
                along = torch.cat([towards(held.keys[:, : known.apart], key_sum), along], 1)
            there, most = _joined(apart, below), schedule.apart(new.after)
            order = least_in_front(along, most)
            order = order if there.shape[1] == pool.count else there.gather(1, order)
            apart, below = order[:, :most], order[:, most:]
        after, halvings = schedule.of_call(known, new.before, new.after, below.shape[1], few=new.few)
        remaining = list[Tensor]()
        for level in range(len(after.held)):
            here = _joined(every[:, slice(*known.place_of(level))], below)
            sizes = [size for place, size in halvings if place == level]
            below = here[:, :0]
            if sizes:
                done = known.halved[level] if level < len(known.halved) else 0
                blocks, places = self._blocks(pool, here, sizes, level, done, new.heads, numbers)
                kept = yield blocks
                below = here.gather(1, _places_of(kept.reshape(len(here), -1), places, sum(sizes) // 2))
            remaining.append(here[:, sum(sizes) :])
        counts = [after.apart, *reversed(after.held)]
        levels = [0, *range(len(after.held) - 1, -1, -1)]
        log_masses = sent_to(new.keys.device, torch.tensor(levels, dtype=torch.float32, device="cpu") * LOG_2)
        log_mass = log_masses.repeat_interleave(listed_on(new.keys.device, counts), output_size=sum(counts))
        return Kept(
            _joined(apart, *reversed(remaining)),
            pool=pool,
            log_mass=log_mass[None],
            per_lane=per_lane,
            numbers={"held": list(after.held), "halved": list(after.halved), "apart": after.apart},
        )

    def _blocks(
        self,
        pool: Pool,
        here: Int64[Tensor, "l here"],
        sizes: list[int],
        level: int,
        done: int,
        heads: Int64[Tensor, " l"],
        numbers: Int64[Tensor, " n"],
    ) -> tuple[Blocks, Int64[Tensor, "c size"] | None]:
        """A level's first blocks in all lanes, of these sizes; and their places in it if they are not side by side.

        `numbers` are 0, 1, … Random numbers are drawn by head, level, and how many tokens of the level were halved
        before.
        """
        device, count, most = here.device, sum(sizes), max(sizes)
        starts = [0, *accumulate(sizes[:-1])]
        beside = starts == [*range(0, count, most)]  # all but the last are as long as the longest
        if beside:
            places = numbers[: len(sizes) * most].view(-1, most)
        else:
            places = listed_on(device, starts)[:, None] + numbers[:most]
        index = here[:, :count] if beside else here[:, places.flatten().clamp_max(count - 1)]  # padding is any token
        drawn = uniforms(
            self.options.seed, self.options.layer, heads[:, None, None], level, places + done if done else places
        )
        lengths = listed_on(device, sizes).expand(len(here), -1)
        keys, values, index = pool.among(index)
        return Blocks(keys, values, index, drawn, lengths), None if beside else places

    def _halve(self, each: Sequence[Blocks]) -> list[Bool[Tensor, "m n"]]:
        """Which half to keep of every block, all in one walk; the scale is `sharpness` times the paper's 1/√d."""
        most = max(blocks.numbers.shape[2] for blocks in each)
        scale, gain = float(self.options.sharpness * each[0].keys.shape[2] ** -0.5), WALKS[self.options.walk]
        if len(each) == 1:
            [own] = each
            return [keep_half_of(own.keys, own.values, own.index, own.numbers, own.sizes, scale, gain)]

        def together(parts: Iterable[Tensor]) -> Tensor:
            return torch.cat([F.pad(x, (0, 0) * (x.ndim - 2) + (0, most - x.shape[1])) for x in parts])

        found = (gathered(own.keys, own.values, own.index, *own.numbers.shape[1:]) for own in each)
        keys, values = map(together, zip(*found, strict=True))
        numbers, sizes = (
            together(own.numbers.flatten(0, 1) for own in each),
            torch.cat([own.sizes.flatten() for own in each]),
        )
        parts = keep_half(keys, values, numbers, sizes, scale, gain).split([own.sizes.numel() for own in each])
        return [part[:, : own.numbers.shape[2]] for part, own in zip(parts, each, strict=True)]

    def check(self, held: Held, count: int, budget: Budget) -> None:
        levels = _levels(held.numbers)
        known = (*levels.held, *levels.halved, levels.apart)
        if any(type(number) is not int or number < 0 for number in known):
            raise ValueError(f"levels of {known!s:.80}")
        if levels.total != held.count or levels.mass != count or len(levels.held) != len(levels.halved):
            raise ValueError(f"{held.count} entries of {count} tokens in levels {levels!s:.80}")
        check_vectors(held)

    def details(self, held: Held, count: int) -> dict[str, float]:
        """How many tokens an entry stands for."""
        return {"tokens per entry": count / max(1, held.count)}


def _places_of(
    kept: Bool[Tensor, "l m"], places: Int64[Tensor, "c size"] | None, count: int
) -> Int64[Tensor, "l {count}"]:
    """The places of kept tokens, `count` of each lane, in their order; a GPU is not asked how many."""
    order = in_front(kept)[:, :count]
    return order if places is None else places.flatten()[order]


def _joined(*parts: Int64[Tensor, "l _"]) -> Int64[Tensor, "l n"]:
    """Numbers of tokens, one part after another; not copied if only one part has any."""
    some = [part for part in parts if part.shape[1]]
    return some[0] if len(some) == 1 else torch.cat(parts, 1)


def _levels(numbers: dict[str, list[int]]) -> Levels:
    """The levels that lanes were in, or none yet."""
    if not numbers:
        return Levels()
    held, halved, apart = (numbers[name] for name in ("held", "halved", "apart"))
    return Levels(tuple(held), tuple(halved), apart)  # type: ignore[arg-type]
