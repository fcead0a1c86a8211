"""The settings of a fit: every number that its result depends on."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kvsketch.algorithms.saap import APART, LONG_RANGE

MOST = 10**9


def _check(settings: Any, **least: int) -> None:
    for name, smallest in least.items():
        value = getattr(settings, name)
        if value < smallest:
            raise ValueError(f"{name} must be at least {smallest}, got {value}")
        if value > MOST:
            raise ValueError(f"{name} must be at most {MOST:,}, got {value!s:.40}")


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """What is noted about a text."""

    apart: int = APART  # queries learn from keys more than this many tokens away
    away: int = LONG_RANGE  # only queries learn whose best key is more than this many tokens away
    sinks: int = 1  # first keys of a text, which are left out of everything here
    queries: int = 512  # of each KV head, at most
    layers: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self, apart=0, away=0, sinks=0, queries=1)

    @property
    def least_tokens(self) -> int:
        """The least length of a text whose last query has a key that it may learn from."""
        return self.apart + self.sinks + 2


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the classifiers are trained."""

    steps: int = 500
    batch: int = 512  # queries of each head in a step
    rate: float = 1e-3
    schedule: str = "cosine"  # from the rate down to nothing; or constant
    start: str = "clusters"  # from what k-means says, if the inner layer is twice as wide as a query; or random
    products: str = "float32"  # precision of products' inputs and outputs; weights and all else stay float32

    def __post_init__(self) -> None:
        _check(self, steps=1, batch=2)
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be positive, got {self.rate}")
        if self.schedule not in ("cosine", "constant"):
            raise ValueError(f"schedule must be cosine or constant, got {self.schedule!r}")
        if self.start not in ("clusters", "random"):
            raise ValueError(f"start must be clusters or random, got {self.start!r}")
        if self.products not in ("float32", "bfloat16"):
            raise ValueError(f"products must be float32 or bfloat16, got {self.products!r}")

    def rates(self, done: int = 0) -> Iterator[float]:
        """The rate of every step after the first `done`."""
        for step in range(done, self.steps):
            falls = self.schedule == "cosine"
            yield self.rate * (1 + math.cos(math.pi * step / self.steps)) / 2 if falls else self.rate


# "paper" is the recipe of Saap, appendix A; there queries are drawn anew in every step, here from a pool.
RECIPES = {
    "fast": Recipe(),
    "paper": Recipe(steps=40_000, batch=1000, rate=1e-5, schedule="constant", start="random"),
}


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """All settings of a fit."""

    shards: ShardSettings = field(default_factory=ShardSettings)
    recipe: Recipe = field(default_factory=Recipe)
    tokens: int = 16384  # of a text, at most; longer ones are cut
    buckets: int = 1024
    hidden: int = 1024  # width of the classifiers' inner layer; 0: they have none
    iterations: int = 10  # of k-means; appendix A
    keys_at_most: int = 65_536  # for k-means, of each KV head
    pool: int = 16_384  # queries to learn from, of each KV head
    held_out: float = 0.1  # the share of texts to measure on, at least one
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self, tokens=2, buckets=2, hidden=0, iterations=1, pool=2)
        if self.keys_at_most < self.buckets:
            raise ValueError(
                f"keys_at_most must be the number of buckets at least, {self.buckets}, got {self.keys_at_most}"
            )
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be between 0 and 1, got {self.held_out}")


def generator(*address: object) -> torch.Generator:
    """A generator of random numbers for one purpose: the same numbers on every machine."""
    digest = hashlib.sha256(repr(address).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
