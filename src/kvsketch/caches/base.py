"""What a method is: a frozen config, and a `Past` that takes the tokens leaving the window."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens
from kvsketch.caches.budget import MOST, Budget, Keep, check_keep
from kvsketch.caches.storage import storage_bytes
from kvsketch.kernels.weighted_attention import weighted_attention

BLOCK = 32  # tokens leave the window in blocks of this many, so that no method works token by token
PREFILLS = ("exact", "streaming")
WEIGHTS = ("count", "none")  # does an entry stand for the tokens it was chosen from, or for itself alone


@dataclass(frozen=True)
class LeavingTokens:
    """Tokens that leave the window, in order.

    `ranks[r, i]` counts the tokens of row r that left before token i; -1 where the token is not
    this row's to write (padding, or it left the row's window before).
    """

    keys: Float[Tensor, "b h n d"]
    values: Float[Tensor, "b h n e"]
    ranks: Int64[Tensor, "b n"]
    counts: tuple[int, ...]  # tokens of each row that will have left, these included
    labels: Int64[Tensor, "b h n t"] | None = None  # what a past that looks things up has noted about them


class Past(ABC):
    """What one layer remembers of the tokens that left its window, for all rows and KV heads."""

    @abstractmethod
    def write(self, tokens: LeavingTokens) -> None:
        """Take tokens; the method decides what remains of them."""

    @abstractmethod
    def attend(self, query: Float[Tensor, "b hg q d"], scale: float, softcap: float | None) -> Partial | None:
        """Attention over what is held, or looked up; None if that is nothing."""

    @abstractmethod
    def count_entries(self) -> Int64[Tensor, "b h"] | None:
        """Entries held per row and KV head; None before the first write."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        return storage_bytes(self.tensors().values())

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the state by name, the batch as their first dimension."""

    @abstractmethod
    def numbers(self) -> dict[str, list[int]]:
        """All other state by name, a number for each row; no numbers before the first write."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, list[int]]) -> None:
        """Take back what `tensors` and `numbers` gave, perhaps with other rows."""

    def details(self) -> dict[str, float]:
        """What else a report should show, by name: means over rows and heads."""
        return {}

    def warning(self) -> str | None:
        """What a user must know about these tokens and this method, in a sentence."""
        return None

    def map_rows(self, move: Callable[[Tensor], Tensor], rows: list[int]) -> None:
        """Replace every tensor by `move` of it, which brings row `rows[i]` to row i."""
        self.restore(
            {name: move(tensor) for name, tensor in self.tensors().items()},
            {name: [numbers[row] for row in rows] if numbers else [] for name, numbers in self.numbers().items()},
        )


class EntriesPast(Past):
    """A past that is a set of weighted entries, all of them read for every query."""

    @abstractmethod
    def entries(self) -> WeightedTokens | None:
        """The entries, or None if there are none."""

    def attend(self, query: Float[Tensor, "b hg q d"], scale: float, softcap: float | None) -> Partial | None:
        """Attention over all entries."""
        entries = self.entries()
        return None if entries is None else weighted_attention(query, entries, scale, softcap=softcap)


@dataclass(frozen=True, kw_only=True)
class MethodConfig(ABC):
    """What every method is told: the exact parts, and how a prompt is read.

    `prefill="exact"`: the tokens of one call see all earlier tokens of that call exactly; the past
    is written at its end. `prefill="streaming"`: a call is read in chunks of `chunk` tokens, each
    seeing what the cache holds by then, so memory does not grow with the prompt.
    """

    name: ClassVar[str]
    before_rotation: ClassVar[bool] = False  # whether it asks for queries and keys as they were before rotation

    sinks: int = 4
    prefill: str = "exact"
    chunk: int = 1024

    def __post_init__(self) -> None:
        check_count("sinks", self.sinks, least=0)
        check_count("chunk", self.chunk, least=1)
        check_choice("prefill", self.prefill, PREFILLS)

    @property
    @abstractmethod
    def budget_given(self) -> Keep:
        """The budget as the user gave it; 1.0 where the method keeps all."""

    @abstractmethod
    def least_entries(self) -> int:
        """The smallest number of entries with which the method works."""

    @abstractmethod
    def window_size(self, budget: Budget, count: int) -> int | None:
        """How many of the latest tokens stay exact once `count` were seen; None is all of them."""

    @abstractmethod
    def new_past(self, budget: Budget, layer: int) -> Past:
        """An empty past for one layer."""

    def for_layer(self, layer: int) -> "MethodConfig":
        """What this method is in one layer, where layers differ."""
        return self

    def check_model(self, facts: Callable[[], dict[str, Any]]) -> None:  # noqa: B027 (most serve all models)
        """Refuse a model that this config cannot serve, given what there is to know about it."""

    def rests_on(self) -> str | None:
        """What this config takes from elsewhere, in a few letters that change when that does."""
        return None

    def anywhere(self) -> "MethodConfig":
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

    def least_entries(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class BudgetedConfig(MethodConfig):
    """A method that forgets: `keep` says how much may be held (sinks, window and past together)."""

    keep: Keep = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_keep(self.keep)
        self.check_entries(self.keep if isinstance(self.keep, int) else None)

    @property
    def budget_given(self) -> Keep:
        return self.keep

    def check_entries(self, entries: int | None) -> None:
        """Refuse a fixed number of entries that the exact parts alone would use up."""
        if entries is not None and entries < self.least_entries():
            raise ValueError(
                f"keep={self.keep!r} leaves {entries} entries per row and KV head, but {self} needs at least "
                f"{self.least_entries()}: give more, or fewer sinks or a smaller window"
            )


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(BudgetedConfig):
    """A method that keeps the last `window` tokens exactly and works on those before them."""

    window: int = 64

    def __post_init__(self) -> None:
        check_count("window", self.window, least=1)
        super().__post_init__()

    def exact_entries(self) -> int:
        """Entries that sinks and window take at most; the window may run over by one block."""
        return self.sinks + self.window + BLOCK

    def least_entries(self) -> int:
        return self.exact_entries() + BLOCK

    def window_size(self, budget: Budget, count: int) -> int | None:
        return self.window

    def room(self, budget: Budget, count: int) -> int:
        """How many entries of the past the budget leaves when `count` tokens have left the window."""
        if budget.fixed is not None:
            return budget.fixed - self.exact_entries()
        exact = self.sinks + self.window
        return budget.entries(count + exact) - exact

    def strata(self, fraction: float, first_entries: int, entries: int) -> tuple[int, int]:
        """Tokens of the first stratum, which holds `first_entries`, and of every later one, which holds `entries`.

        The first one is so long that it ends when the whole cache, exact parts included, is down to the
        fraction; before that the cache holds what it needs at least.
        """
        exact = self.sinks + self.window
        first = max(BLOCK, math.ceil((first_entries + exact) / fraction) - exact)
        return first, math.ceil(entries / fraction)


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Refuse anything but one of the choices."""
    if value not in tuple(choices):  # a tuple: what cannot be hashed is refused as well
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_seed(seed: int) -> None:
    """Refuse anything but a number that addresses of random numbers can begin with."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise ValueError(f"seed must be a whole number from 0 to 2⁶³ - 1, got {seed!r}")


def check_count(name: str, value: int, *, least: int, most: int = MOST) -> None:
    """Refuse anything but a whole number of at least `least`, and no more than there can be."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r:.60}")
    if value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {value!s:.40}")


def check_number(name: str, value: float | int, *, above: float | int, below: float | int = math.inf) -> None:
    """Refuse anything but a number between these two, themselves left out."""
    try:
        right = not isinstance(value, bool) and isinstance(value, int | float) and above < float(value) < below
    except OverflowError:
        right = False
    if not right:
        least = "a positive number" if above == 0 else f"a number above {above:g}"
        most = "" if below == math.inf else f" {'and ' if above else ''}below {below:g}"
        raise ValueError(f"{name} must be {least}{most}, got {value!r}")
