"""Which tokens BalanceKV halves, and when: token counts alone decide.

A stream is held in levels, the oldest and most often halved tokens first:

    [ apart | level L | … | level 1 | level 0 ]      a token of level l stands for 2ˡ

New tokens come to level 0. When there is no room, the oldest tokens of a level are halved; those that remain become the
newest of the next level, and stay where they are. A call halves from the lowest level up; tokens that come one by one
wait for a whole block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvsketch.caches.core.config import BLOCK

LEAST = 64  # halved together at least, if a level has that many tokens: fewer cannot balance much


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
        """Tokens that the held ones stand for."""
        return self.apart + sum(held << level for level, held in enumerate(self.held))

    def place_of(self, level: int) -> tuple[int, int]:
        """Where a level begins and ends; a level that does not exist is empty."""
        start = self.apart + sum(self.held[level + 1 :])
        return start, start + sum(self.held[level : level + 1])

    def after(self, new: int, room: int, block: int, *, few: bool = False) -> "tuple[Levels, list[tuple[int, int]]]":
        """Take `new` tokens and halve until all fit; the levels after that, and what was halved, as (level, size)."""
        held, halved = list(self.held), list(self.halved)
        held[0] += new
        done = list[tuple[int, int]]()
        while (excess := self.apart + sum(held) - room) > 0:
            level, size = _lowest(held, block, excess) if few or new >= block else _trickle(held, fitting(block, room))
            if level + 1 == len(held):
                held.append(0)
                halved.append(0)
            held[level] -= size
            held[level + 1] += size // 2
            halved[level] += size
            done.append((level, size))
        return Levels(tuple(held), tuple(halved), self.apart), done


def _lowest(held: Sequence[int], block: int, excess: int) -> tuple[int, int]:
    """The lowest level with tokens, and how many to halve: enough, or LEAST; so weights stay as even as they can."""
    level = next((level for level, count in enumerate(held) if count > 1), _fullest(held))
    return level, min(block, held[level] // 2 * 2, max(2 * excess, LEAST))


def _trickle(held: Sequence[int], block: int) -> tuple[int, int]:
    """The lowest level that has a whole block, since new tokens wait for one; if none has, the fullest level."""
    level = next((level for level, count in enumerate(held) if count >= block), _fullest(held))
    return level, min(block, held[level] // 2 * 2)


def _fullest(held: Sequence[int]) -> int:
    return max(range(len(held)), key=lambda level: held[level])


def fitting(block: int, room: int) -> int:
    """The largest power of two of which eight fit, up to `block`: tokens that wait for a whole block need room too."""
    return min(block, max(BLOCK, 1 << (max(1, room // 8).bit_length() - 1)))


@dataclass(frozen=True)
class Schedule:
    """How many tokens there is room for once so many came, and how much of the room is for tokens set apart."""

    block: int
    room: Callable[[int], int]
    share_apart: float

    def apart(self, count: int) -> int:
        """How many tokens are set apart when `count` have come."""
        room = self.room(count)
        return max(0, min(int(self.share_apart * room), room - BLOCK)) if self.share_apart else 0

    def of_call(
        self, levels: Levels, before: int, after: int, new: int, *, few: bool
    ) -> tuple[Levels, list[tuple[int, int]]]:
        """All halvings of a call that brings `new` tokens to the levels, all at once or a block at a time."""
        whole = self.share_apart > 0 or few or after - before >= self.block
        step = max(1, after - before) if whole else BLOCK
        halvings = list[tuple[int, int]]()
        for start in range(before, after, step):
            seen = min(start + step, after)
            levels = replace(levels, apart=min(self.apart(seen), seen))
            levels, done = levels.after(new if whole else seen - start, self.room(seen), self.block, few=few)
            halvings += done
        return levels, halvings
