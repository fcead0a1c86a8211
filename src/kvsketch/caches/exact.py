"""Exact attention: nothing leaves the window."""

from dataclasses import dataclass
from typing import ClassVar

from kvsketch.caches.base import KeepingConfig, Past
from kvsketch.caches.budget import Budget
from kvsketch.caches.streaming_llm import Nothing


@dataclass(frozen=True, kw_only=True)
class Exact(KeepingConfig):
    """Keeps every token: what the others are compared with."""

    name: ClassVar[str] = "exact"

    def window_size(self, budget: Budget, count: int) -> int | None:
        return None

    def new_past(self, budget: Budget, layer: int) -> Past:
        return Nothing()
