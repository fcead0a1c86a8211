"""H2O (Zhang et al. 2023, arXiv:2306.14048): the tokens that got most attention from all queries so far."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvsketch.caches.core.asking import CONTEXT, LAST, SUM, WINDOW, Asking
from kvsketch.caches.core.chooser import MASS, Chooser
from kvsketch.caches.forgetting.noted import ByAttention, NotedConfig


@dataclass(frozen=True, kw_only=True)
class H2O(NotedConfig):
    """Keeps sinks, window and the tokens that got most attention so far: the sum over all queries that saw them.

    Deviations from the paper: a prompt is read exactly before anything is dropped; tokens leave the window eight at a
    time; and a KV head has the sum over the query heads of its group.
    """

    name: ClassVar[str] = "h2o"

    @property
    def asking(self) -> Asking:
        return Asking(CONTEXT, SUM)

    def new_method(self, layer: int) -> Chooser:
        return Heaviest(self)


class Heaviest(ByAttention):
    """A choice by the mass of attention, which is counted as long as a token is held."""

    column = MASS
    precision = torch.float64  # it is added to at every step
    observes = frozenset({"mass"})

    def __init__(self, config: NotedConfig) -> None:
        super().__init__(config)
        self.mass_of_last = self.asking.noted == LAST


@dataclass(frozen=True, kw_only=True)
class Tova(NotedConfig):
    """Keeps sinks, window and the tokens that the latest query looks at most (Oren et al. 2024, arXiv:2401.06104).

    Deviations from the paper: every KV head chooses for itself, by the query heads of its group; the paper takes the
    mean over all heads of a layer. And tokens leave the window eight at a time.
    """

    name: ClassVar[str] = "tova"

    @property
    def asking(self) -> Asking:
        return Asking(WINDOW, LAST, 1)

    def new_method(self, layer: int) -> Chooser:
        return Heaviest(self)
