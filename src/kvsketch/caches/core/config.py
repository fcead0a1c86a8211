"""What a method is told: a frozen config."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from kvsketch.caches.core.asking import Asking, Askings
from kvsketch.caches.core.budget import MOST, Budget, Keep, check_keep, plain
from kvsketch.caches.core.checks import check_choice, check_count
from kvsketch.caches.core.method import Method
from kvsketch.caches.core.profile import PROFILE, find_profile
from kvsketch.caches.core.shares import EQUAL, LENGTH, PYRAMID, THRESHOLD, Shares

MANY = 256  # a call of so many tokens is long; one of fewer, but at least two, is one of a series of calls
BLOCK = 32  # tokens leave the window in blocks, mostly of this size, so that no method works token by token
PREFILLS = ("exact", "streaming")
WEIGHTS = ("count", "none")  # does an entry stand for the tokens it was chosen from, or for itself alone


@dataclass(frozen=True, kw_only=True)
class MethodConfig(ABC):
    """What every method is told: the exact parts, and how a prompt is read.

    `prefill="exact"`: the tokens of one call see all earlier tokens of that call exactly; the past
    is written at its end. `prefill="streaming"`: a call is read in chunks of `chunk` tokens, each
    seeing what the cache holds by then, so memory does not grow with the prompt.
    """

    name: ClassVar[str]
    before_rotation: ClassVar[bool] = False  # whether it asks for queries and keys as they were before rotation
    looks_ahead: ClassVar[bool] = False  # and for how later positions will be rotated
    leaving: ClassVar[int] = BLOCK  # so many tokens leave the window together
    window_by_budget: ClassVar[bool] = False  # whether heads with different budgets have different windows
    latest: ClassVar[float] = 0.0  # the part of the mean budget that every head has for its latest tokens

    sinks: int = 4
    prefill: str = "exact"
    chunk: int = 1024

    def __post_init__(self) -> None:
        check_count("sinks", self.sinks, least=0)
        check_count("chunk", self.chunk, least=1)
        check_choice("prefill", self.prefill, PREFILLS)

    @property
    def asking(self) -> Asking | None:
        """Which queries say how much a token matters, if the method chooses by that."""
        return None

    @cached_property
    def askings(self) -> Askings:
        """Whose attention to tokens is noted."""
        return Askings(() if self.asking is None else (self.asking,))

    @property
    def holds_back(self) -> bool:
        """Whether all layers hold the whole prompt until it is read, and forget only then."""
        return False

    @property
    @abstractmethod
    def budget_given(self) -> Keep:
        """The budget as the user gave it; 1.0 where the method keeps all."""

    @abstractmethod
    def floor(self) -> int:
        """What every lane may hold, however small its share: sinks, window, and what the method cannot do without."""

    def least_entries(self) -> int:
        """The smallest budget in entries that can be asked for: the window runs over by up to a block."""
        return self.floor() + self.leaving

    @abstractmethod
    def window_size(self, budget: Budget, count: int) -> int | None:
        """How many of the latest tokens stay exact once `count` were seen; None: all of them."""

    def leave(self, length: int, window: int) -> int:
        """How many of `length` tokens have left a window of this size: a whole number of blocks."""
        return max(0, length - self.sinks - window) // self.leaving * self.leaving

    @abstractmethod
    def new_method(self, layer: int) -> Method | None:
        """What is done in one layer with tokens that leave the window; None if nothing remains of them."""

    def for_layer(self, layer: int) -> "MethodConfig":
        """The config of this method in one layer, as layers may differ."""
        return self

    def check_model(self, facts: Callable[[], dict[str, Any]], *, held: bool = False) -> None:  # noqa: B027
        """Refuse a model that this config cannot serve, given what is known about the model.

        `held`: a cache that comes from a file has already chosen what this config says how to choose.
        """

    def for_model(self, facts: Callable[[], dict[str, Any]], *, held: bool = False) -> "MethodConfig":
        """This config for a model that it can serve, with what must be found for that model; refuses other models."""
        self.check_model(facts, held=held)
        return self

    def learnt_digest(self, facts: Callable[[], dict[str, Any]]) -> str | None:
        """A few letters that change with the index or profile that this goes by; the config must fit the model."""
        return self.source_digest()

    def source_digest(self) -> str | None:
        """A few letters that change with what this config takes from elsewhere."""
        return None

    def with_full_paths(self) -> "MethodConfig":
        """The same config for a program that runs in another folder."""
        return self

    def __str__(self) -> str:
        """The spec that parses back to this config: the budget, and the fields that differ from their defaults."""
        said = [f for f in fields(self) if f.name == "keep" or getattr(self, f.name) != f.default]
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in sorted(said, key=lambda f: f.name != "keep")]
        return f"{self.name}({', '.join(changed)})" if changed else self.name


@dataclass(frozen=True, kw_only=True)
class KeepingConfig(MethodConfig):
    """A method that forgets nothing, and so needs no budget."""

    @property
    def budget_given(self) -> Keep:
        return 1.0

    def floor(self) -> int:
        return 0

    def least_entries(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class BudgetedConfig(MethodConfig):
    """A method that forgets: `keep` says how much may be held (sinks, window and past together).

    `heads` says how KV heads share it: "equal"; "pyramid" (the first layers get more); "profile" (as was measured on
    this model, see `profile.py`), or the file of a profile; "threshold" (by the best scores of all layers and heads in
    this prompt, if the method's scores can be compared).
    """

    comparable: ClassVar[bool] = False  # whether scores of different heads mean the same

    keep: Keep = 0.25
    heads: str = EQUAL

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "keep", plain(self.keep))
        check_keep(self.keep)
        named = isinstance(self.heads, str) and self.heads.endswith(".json")
        if not named and self.heads not in (EQUAL, PYRAMID, PROFILE, THRESHOLD):
            raise ValueError(
                f"heads must be {EQUAL}, {PYRAMID}, {PROFILE}, {THRESHOLD}, or a file that kvsketch profile has "
                f"written (.json), got {self.heads!r}"
            )
        if self.heads == THRESHOLD and not self.comparable:
            raise ValueError(
                f"heads={THRESHOLD!r} compares the scores of all heads, and {self.name} has none that can be compared: "
                f"heads={PROFILE!r} gives each head what was measured on the model"
            )
        if self.holds_back and self.prefill != "exact":
            raise ValueError(
                f"{self} forgets only when the whole prompt has been read: use prefill='exact', or "
                f"heads={PROFILE!r} with a method that reads it once"
            )
        self.check_entries(self.keep if isinstance(self.keep, int) else None)

    @property
    def budget_given(self) -> Keep:
        return self.keep

    @property
    def holds_back(self) -> bool:
        return self.heads == THRESHOLD

    def divided(self, shares: Shares, beside: int = 0, length: int = LENGTH) -> Shares:
        """Measured shares as this method uses them, if `beside` tokens are held anyway and texts have this length."""
        return shares

    def check_model(self, facts: Callable[[], dict[str, Any]], *, held: bool = False) -> None:
        if self.heads not in (EQUAL, PYRAMID, THRESHOLD) and not held:
            find_profile(self.heads, facts()).check_keep(self.keep)

    def learnt_digest(self, facts: Callable[[], dict[str, Any]]) -> str | None:
        if self.heads in (EQUAL, PYRAMID, THRESHOLD):
            return super().learnt_digest(facts)
        return find_profile(self.heads, facts()).digest

    def with_full_paths(self) -> "MethodConfig":
        return replace(self, heads=str(Path(self.heads).resolve())) if self.heads.endswith(".json") else self

    def check_entries(self, entries: int | None) -> None:
        """Refuse a fixed number of entries that the exact parts alone would use up."""
        if entries is not None and entries < self.least_entries():
            whole = " (keep=1.0 is all that it reads)" if self.keep == 1 else ""
            raise ValueError(
                f"keep={self.keep!r} leaves {entries} entries per row and KV head{whole}, but {self} needs at least "
                f"{self.least_entries()}: give more, or fewer sinks or a smaller window"
            )


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(BudgetedConfig):
    """A method that keeps the last `window` tokens exactly and works on those before them."""

    window: int = 64

    def __post_init__(self) -> None:
        self.check_window()
        super().__post_init__()

    def check_window(self) -> None:
        """Refuse what cannot be a window."""
        check_count("window", self.window, least=1)

    def exact_entries(self) -> int:
        """Entries that sinks and window take at most; the window may run over by one block."""
        return self.sinks + self.window + self.leaving

    def floor(self) -> int:
        return self.sinks + self.window

    def window_size(self, budget: Budget, count: int) -> int | None:
        return self.window

    def room(self, budget: Budget, count: int) -> int:
        """How many entries of the past the budget leaves when `count` tokens have left the window."""
        if budget.capacity is not None:
            return max(0, budget.capacity - self.exact_entries())
        exact = self.sinks + self.window
        return max(0, budget.entries(count + exact) - exact)

    def strata(self, budget: Budget, first_entries: int, entries: int) -> tuple[int, int]:
        """Tokens of the first stratum, which holds `first_entries`, and of every later one, which holds `entries`.

        The first one ends when the whole cache, exact parts included, is down to the fraction; before that every head
        holds the least that it needs. Later ones are longer if the head's share is small.
        """
        assert budget.fraction is not None, "a number of entries is one stratum"
        exact = self.sinks + self.window + budget.beside
        first = max(BLOCK, math.ceil((first_entries + exact) / budget.fraction) - exact)
        return first, math.ceil(entries / max(budget.fraction * budget.share, entries / MOST))


def equal_until_read(config: MethodConfig) -> bool:
    """Whether heads have equal shares, until a prompt that was read gives them others (if it does)."""
    return not isinstance(config, BudgetedConfig) or config.heads in (EQUAL, THRESHOLD)
