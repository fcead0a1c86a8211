"""BalanceKV as in its experiments: blocks of tokens are halved so that both halves answer alike, again and again.

The one-head algorithms are in `algorithms/balancekv.py`. A stream is held in levels, the oldest and most often halved
tokens first:

    [ level L | … | level 1 | level 0 ]      a token of level l stands for 2ˡ

New tokens come to level 0. Where there is no room, the oldest block of the lowest level that has one is halved, and
what remains of it is the newest of the next level: it stays where it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.algorithms.draws import uniforms
from kvsketch.attention import NO_MASS, WeightedTokens
from kvsketch.caches.base import (
    BLOCK,
    EntriesPast,
    LeavingTokens,
    Past,
    WindowedConfig,
    check_choice,
    check_count,
    check_seed,
)
from kvsketch.caches.budget import Budget
from kvsketch.caches.storage import columns, storage_bytes
from kvsketch.kernels.balanced_walk import keep_half

LOG_2 = 0.6931471805599453
LEAST = 64  # tokens that are halved together, where there are as many: fewer cannot balance much
WALKS = {"greedy": 1e6, "fair": 0.0}  # how hard a sign leans against the sum so far, on the mean product


@dataclass(frozen=True, kw_only=True)
class BalanceKV(WindowedConfig):
    """Keeps sinks, window, and halves of halves of the rest that answer like the whole (discrepancy theory).

    Blocks of `block` tokens are halved, smaller ones while the budget is small. `walk="greedy"` takes the sign that
    brings the sum back; `walk="fair"` tosses coins, to show what the walk is worth.
    """

    name: ClassVar[str] = "balancekv"

    block: int = 256
    walk: str = "greedy"
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("block", self.block, least=BLOCK)
        if self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two, got {self.block}")
        check_seed(self.seed)
        check_choice("walk", self.walk, WALKS)
        super().__post_init__()

    def new_past(self, budget: Budget, layer: int) -> Past:
        return BalanceKVPast(self, budget, layer)


@dataclass(frozen=True)
class Levels:
    """How many tokens a row holds at each level, and how many of each level it has halved so far."""

    held: tuple[int, ...] = (0,)
    halved: tuple[int, ...] = (0,)

    def after(self, new: int, room: int, block: int) -> "tuple[Levels, list[tuple[int, int]]]":
        """Take `new` tokens, and halve until all fit: the levels then, and what was halved as (level, size)."""
        held, halved = list(self.held), list(self.halved)
        held[0] += new
        done = list[tuple[int, int]]()
        while (excess := sum(held) - room) > 0:
            level, size = _long_call(held, block, excess) if new >= block else _trickle(held, _fitting(block, room))
            if level + 1 == len(held):
                held.append(0)
                halved.append(0)
            held[level] -= size
            held[level + 1] += size // 2
            halved[level] += size
            done.append((level, size))
        return Levels(tuple(held), tuple(halved)), done


def _long_call(held: Sequence[int], block: int, excess: int) -> tuple[int, int]:
    """The lowest level that has some tokens, and no more of them than have to go: weights stay as even as they can."""
    level = next((level for level, count in enumerate(held) if count >= LEAST), _fullest(held))
    return level, min(block, held[level] // 2 * 2, max(2 * excess, LEAST))


def _trickle(held: Sequence[int], block: int) -> tuple[int, int]:
    """The lowest level that has a whole block: what has just come waits for one. Where none has, the fullest level."""
    level = next((level for level, count in enumerate(held) if count >= block), _fullest(held))
    return level, min(block, held[level] // 2 * 2)


def _fitting(block: int, room: int) -> int:
    """The largest power of two of which four fit, up to `block`: levels that wait need room too."""
    return min(block, max(BLOCK, 1 << (max(1, room // 4).bit_length() - 1)))


def _fullest(held: Sequence[int]) -> int:
    return max(range(len(held)), key=lambda level: held[level])


@dataclass
class Held:
    """What rows hold, the highest level first."""

    keys: Float[Tensor, "b h n d"]
    values: Float[Tensor, "b h n e"]
    levels: list[Levels]  # of each row


class BalanceKVPast(EntriesPast):
    """Levels of all rows and heads. What is halved, and when, is decided by the tokens that a row got in each call."""

    def __init__(self, config: BalanceKV, budget: Budget, layer: int) -> None:
        self.config, self.budget, self.layer = config, budget, layer
        self.counts: list[int] = []  # tokens written, per row
        self.held: Held | None = None
        self.log_mass: Tensor | None = None  # [b, 1, n]

    def write(self, tokens: LeavingTokens) -> None:
        """Take the tokens and halve what does not fit any more, rows that stand alike together."""
        rows = len(tokens.counts)
        before = self.counts or [0] * rows
        levels = [Levels()] * rows if self.held is None else self.held.levels
        state = [(before[row], tokens.counts[row], levels[row]) for row in range(rows)]
        order = sorted(range(rows), key=lambda row: repr(state[row]))
        parts = list[tuple[list[int], Tensor, Tensor, Levels]]()
        for (earlier, count, known), alike in groupby(order, key=lambda row: state[row]):
            group = list(alike)
            parts.append((group, *self._write_alike(tokens, group, earlier, count, known)))
        self.counts = list(tokens.counts)
        self.held = _side_by_side(parts, rows)
        self._weigh()

    def _write_alike(
        self, tokens: LeavingTokens, rows: list[int], earlier: int, count: int, known: Levels
    ) -> tuple[Tensor, Tensor, Levels]:
        """Rows that hold as many tokens at every level, and get as many new ones."""
        new = (tokens.ranks[rows] >= 0).long().sort(dim=1, descending=True, stable=True).indices[:, : count - earlier]
        fresh = [columns(x[rows], new) for x in (tokens.keys, tokens.values)]
        after, halvings = self._schedule(known, earlier, count)
        # Level by level: what is left of one level's blocks joins the next, and is halved there in turn.
        below = tuple(fresh)
        remaining = list[tuple[Tensor, ...]]()
        for level in range(len(after.held)):
            here = below if self.held is None else self._join(rows, known, level, below)
            sizes = [size for place, size in halvings if place == level]
            done = known.halved[level] if level < len(known.halved) else 0
            below = self._halve(here, sizes, level, done)
            taken = sum(sizes)
            remaining.append(tuple(x[:, :, taken:] for x in here))
        keys, values = (torch.cat([level[i] for level in reversed(remaining)], 2) for i in range(2))
        return keys, values, after

    def _schedule(self, levels: Levels, earlier: int, count: int) -> tuple[Levels, list[tuple[int, int]]]:
        """All halvings of a call: of its tokens together where there are many, else as they come."""
        step = count - earlier if count - earlier >= self.config.block else BLOCK
        halvings = list[tuple[int, int]]()
        for seen in range(earlier + step, count + 1, step):
            levels, done = levels.after(step, self.config.room(self.budget, seen), self.config.block)
            halvings += done
        return levels, halvings

    def _join(self, rows: list[int], known: Levels, level: int, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the rows hold of a level, and the new tokens of it."""
        assert self.held is not None
        if level >= len(known.held):
            return new
        start = sum(known.held[level + 1 :])
        old = (x[rows, :, start : start + known.held[level]] for x in (self.held.keys, self.held.values))
        return tuple(torch.cat(pair, 2) for pair in zip(old, new, strict=True))

    def _halve(self, here: tuple[Tensor, ...], sizes: list[int], level: int, done: int) -> tuple[Tensor, ...]:
        """The halves of the first blocks, of these sizes, in order; blocks of one size are halved together."""
        keys, values = here
        start, kept = 0, list[tuple[Tensor, ...]]([(keys[:, :, :0], values[:, :, :0])])
        for size, alike in groupby(sizes):
            count = len(list(alike))
            part = slice(start, start + count * size)
            blocks = [x[:, :, part].unflatten(2, (count, size)) for x in (keys, values)]
            drawn = self._draw(keys.shape[:2], level, done + start, count, size, keys.device)
            index = keep_half(
                blocks[0].flatten(0, 2), blocks[1].flatten(0, 2), drawn.flatten(0, 2), self._scale(keys), self._gain
            ).unflatten(0, (*keys.shape[:2], count))
            kept.append(tuple(_of_blocks(x, index) for x in blocks))
            start += count * size
        return tuple(torch.cat([pair[i] for pair in kept], 2) for i in range(2))

    @property
    def _gain(self) -> float:
        return WALKS[self.config.walk]

    @staticmethod
    def _scale(keys: Tensor) -> float:
        """The paper's 1/√d: a past is written before it is asked, and does not know the model's own scale."""
        return float(keys.shape[-1] ** -0.5)

    def _draw(
        self, lanes: Sequence[int], level: int, first: int, count: int, size: int, device: torch.device
    ) -> Tensor:
        """Numbers [b, h, count, size], by head, level, and how many tokens of the level were halved before."""
        head = torch.arange(lanes[1], device=device)[:, None]
        place = torch.arange(first, first + count * size, device=device)
        drawn = uniforms(self.config.seed, self.layer, head, level, place)
        return drawn.view(1, lanes[1], count, size).expand(lanes[0], -1, -1, -1)

    # -- reading and state

    def entries(self) -> WeightedTokens | None:
        """The tokens held, each with the log of the number it stands for."""
        if self.held is None:
            return None
        return WeightedTokens(self.held.keys, self.held.values, self.log_mass)

    def _weigh(self) -> None:
        assert self.held is not None
        weights = torch.full((len(self.counts), self.held.keys.shape[2]), NO_MASS)
        for row, levels in enumerate(self.held.levels):
            at = torch.arange(len(levels.held) - 1, -1, -1).repeat_interleave(torch.tensor(levels.held[::-1]))
            weights[row, : len(at)] = at * LOG_2
        self.log_mass = weights[:, None].to(self.held.keys.device)

    def count_entries(self) -> Int64[Tensor, "b h"] | None:
        if self.held is None or self.log_mass is None:
            return None
        return (self.log_mass > NO_MASS).sum(-1).expand(-1, self.held.keys.shape[1])

    def details(self) -> dict[str, float]:
        """How many tokens an entry stands for."""
        if self.held is None:
            return {}
        return {"tokens per entry": sum(self.counts) / max(1, sum(sum(levels.held) for levels in self.held.levels))}

    @property
    def nbytes(self) -> int:
        return storage_bytes([*self.tensors().values(), self.log_mass])

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.held is None else {"keys": self.held.keys, "values": self.held.values}

    def numbers(self) -> dict[str, list[int]]:
        found = {"counts": self.counts}
        levels = [] if self.held is None else self.held.levels
        for level in range(max((len(row.held) for row in levels), default=0)):
            found[f"held {level}"] = [row.held[level] if level < len(row.held) else -1 for row in levels]
            found[f"halved {level}"] = [row.halved[level] if level < len(row.held) else -1 for row in levels]
        return found

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, list[int]]) -> None:
        self.counts = list(numbers["counts"])
        self.held = self.log_mass = None
        if tensors:
            rows = range(len(self.counts))
            levels = [Levels(*(tuple(_column(numbers, name, row)) for name in ("held", "halved"))) for row in rows]
            self.held = Held(tensors["keys"], tensors["values"], levels)
            self._weigh()


def _column(numbers: dict[str, list[int]], name: str, row: int) -> Iterator[int]:
    """A row's numbers for all levels that it has."""
    level = 0
    while f"{name} {level}" in numbers and numbers[f"{name} {level}"][row] >= 0:
        yield numbers[f"{name} {level}"][row]
        level += 1


def _of_blocks(x: Float[Tensor, "b h c n d"], index: Int64[Tensor, "b h c m"]) -> Float[Tensor, "b h cm d"]:
    """The tokens with these numbers, block after block."""
    return x.gather(3, index[..., None].expand(*index.shape, x.shape[4])).flatten(2, 3)


def _side_by_side(parts: list[tuple[list[int], Tensor, Tensor, Levels]], rows: int) -> Held:
    """Rows of all groups in one buffer, as wide as the fullest."""
    width = max(keys.shape[2] for _, keys, _, _ in parts)
    if len(parts) == 1:
        _, keys, values, levels = parts[0]
        return Held(keys, values, [levels] * rows)
    _, keys, values, _ = parts[0]
    held = Held(
        keys.new_zeros(rows, keys.shape[1], width, keys.shape[3]),
        values.new_zeros(rows, values.shape[1], width, values.shape[3]),
        [Levels()] * rows,
    )
    for group, keys, values, levels in parts:
        held.keys[group, :, : keys.shape[2]] = keys
        held.values[group, :, : values.shape[2]] = values
        for row in group:
            held.levels[row] = levels
    return held
