"""BalanceKV as in its experiments: blocks of tokens are halved so that both halves answer alike, again and again.

The one-head algorithms are in `algorithms/balancekv.py`. A stream is held in levels, the oldest and most often halved
tokens first:

    [ level L | … | level 1 | level 0 ]      a token of level l stands for 2ˡ

New tokens come to level 0. Where there is no room, the oldest tokens of a level are halved, and what remains of them is
the newest of the next level: it stays where it is. A long call halves from the lowest level up; what comes a few tokens
at a time waits for a whole block. The augmented form sets some tokens apart, before all levels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.algorithms.draws import uniforms
from kvsketch.attention import NO_MASS, WeightedTokens
from kvsketch.caches.balancekv_theorem import LOG_2, Theorem, TheoremPast, fitting
from kvsketch.caches.base import (
    BLOCK,
    EntriesPast,
    LeavingTokens,
    Past,
    WindowedConfig,
    check_choice,
    check_count,
    check_number,
    check_seed,
)
from kvsketch.caches.budget import Budget
from kvsketch.caches.storage import KeyValues, columns, in_front, made_of, side_by_side, storage_bytes
from kvsketch.kernels.balanced_walk import keep_half

NUMBERED = ("held", "halved")  # what Levels knows of every level
LEAST = 64  # tokens that are halved together, where there are as many: fewer cannot balance much
OPTIONS = {
    "practical": ("walk", "sharpness", "augmented", "apart"),
    "faithful": ("constant", "failure", "epsilon"),
}  # by mode
WALKS = {"greedy": 1e6, "fair": 0.0}  # how hard a sign leans against the sum so far, on the mean product


@dataclass(frozen=True, kw_only=True)
class BalanceKV(WindowedConfig):
    """Keeps sinks, window, and halves of halves of the rest that answer like the whole (discrepancy theory).

    Blocks of `block` tokens are halved; smaller ones at the end of a call, and where a stream has little room.
    `mode="practical"`, the form of the experiments: exactly half of a block is kept. `walk="greedy"` takes the sign
    that brings the sum back; `walk="fair"` tosses coins, to show what the walk is worth. `sharpness` is a factor on the
    walk's logits: below 1, keys farther apart balance each other. `augmented=True` keeps the
    tokens whose keys point away from all others out of it, in the share `apart` of the room.
    `mode="faithful"`, the form of the theorem: buckets of value norms, a set of tokens for each sum, and signs drawn
    with c = `constant` · log(n/`failure`); buckets are erased with the precision `epsilon`.
    """

    name: ClassVar[str] = "balancekv"

    mode: str = "practical"
    block: int = 256
    walk: str = "greedy"
    sharpness: float | int = 1
    augmented: bool = False
    apart: float = 0.5
    constant: float | int = 30
    failure: float = 0.01
    epsilon: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, OPTIONS)
        for mode, names in OPTIONS.items():
            for name in names if mode != self.mode else ():
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(f"{name} is an option of mode={mode!r}, and mode is {self.mode!r}")
        check_count("block", self.block, least=BLOCK, most=1 << 14)
        if self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two, got {self.block}")
        check_seed(self.seed)
        check_choice("walk", self.walk, WALKS)
        if not isinstance(self.augmented, bool):
            raise ValueError(f"augmented must be True or False, got {self.augmented!r}")
        check_number("sharpness", self.sharpness, above=0)
        check_number("apart", self.apart, above=0, below=1)
        if self.apart != type(self).apart and not self.augmented:
            raise ValueError(f"apart is an option of augmented=True, got apart={self.apart!r} without it")
        check_number("constant", self.constant, above=0)
        check_number("failure", self.failure, above=0, below=1)
        check_number("epsilon", self.epsilon, above=0)
        super().__post_init__()

    def new_past(self, budget: Budget, layer: int) -> Past:
        if self.mode == "practical":
            return BalanceKVPast(self, budget, layer)
        theorem = Theorem(self.block, self.constant, self.failure, self.epsilon, self.seed, layer)
        return TheoremPast(theorem, lambda count: self.room(budget, count))


@dataclass(frozen=True)
class Levels:
    """How many tokens a row holds at each level and apart, and how many of each level it has halved so far."""

    held: tuple[int, ...] = (0,)
    halved: tuple[int, ...] = (0,)
    apart: int = 0

    @property
    def total(self) -> int:
        """Tokens held."""
        return self.apart + sum(self.held)

    @property
    def mass(self) -> int:
        """Tokens that these stand for."""
        return self.apart + sum(held << level for level, held in enumerate(self.held))

    def place_of(self, level: int) -> tuple[int, int]:
        """Where a level begins and ends; one that is not there is empty."""
        start = self.apart + sum(self.held[level + 1 :])
        return start, start + sum(self.held[level : level + 1])

    def after(self, new: int, room: int, block: int) -> "tuple[Levels, list[tuple[int, int]]]":
        """Take `new` tokens, and halve until all fit: the levels then, and what was halved as (level, size)."""
        held, halved = list(self.held), list(self.halved)
        held[0] += new
        done = list[tuple[int, int]]()
        while (excess := self.apart + sum(held) - room) > 0:
            level, size = _long_call(held, block, excess) if new >= block else _trickle(held, fitting(block, room))
            if level + 1 == len(held):
                held.append(0)
                halved.append(0)
            held[level] -= size
            held[level + 1] += size // 2
            halved[level] += size
            done.append((level, size))
        return Levels(tuple(held), tuple(halved), self.apart), done


def _long_call(held: Sequence[int], block: int, excess: int) -> tuple[int, int]:
    """The lowest level with tokens, and of them what has to go, or LEAST: weights stay as even as they can."""
    level = next((level for level, count in enumerate(held) if count > 1), _fullest(held))
    return level, min(block, held[level] // 2 * 2, max(2 * excess, LEAST))


def _trickle(held: Sequence[int], block: int) -> tuple[int, int]:
    """The lowest level that has a whole block: what has just come waits for one. Where none has, the fullest level."""
    level = next((level for level, count in enumerate(held) if count >= block), _fullest(held))
    return level, min(block, held[level] // 2 * 2)


def _fullest(held: Sequence[int]) -> int:
    return max(range(len(held)), key=lambda level: held[level])


@dataclass
class Held:
    """What rows hold: what is set apart, and then the levels, the highest first."""

    tokens: KeyValues
    levels: list[Levels]  # of each row

    def of_rows(self, rows: list[int]) -> KeyValues:
        """The tokens of some rows, which hold as many."""
        width = self.levels[rows[0]].total
        return KeyValues(self.tokens.keys[rows, :, :width], self.tokens.values[rows, :, :width])


class BalanceKVPast(EntriesPast):
    """Levels of all rows and heads. What is halved, and when, is decided by the tokens that a row got in each call."""

    def __init__(self, config: BalanceKV, budget: Budget, layer: int) -> None:
        self.config, self.budget, self.layer = config, budget, layer
        self.counts: list[int] = []  # tokens written, per row
        self.held: Held | None = None
        self.key_sum: Tensor | None = None  # [b, h, d], of all keys written, where some are set apart
        self.log_mass: Tensor | None = None  # [b, 1, n]

    def write(self, tokens: LeavingTokens) -> None:
        """Take the tokens and halve what does not fit any more, rows that stand alike together."""
        rows = len(tokens.counts)
        before = self.counts or [0] * rows
        levels = [Levels()] * rows if self.held is None else self.held.levels
        if self.config.augmented:
            added = tokens.keys.double().masked_fill((tokens.ranks < 0)[:, None, :, None], 0.0).sum(2)
            self.key_sum = added if self.key_sum is None else self.key_sum + added
        state = [(before[row], tokens.counts[row], levels[row]) for row in range(rows)]
        order = sorted(range(rows), key=lambda row: repr(state[row]))
        parts = list[tuple[list[int], KeyValues, Levels]]()
        for (earlier, count, known), alike in groupby(order, key=lambda row: state[row]):
            group = list(alike)
            parts.append((group, *self._write_alike(tokens, group, earlier, count, known)))
        self.counts = list(tokens.counts)
        self.held = _together(parts, rows)
        self._weigh()

    def _write_alike(
        self, tokens: LeavingTokens, rows: list[int], earlier: int, count: int, known: Levels
    ) -> tuple[KeyValues, Levels]:
        """Rows that hold as many tokens at every level, and get as many new ones."""
        below = _of_rows(tokens, rows, count - earlier)
        old = below.part(0, 0) if self.held is None else self.held.of_rows(rows)
        apart = old.part(0, known.apart)
        if self.config.augmented:
            apart, below = self._set_apart(rows, apart, below, count)
        after, halvings = self._schedule(known, earlier, count, below.count)
        # Level by level: what is left of one level's blocks joins the next, and is halved there in turn.
        remaining = list[KeyValues]()
        for level in range(len(after.held)):
            there = old.part(*known.place_of(level))
            here = side_by_side([there, below]) if there.count else below
            sizes = [size for place, size in halvings if place == level]
            done = known.halved[level] if level < len(known.halved) else 0
            below = self._halve(here, sizes, level, done)
            remaining.append(here.part(sum(sizes), here.count))
        return side_by_side([apart, *reversed(remaining)]), after

    def _set_apart(self, rows: list[int], apart: KeyValues, new: KeyValues, count: int) -> tuple[KeyValues, KeyValues]:
        """Those whose keys point away from the mean of all keys so far, and the rest, each in their order.

        The mean stands for "the rest" of the paper: the least ⟨k, Σk'⟩ / ‖k‖ is the least mean of correlations.
        """
        assert self.key_sum is not None
        there = side_by_side([apart, new])
        cosines = torch.einsum("bhnd,bhd->bhn", F.normalize(there.keys.double(), dim=3), self.key_sum[rows])
        order = cosines.sort(dim=2, stable=True).indices
        most, rest = (part.sort(dim=2).values for part in order.tensor_split([self._apart(count)], dim=2))
        return there.choose(most), there.choose(rest)

    def _apart(self, count: int) -> int:
        """How many tokens are set apart when `count` came."""
        room = self.config.room(self.budget, count)
        return max(0, min(int(self.config.apart * room), room - BLOCK)) if self.config.augmented else 0

    def _schedule(self, levels: Levels, earlier: int, count: int, new: int) -> tuple[Levels, list[tuple[int, int]]]:
        """All halvings of a call, `new` of whose tokens come to the levels: together if many, else as they come."""
        whole = self.config.augmented or count - earlier >= self.config.block
        step = max(1, count - earlier) if whole else BLOCK
        halvings = list[tuple[int, int]]()
        for start in range(earlier, count, step):
            seen = min(start + step, count)
            levels = replace(levels, apart=min(self._apart(seen), seen))
            came = new if whole else seen - start
            levels, done = levels.after(came, self.config.room(self.budget, seen), self.config.block)
            halvings += done
        return levels, halvings

    def _halve(self, here: KeyValues, sizes: list[int], level: int, done: int) -> KeyValues:
        """The halves of the first blocks, of these sizes, in order, all blocks together."""
        if not sizes:
            return here.part(0, 0)
        rows, heads, device = *here.keys.shape[:2], here.keys.device
        lengths = torch.tensor(sizes, device=device)
        starts = lengths.cumsum(0) - lengths
        places = starts[:, None] + torch.arange(max(sizes), device=device)  # [blocks, size]
        real = places < (starts + lengths)[:, None]
        drawn = self._draw(heads, level, done + places, rows)
        blocks = here.choose(places.masked_fill(~real, 0).flatten().expand(rows, heads, -1))
        keys, values = (x.unflatten(2, places.shape).flatten(0, 2) for x in (blocks.keys, blocks.values))
        every = lengths.repeat(rows * heads)
        kept = keep_half(keys, values, drawn.flatten(0, 2), every, self._scale(keys.shape[2]), WALKS[self.config.walk])
        index = places.expand(rows, heads, -1, -1)[kept.view(rows, heads, *places.shape)]
        return here.choose(index.view(rows, heads, -1))

    def _scale(self, width: int) -> float:
        """The paper's 1/√d: a past is written before it is asked, and does not know the model's own scale."""
        return float(self.config.sharpness * width**-0.5)

    def _draw(self, heads: int, level: int, places: Int64[Tensor, "c n"], rows: int) -> Float[Tensor, "b h c n"]:
        """Numbers by head, level, and how many tokens of the level were halved before; the same for all rows."""
        head = torch.arange(heads, device=places.device)[:, None, None]
        return uniforms(self.config.seed, self.layer, head, level, places).expand(rows, -1, -1, -1)

    # -- reading and state

    def entries(self) -> WeightedTokens | None:
        """The tokens held, each with the log of the number it stands for."""
        if self.held is None:
            return None
        return WeightedTokens(self.held.tokens.keys, self.held.tokens.values, self.log_mass)

    def _weigh(self) -> None:
        assert self.held is not None
        weights = torch.full((len(self.counts), self.held.tokens.count), NO_MASS)
        for row, levels in enumerate(self.held.levels):
            weights[row, : levels.total] = 0.0
            for level in range(len(levels.held)):
                weights[row, slice(*levels.place_of(level))] = level * LOG_2
        self.log_mass = weights[:, None].to(self.held.tokens.keys.device)

    def count_entries(self) -> Int64[Tensor, "b h"] | None:
        if self.held is None or self.log_mass is None:
            return None
        return (self.log_mass > NO_MASS).sum(-1).expand(-1, self.held.tokens.keys.shape[1])

    def details(self) -> dict[str, float]:
        """How many tokens an entry stands for."""
        if self.held is None:
            return {}
        return {"tokens per entry": sum(self.counts) / max(1, sum(levels.total for levels in self.held.levels))}

    @property
    def nbytes(self) -> int:
        return storage_bytes([*self.tensors().values(), self.log_mass])

    def tensors(self) -> dict[str, Tensor]:
        if self.held is None:
            return {}
        state = {"keys": self.held.tokens.keys, "values": self.held.tokens.values}
        return state if self.key_sum is None else state | {"key_sum": self.key_sum}

    def numbers(self) -> dict[str, list[int]]:
        found = {"counts": self.counts}
        levels = [] if self.held is None else self.held.levels
        if self.config.augmented:
            found["apart"] = [row.apart for row in levels]
        for level in range(max((len(row.held) for row in levels), default=0)):
            for name in NUMBERED:
                known = [getattr(row, name) for row in levels]
                found[f"{name} {level}"] = [of_row[level] if level < len(of_row) else -1 for of_row in known]
        return found

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, list[int]]) -> None:
        self.counts = list(numbers["counts"])
        self.held = self.log_mass = None
        self.key_sum = tensors.get("key_sum")
        if tensors:
            apart = numbers.get("apart", [0] * len(self.counts))
            held, halved = ([tuple(_column(numbers, name, row)) for row in range(len(apart))] for name in NUMBERED)
            levels = [Levels(*row) for row in zip(held, halved, apart, strict=True)]
            tokens = made_of(KeyValues, {name: tensors[name] for name in ("keys", "values")})
            longest = max(row.total for row in levels)
            alike = all(len(row.held) == len(row.halved) and row.apart >= 0 for row in levels)
            if not alike or longest > tokens.count or [row.mass for row in levels] != self.counts:
                raise ValueError(f"{tokens.count} entries of rows that hold {levels!s:.80}")
            kept = tokens.part(0, max(1, longest))  # a row that has gone may have held more
            self.held = Held(KeyValues(kept.keys.contiguous(), kept.values.contiguous()), levels)
            self._weigh()


def _of_rows(tokens: LeavingTokens, rows: list[int], count: int) -> KeyValues:
    """The tokens of some rows, which have so many each."""
    if len(rows) == len(tokens.counts) and count == tokens.ranks.shape[1]:
        return KeyValues(tokens.keys, tokens.values)
    order = in_front(tokens.ranks[rows] >= 0)[:, :count]
    return KeyValues(*(columns(x[rows], order) for x in (tokens.keys, tokens.values)))


def _column(numbers: dict[str, list[int]], name: str, row: int) -> Iterator[int]:
    """A row's numbers for all levels that it has."""
    level = 0
    while f"{name} {level}" in numbers and numbers[f"{name} {level}"][row] >= 0:
        yield numbers[f"{name} {level}"][row]
        level += 1


def _together(parts: list[tuple[list[int], KeyValues, Levels]], rows: int) -> Held:
    """Rows of all groups in one buffer, as wide as the fullest."""
    _, first, levels = parts[0]
    if len(parts) == 1:
        return Held(first, [levels] * rows)
    width = max(part.count for _, part, _ in parts)
    keys, values = (x.new_zeros(rows, x.shape[1], width, x.shape[3]) for x in (first.keys, first.values))
    held = Held(KeyValues(keys, values), [Levels()] * rows)
    for group, part, levels in parts:
        keys[group, :, : part.count] = part.keys
        values[group, :, : part.count] = part.values
        for row in group:
            held.levels[row] = levels
    return held
