"""Exact attention: nothing leaves the window."""

from dataclasses import dataclass
from typing import ClassVar

from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.config import KeepingConfig


@dataclass(frozen=True, kw_only=True)
class Exact(KeepingConfig):
    """Keeps every token: what the others are compared with."""

    name: ClassVar[str] = "exact"

    def window_size(self, budget: Budget, count: int) -> int | None:
        return None

    def new_method(self, layer: int) -> None:
        """Nothing ever leaves the window."""
