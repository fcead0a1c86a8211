"""What the study of layers measures: methods with every block size and seed, at rates of the middle of a text."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from typing import Any

from jaxtyping import Int64
from torch import Tensor

from kvsketch.caches.core.budget import Keep
from kvsketch.caches.core.config import BLOCK, BudgetedConfig, MethodConfig
from kvsketch.caches.forgetting.streaming_heads import StreamingHeads
from kvsketch.caches.registry import METHODS, parse_spec, read_call
from kvsketch.evaluation.results.rows import Row, key_of

# What an error depends on, besides the model.
KEY = ("prompt", "tokens", "layer", "method", "rate", "block", "seed", "exact")
# Options that the study sets, to the same for all methods.
SET_BY_STUDY = ("keep", "heads", "sinks", "window", "prefill", "chunk")
SWEPT = ("block", "seed")  # options that it varies


@dataclass(frozen=True)
class Prompt:
    """A text to read; its name says what is in it."""

    name: str
    ids: Int64[Tensor, "1 n"]


@dataclass(frozen=True)
class Trial:
    """A method at one rate, with its block size and seed if it has them."""

    config: BudgetedConfig
    method: str  # the spec without block and seed
    rate: float

    @property
    def block(self) -> int | None:
        """Tokens that are balanced together."""
        return getattr(self.config, "block", None)

    @property
    def seed(self) -> int | None:
        """The seed of the method's random numbers."""
        return getattr(self.config, "seed", None)

    def with_budget(self, middle: int, exact: int) -> BudgetedConfig:
        """The config that holds `exact` tokens, one in the window, and the rate's share of the middle."""
        free = self.config.leaving  # a window can hold up to a block more than its size
        return self._with_keep(exact, exact + 1 + free + self.kept(middle))

    def kept(self, middle: int) -> int:
        """The rate's share of the middle, to the nearest block: streaming_llm cannot hold anything else."""
        return round(self.rate * middle / BLOCK) * BLOCK

    def check(self, middle: int, exact: int) -> None:
        """Refuse a middle that is too short: the rate's share of it is less than the method needs."""
        least = max(BLOCK, self._with_keep(exact, 1.0).least_entries() - exact - 1 - self.config.leaving)
        if self.kept(middle) < least:
            raise ValueError(
                f"rate {self.rate:g} of the {middle:,} tokens between the first and the last {exact} is "
                f"{self.kept(middle)} entries, but {self.method} needs at least {least}: give a longer text, a larger "
                "rate, or fewer exact tokens (--exact)"
            )

    def _with_keep(self, exact: int, keep: Keep) -> BudgetedConfig:
        changes: dict[str, Any] = {"window": 1} if hasattr(self.config, "window") else {}
        return replace(self.config, keep=keep, sinks=exact, **changes)


@dataclass(frozen=True, kw_only=True)
class Study:
    """The methods, rates, block sizes and seeds to measure; `exact` tokens are kept at either end."""

    methods: Sequence[str]
    rates: Sequence[float] = (0.5, 0.25, 0.125, 0.0625)
    blocks: Sequence[int] = (64, 128, 256)
    seeds: int = 10
    exact: int = 256

    def __post_init__(self) -> None:
        for name in ("seeds", "exact"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("methods", "rates"):
            if not getattr(self, name):
                raise ValueError(f"the study has no {name}: name at least one")
        for rate in self.rates:
            if not 0 < rate <= 1:
                raise ValueError(f"a rate is the share of tokens that is kept, above 0 and up to 1, got {rate:g}")
        settings = Counter((trial.method, trial.rate, trial.block, trial.seed) for trial in self.trials)
        twice, times = max(settings.items(), key=lambda setting: setting[1])
        if times > 1:
            raise ValueError(f"{twice[0]} at rate {twice[1]:g} is named twice: give each method, block and rate once")

    @cached_property
    def trials(self) -> list[Trial]:
        """Everything that is measured in a layer; seeds of one setting come one after another."""
        variants = [variant for spec in self.methods for variant in self._variants(spec)]
        return [Trial(config, method, rate) for rate in self.rates for config, method in variants]

    def _variants(self, spec: str) -> Iterator[tuple[BudgetedConfig, str]]:
        """A spec with every block size and seed, and its name."""
        config, options = _read(spec)
        sweeps = dict[str, Sequence[int]]()
        if hasattr(config, "block") and "block" not in options:
            if not self.blocks:
                raise ValueError(f"{spec} halves blocks: name at least one size of them, such as 256")
            sweeps["block"] = self.blocks
        first = getattr(config, "seed", None)
        if first is not None:
            sweeps["seed"] = range(first, first + self.seeds)
        for values in product(*sweeps.values()):
            chosen: dict[str, Any] = dict(zip(sweeps, values, strict=True))
            yield replace(config, **chosen), _name(config)

    def check_text(self, name: str, tokens: int) -> None:
        """Refuse a text that is too short for the study."""
        least = 2 * self.exact + 2 * BLOCK
        if tokens < least:
            raise ValueError(
                f"{name} has {tokens:,} tokens; the study keeps {self.exact} at either end and needs at least "
                f"{least:,}: give a longer text, or fewer exact tokens (--exact)"
            )
        for trial in self.trials:
            trial.check(middle_of(tokens, self.exact), self.exact)

    def missing(self, prompt: Prompt, layer: int, done: Collection[tuple[Any, ...]]) -> list[Trial]:
        """The trials that are not done yet."""
        return [trial for trial in self.trials if key_of(self.labels(prompt, layer, trial), KEY) not in done]

    def labels(self, prompt: Prompt, layer: int, trial: Trial) -> Row:
        """The labels that tell a row of errors from others."""
        place = (prompt.name, prompt.ids.shape[1], layer)
        setting = (trial.method, trial.rate, trial.block, trial.seed, self.exact)
        return dict(zip(KEY, (*place, *setting), strict=True))


def middle_of(tokens: int, exact: int) -> int:
    """How many tokens of a text are compressed: whole blocks."""
    return (tokens - 2 * exact - 1) // BLOCK * BLOCK


def _read(spec: str) -> tuple[BudgetedConfig, Collection[str]]:
    """A spec's config, and the options that it sets."""
    config, options = parse_spec(spec), read_call(spec)[1]
    taken = [name for name in SET_BY_STUDY if name in options]
    if taken:
        raise ValueError(f"the study sets {', '.join(taken)} itself, from its rates: leave it out of {spec!r}")
    if not isinstance(config, BudgetedConfig):
        drop = [name for name, known in METHODS.items() if issubclass(known, BudgetedConfig) and not _why_not(known())]
        raise ValueError(
            f"{spec} keeps every token: its errors would be 0. Methods that drop: {', '.join(drop)}; the study takes "
            "no others"
        )
    if why := _why_not(config):
        raise ValueError(f"{spec} {why}: leave it out")
    return config, options


def _why_not(config: BudgetedConfig) -> str | None:
    """Why the study cannot take a method that drops tokens; None if it can."""
    if isinstance(config, StreamingHeads):
        return "holds everything in some heads and a window in others, and the study gives each head the same rate"
    if config.askings or config.before_rotation:
        return "goes by queries, and the study gives a cache keys and values alone"
    return None


def _name(config: MethodConfig) -> str:
    """The spec with only those options that make it another method."""
    changed = [
        f"{f.name}={getattr(config, f.name)!r}"
        for f in fields(config)
        if f.name not in (*SET_BY_STUDY, *SWEPT) and getattr(config, f.name) != f.default
    ]
    return f"{config.name}({', '.join(changed)})" if changed else config.name
