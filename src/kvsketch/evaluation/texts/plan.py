"""What is measured on texts: windows of each text, and methods with every budget."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from kvsketch.caches.core.budget import Keep
from kvsketch.caches.core.config import BudgetedConfig, MethodConfig
from kvsketch.caches.exact import Exact
from kvsketch.caches.lookup.config import LookupConfig
from kvsketch.caches.registry import parse_spec, read_call
from kvsketch.evaluation.layers.plan import Prompt
from kvsketch.evaluation.results.rows import Row, key_of, name_without_digest

# What a row depends on, besides the model.
KEY = ("text", "start", "tokens", "next", "call", "method")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Windows of `tokens` are read and compressed; the model predicts the `next` tokens, fed `call` at a time.

    Methods that look tokens up are fed one at a time: a call of several tokens would read everything.
    """

    methods: Sequence[str]
    keeps: Sequence[Keep] = (0.5, 0.25, 0.125, 0.0625)
    tokens: int
    next: int = 128
    call: int = 16
    windows: int = 20
    batch: int = 1  # of windows, read and measured together

    def __post_init__(self) -> None:
        for name in ("tokens", "next", "call", "windows", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.methods:
            raise ValueError('no method was named: name at least one, as in "uniform"')
        assert self.configs, "read before a model is loaded"
        if self.batch > 1 and any(isinstance(config.budget_given, str) for config in self.configs.values()):
            raise ValueError(
                f"batch={self.batch} windows would share a budget in bytes: give fractions or entries, or one at a time"
            )

    @cached_property
    def configs(self) -> dict[str, MethodConfig]:
        """The methods by spec; those that forget get every budget, if they name none themselves."""
        found = dict[str, MethodConfig]()
        for spec in self.methods:
            for config in self._with_budgets(spec):
                if str(config) in found:
                    raise ValueError(f"{config} is named twice: give each method and budget once")
                found[str(config)] = config
        return found

    def _with_budgets(self, spec: str) -> list[MethodConfig]:
        config = parse_spec(spec)
        if isinstance(config, Exact):
            raise ValueError("exact is what all others are compared with: leave it out")
        if not isinstance(config, BudgetedConfig) or "keep" in read_call(spec)[1]:
            return [config]
        if not self.keeps:
            raise ValueError(f"{spec} names no budget: name at least one for all, as in --keep 0.25")
        return [replace(config, keep=keep) for keep in self.keeps]

    def starts(self, text: Prompt) -> list[int]:
        """Where the windows of a text begin: at equal distances, the first at the first token."""
        count = text.ids.shape[1]
        room, said = count - self.tokens - self.next, f"{name_without_digest(text.name)} has {count:,} tokens"
        if room < 0:
            raise ValueError(
                f"{said}, and a window needs {self.tokens + self.next:,}: give a longer text, or fewer tokens of each "
                "(--tokens)"
            )
        if self.windows == 1:
            return [0]
        starts = [room * number // (self.windows - 1) for number in range(self.windows)]
        if len(set(starts)) < self.windows:
            raise ValueError(f"{said}, which is too few for {self.windows} different windows")
        return starts

    def labels(self, text: Prompt, start: int, method: str) -> Row:
        """The labels that tell a row from others."""
        call = self.call_of(self.configs[method])
        return dict(zip(KEY, (text.name, start, self.tokens, self.next, call, method), strict=True))

    def call_of(self, config: MethodConfig) -> int:
        """How many tokens are fed at a time."""
        return 1 if isinstance(config, LookupConfig) and config.prefill == "exact" else self.call

    def batches(self, text: Prompt, done: Collection[tuple[Any, ...]]) -> Iterator[tuple[int, list[int], list[str]]]:
        """Windows of a text that are measured together: the first one's number, their starts, and methods not done.

        All windows of a batch lack the same methods.
        """
        numbered = [(start, self.missing(text, start, done)) for start in self.starts(text)]
        number = 1
        for missing, same in groupby(numbered, key=lambda window: window[1]):
            starts = [start for start, _ in same]
            for first in range(0, len(starts), self.batch):
                part = starts[first : first + self.batch]
                yield number, part, missing
                number += len(part)

    def missing(self, text: Prompt, start: int, done: Collection[tuple[Any, ...]]) -> list[str]:
        """The methods that are not done for a window."""
        return [name for name in self.configs if key_of(self.labels(text, start, name), KEY) not in done]
