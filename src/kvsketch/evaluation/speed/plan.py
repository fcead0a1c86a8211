"""What `kvsketch bench speed` times, and what makes its rows the same."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvsketch.caches.core.config import BudgetedConfig, MethodConfig
from kvsketch.caches.exact import Exact
from kvsketch.caches.registry import KINDS, parse_spec
from kvsketch.checkpoints import PRECISIONS
from kvsketch.evaluation.board.speed import TOLERANCE
from kvsketch.evaluation.results.rows import Row, key_of
from kvsketch.evaluation.speed.usual import END_TO_END, LENGTHS, METHODS, PROMPTS
from kvsketch.kernels import native
from kvsketch.kernels.native.attention import MOST_QUERIES

# What a time depends on, besides the machine and the precision, which are the same in a file.
KEY = ("part", "tokens", "layers", "kv_heads", "group", "width", "threads", "rounds", "between", "method", "kernel")
BUILD, LAYER, LLAMA = "build", "one layer", "random Llama"  # parts; a real model is a part under its own name
STOCK, FOLDED, PRODUCTS, EXACT = "stock", "stock, folded", "two products", "exact"
C, TORCH = "C", "torch"  # kernels
LEAST = 64  # tokens
WARM = 2  # steps that are not counted
PIECE = 512  # tokens that are read after a cache was filled


def every_method() -> list[str]:
    """All methods that can be timed in a single layer; those that forget hold a quarter."""
    timed = [config for config in KINDS if config is not Exact and not config.looks_ahead]
    return [f"{config.name}(keep=0.25)" if issubclass(config, BudgetedConfig) else config.name for config in timed]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layer at every length of `lengths`, and whole models of `layers` layers at the contexts `end_to_end`.

    `between` bytes are read before each timed step, so that nothing of the cache is left in the processor's caches. An
    answer's error may be `within` times that of plain torch, and exact's logits may differ by `apart` from stock's.
    `index`: buckets, and hidden units of the router.
    """

    lengths: Sequence[int] = LENGTHS
    kv_heads: int = 8
    group: int = 4
    width: int = 128
    dtype: str = "bfloat16"
    threads: int = 1
    rounds: int = 40
    between: int = 640 * 10**6
    methods: Sequence[str] = METHODS
    index: tuple[int, int] = (1024, 1024)
    end_to_end: Sequence[int] = END_TO_END
    prompts: int = PROMPTS
    layers: int = 8
    real: bool = True
    within: float = 2.0
    apart: float = TOLERANCE

    def __post_init__(self) -> None:
        for name, least in (("kv_heads", 1), ("group", 1), ("width", 2), ("threads", 1), ("rounds", 2), ("between", 8)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.width % 2:
            raise ValueError(f"width must be even, as positions turn pairs of numbers, got {self.width}")
        if self.dtype not in PRECISIONS:
            raise ValueError(f"dtype must be one of {', '.join(PRECISIONS)}, got {self.dtype!r}")
        for lengths, what in ((self.lengths, "lengths"), (self.end_to_end, "end_to_end")):
            for tokens in lengths:
                if tokens < LEAST:
                    raise ValueError(f"{what} must be at least {LEAST} tokens each, got {tokens}")
        assert self.configs is not None, "read before anything is timed"

    @property
    def scale(self) -> float:
        """The factor of logits."""
        return float(self.width**-0.5)

    @property
    def precision(self) -> torch.dtype:
        """The dtype of keys, values and queries."""
        return PRECISIONS[self.dtype]

    @property
    def shape(self) -> str:
        """The shape that all rows of a file have in common, for people to read."""
        buckets, hidden = self.index
        return (
            f"{self.kv_heads} KV heads × {self.group} query heads × {self.width}, {buckets} buckets ({hidden} hidden)"
        )

    @property
    def fingerprint(self) -> str:
        """The made-up shape as a fingerprint."""
        return "-".join(map(str, (self.kv_heads, self.group, self.width, *self.index)))

    @property
    def count(self) -> int:
        """How many rows the plan makes, without the build's."""
        return len(self.lengths) * len(self.forms()) + (len(self.end_to_end) + self.real) * len(self.ways)

    @cached_property
    def configs(self) -> dict[str, MethodConfig]:
        """Methods by spec; refuses methods that cannot be timed in a single layer."""
        found = dict[str, MethodConfig]()
        for spec in self.methods:
            config = parse_spec(spec)
            if isinstance(config, Exact):
                raise ValueError("exact is what all others are compared with: leave it out")
            if config.looks_ahead:
                raise ValueError(
                    f"{config} depends on how later tokens are rotated, and nothing is rotated here: leave it out"
                )
            if isinstance(config, BudgetedConfig) and isinstance(config.keep, str):
                raise ValueError(f"{config}: bytes are those of a whole model; give a fraction, or a number of entries")
            if str(config) in found:
                raise ValueError(f"{config} is named twice: give each method once")
            found[str(config)] = config
        return found

    @property
    def ways(self) -> list[str]:
        """All that whole models are timed with: stock, exact and the methods."""
        return [STOCK, EXACT, *self.configs]

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels that can answer a step, the default one first."""
        return (C, TORCH) if self.group <= MOST_QUERIES and native.library() is not None else (TORCH,)

    def forms(self) -> list[tuple[str, str]]:
        """All pairs of method and kernel that one layer is timed with."""
        dense = [(name, TORCH) for name in (STOCK, FOLDED, PRODUCTS)]
        return dense + [(name, kernel) for name in (EXACT, *self.configs) for kernel in self.kernels]

    def labels(self, part: str, tokens: int, method: str, kernel: str, shape: Sequence[int] = ()) -> Row:
        """The labels that tell a row from others. `shape`: layers, KV heads, group and width, if not the plan's."""
        layers = {BUILD: 0, LAYER: 1}.get(part, self.layers)
        about = shape or (layers, self.kv_heads, self.group, self.width)
        return dict(
            zip(KEY, (part, tokens, *about, self.threads, self.rounds, self.between, method, kernel), strict=True)
        )

    def missing(self, tokens: int, done: Collection[tuple[Any, ...]]) -> list[tuple[str, str]]:
        """Pairs of method and kernel that are not done for one layer."""
        return [form for form in self.forms() if key_of(self.labels(LAYER, tokens, *form), KEY) not in done]

    def asked_for(self, row: Row) -> bool:
        """Whether a row of a file belongs to this plan."""
        alike = all(row[name] == getattr(self, name) for name in ("threads", "rounds", "between"))
        lengths = {LAYER: self.lengths, LLAMA: self.end_to_end}.get(row["part"])
        known = row["method"] in {STOCK, FOLDED, PRODUCTS, EXACT, *self.configs}
        return alike and (row["part"] == BUILD or (known and (lengths is None or row["tokens"] in lengths)))

    def steps(self) -> Iterator[int]:
        """The numbers of the steps; steps below 0 come first and are not counted."""
        return iter(range(-WARM, self.rounds))
