"""Methods that keep the tokens with the best scores; every choice is made from all that there is at that time.

Methods whose scores are the attention that queries gave to tokens are in `noted.py`.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.caches.core.budget import MOST, Budget, seen_when
from kvsketch.caches.core.checks import check_choice, check_number
from kvsketch.caches.core.chooser import Chooser, Held, Kept, Pool
from kvsketch.caches.core.config import WindowedConfig
from kvsketch.caches.core.tokens import Arriving
from kvsketch.caches.forgetting.dropped import NEAREST, NONE, SPREAD, STANDS, places_of_dropped, with_weights_left
from kvsketch.caches.forgetting.residual import FIRST, TOKENS, check_means, joined, means_kept, means_of, tokens_kept
from kvsketch.kernels.places import best

LATEST, MOST_LATEST = 16, 0.5  # of a window that is a part of the budget: its least length, and the largest part
FREED = 64  # one part in so many of a large room is made free at once


@dataclass(frozen=True, kw_only=True)
class ScoredConfig(WindowedConfig):
    """Options of a method by scores: its window is short, and evicts short blocks, for which there is always room.

    `window` is a number of tokens; or a part of what heads may hold on average, and then at least LATEST tokens.
    `weights` says what becomes of the weight of dropped tokens: it is gone ("none"), or the kept token whose key is
    nearest stands for them too ("mass"), or all kept tokens do in equal parts ("spread"). Or `residual`, a share of
    the room, holds means of dropped tokens, each of tokens that follow one another in the text.
    """

    leaving: ClassVar[int] = 8
    window_may_be_part: ClassVar[bool] = True  # of the budget

    window: int | float = 16  # type: ignore[assignment]
    weights: str = NONE
    residual: float | int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("weights", self.weights, (NONE, NEAREST, SPREAD))
        if self.residual != 0 or isinstance(self.residual, bool):  # 0: nothing is left of what is dropped
            check_number("residual", self.residual, above=0, below=1)
        if self.residual and self.weights != NONE:
            raise ValueError(
                f"weights={self.weights!r} gives kept tokens the weight of those that are dropped, and "
                f"residual={self.residual!r} holds it in entries of their own: leave one of them out"
            )

    def check_window(self) -> None:
        if not self.window_may_be_part:
            super().check_window()
            return
        part = isinstance(self.window, float)
        if not (0 < self.window <= MOST_LATEST if part else type(self.window) is int and 0 < self.window <= MOST):
            raise ValueError(
                f"window must be a number of tokens such as 16, or a part of what heads may hold such as 0.25, at most "
                f"{MOST_LATEST}, got {self.window!r}"
            )

    @property
    def latest(self) -> float:  # type: ignore[override]
        return self.window if isinstance(self.window, float) else 0.0

    @property
    def least_window(self) -> int:
        """How many of the latest tokens are held at least."""
        return LATEST if isinstance(self.window, float) else self.window

    def exact_entries(self) -> int:
        """The most entries that sinks and the least window take."""
        return self.sinks + self.least_window + self.leaving

    def floor(self) -> int:
        return self.exact_entries() + (1 if self.residual else 0)  # a mean of all that is dropped

    def least_entries(self) -> int:
        return self.floor()

    def window_size(self, budget: Budget, count: int) -> int:
        return self.least_window + int(budget.of_all(count))

    def exact_at(self, budget: Budget, count: int) -> int:
        """The most entries that sinks and window take once `count` tokens were seen: when a block is about to leave."""
        return self.sinks + self.window_size(budget, count) + self.leaving

    def seen_when(self, budget: Budget, left: int) -> int:
        """How many tokens were seen at most when `left` of them have left the window."""
        if budget.fixed is not None or not budget.latest:
            return left + self.exact_at(budget, 0)
        most = 2 * (left + self.exact_entries() + budget.beside) + 1  # the window is at most half of all
        return seen_when(left, lambda seen: self.exact_at(budget, seen), most)

    def room(self, budget: Budget, count: int) -> int:
        """How many entries of the past the budget leaves when `count` tokens have left the window."""
        seen = self.seen_when(budget, count)
        return budget.entries(seen) - self.exact_at(budget, seen)

    def means(self, room: int, count: int, *, dropped: bool = False) -> int:
        """How many entries of the room are means of dropped tokens: none while all tokens have room.

        `dropped`: some entries are means already; a room that has grown since does not bring their tokens back.
        """
        return max(1, int(self.residual * room)) if self.residual and (dropped or count > room) else 0


class Best(Chooser):
    """Keeps the entries with the largest scores; of equal ones the earlier."""

    bits: ClassVar[int] = 24  # of a score that are compared, so that the order of a sum's terms does not decide

    def __init__(self, config: ScoredConfig) -> None:
        self.config = config
        self.per_entry = {} if config.weights == NONE else {STANDS: torch.float32}
        if config.residual:
            self.per_entry, self.per_lane = {FIRST: torch.int32}, {TOKENS: torch.float32}

    @abstractmethod
    def scores(self, pool: Pool, per_lane: dict[str, Tensor], new: Arriving) -> Float[Tensor, "l n"]:
        """Scores in float64 of all entries to choose from, the new ones last; `per_lane` is what `lanes_after` says."""

    def lanes_after(self, held: Held, new: Arriving) -> dict[str, Tensor]:
        """What is known of each lane once these tokens have come."""
        return {}

    def about_new(self, new: Arriving) -> dict[str, Tensor]:
        """What `per_entry` declares, for new tokens: each stands for itself."""
        found = dict[str, Tensor]()
        if STANDS in self.per_entry:
            found[STANDS] = torch.ones(new.keys.shape[:2], dtype=torch.float32, device=new.keys.device)
        if FIRST in self.per_entry:
            found[FIRST] = new.ranks.expand(len(new.keys), -1)
        return found

    def room(self, held: Held, new: Arriving, budget: Budget) -> tuple[int, int]:
        """How many of all the tokens that came may be kept, and how many means of the others.

        Where few tokens come to many, and not all have room, a part of the room is made free, so that the next tokens
        just join: a choice among all entries is as much work as many steps.
        """
        room = self.config.room(budget, new.after)
        if new.after > room:
            room = max(self.config.floor() - self.config.exact_entries(), room - self.beside(new))
        if new.count <= room // FREED and held.count + new.count > room and not self.config.residual:
            room -= room // FREED
        means = self.config.means(room, new.after, dropped=means_kept(held) > 0)
        return room - means, means

    def beside(self, new: Arriving) -> int:
        """How many entries' room is taken by what is known of a lane, if that is much."""
        return 0

    def choose(self, held: Held, new: Arriving, budget: Budget) -> Kept:
        room = self.room(held, new, budget)[0]
        return self.best_of(held, new, budget, [(tokens_kept(held) + new.count, room)])

    def best_of(
        self,
        held: Held,
        new: Arriving,
        budget: Budget,
        parts: Sequence[tuple[int, int]],
        numbers: dict[str, Any] | None = None,
    ) -> Kept:
        """The best tokens of each part: `parts` gives, in order, how many tokens a part has and how many may be kept.

        `numbers` are the numbers of all lanes after this choice.
        """
        every, tokens = held, tokens_kept(held)
        if tokens < every.count:
            held = every.part(0, tokens)
        numbers = {} if numbers is None else numbers
        about, per_lane, rooms = self.about_new(new), self.lanes_after(held, new), list(parts)
        start = 0  # parts that keep all they have stay where they lie
        while rooms and rooms[0][0] <= rooms[0][1] and start + rooms[0][0] <= held.count:
            start += rooms.pop(0)[0]
        if tokens == every.count and all(count <= room for count, room in rooms):
            if self.config.residual:
                per_lane[TOKENS] = new.keys.new_zeros(len(new.keys), 0, dtype=torch.float32)
            return Kept(None, held.count, per_lane=per_lane, per_entry=about, numbers=numbers)
        pool = held.with_new(new, about=about)
        index = best(self.scores(pool, per_lane, new), start, rooms, self.bits)
        if self.config.residual:
            left = every.part(tokens, every.count)
            found = self._with_means(pool, start, index, left, self.room(held, new, budget)[1])
            return replace(found, per_lane=per_lane | found.per_lane, numbers=numbers)
        log_mass, stands = None, dict[str, Tensor]()
        if STANDS in about:
            stands[STANDS] = with_weights_left(self.config.weights, pool, start, index)
            log_mass = stands[STANDS].log()
        return Kept(
            index - start, start,
            log_mass=log_mass, pool=pool.behind(start), per_lane=per_lane, per_entry=stands, numbers=numbers,
        )  # fmt: skip

    def _with_means(self, pool: Pool, start: int, index: Int64[Tensor, "l k"], left: Held, room: int) -> Kept:
        """The entries chosen from `start` on, and after them means of all that is dropped, now and before."""
        dropped = means_of(pool).at(places_of_dropped(pool, start, index))
        means = joined(means_of(left, left.per_lane.get(TOKENS)).beside(dropped), room)
        both = means_of(pool).at(index).beside(means)
        about = {name: x.gather(1, index) for name, x in pool.per_entry.items()}
        about = {name: torch.cat([x, x.new_zeros(len(x), means.count)], 1) for name, x in about.items()}
        about |= {FIRST: both.first}
        made, per_lane = (both.keys, both.values), {TOKENS: means.tokens}
        return Kept(None, start, both.tokens.log(), made=made, per_entry=about, per_lane=per_lane)

    def check(self, held: Held, count: int, budget: Budget) -> None:
        most = min(count, self.config.room(budget, count))
        if held.count > most:
            raise ValueError(f"{held.count} entries of {count} tokens, and there is room for {most}")
        stands = held.per_entry.get(STANDS)
        if stands is not None and not bool((stands.isfinite() & (stands >= 1)).all()):
            raise ValueError("entries that stand for less than one token")
        if self.config.residual:
            check_means(held, count)
