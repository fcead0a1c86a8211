"""Methods that keep every token and look at few: what they are told.

    [ sinks | past: everything, of which each query reads a part | window ]

Calls that bring several tokens see all of it, as a prompt does in the paper (`prefill="exact"`); a single new token,
as when a model writes, looks up. With `prefill="streaming"` every query looks up.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial

from kvsketch.caches.base import KeepingConfig, MethodConfig, check_count
from kvsketch.caches.budget import Budget
from kvsketch.caches.exact import Exact
from kvsketch.caches.question import LookupPast
from kvsketch.caches.rows_in_step import RowsInStep
from kvsketch.caches.slots import SlotsPast


@dataclass(frozen=True, kw_only=True)
class LookupConfig(KeepingConfig):
    """What every such method is told. `full_layers`: so many of the model's first layers read everything.

    Defaults are the paper's: one sink, 2047 latest tokens, and layer 0 in full (sections 3 and 4).
    """

    sinks: int = 1
    window: int = 2047
    full_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("window", self.window, least=1)
        check_count("full_layers", self.full_layers, least=0)

    def window_size(self, budget: Budget, count: int) -> int | None:
        return self.window

    def for_layer(self, layer: int) -> MethodConfig:
        if layer >= self.full_layers and self.looks_up_in(layer):
            return self
        return Exact(sinks=self.sinks, prefill=self.prefill, chunk=self.chunk)

    def looks_up_in(self, layer: int) -> bool:
        """Whether a layer that is not among the first can look things up."""
        return True

    @abstractmethod
    def slots(self, layer: int) -> SlotsPast:
        """An empty past of one layer, for rows that are in step."""

    def new_past(self, budget: Budget, layer: int) -> LookupPast:
        return RowsInStep(partial(self.slots, layer))
