"""The options of methods that keep every token and look at few.

    [ sinks | past: everything, of which each query reads a part | window ]

Calls that bring several tokens see all of it, as a prompt does in the paper (`prefill="exact"`); a single new token,
as when a model writes, looks up. With `prefill="streaming"` every query looks up.
"""

from abc import abstractmethod
from dataclasses import dataclass

from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.checks import check_count
from kvsketch.caches.core.config import KeepingConfig, MethodConfig
from kvsketch.caches.exact import Exact
from kvsketch.caches.lookup.store import Lookup


@dataclass(frozen=True, kw_only=True)
class LookupConfig(KeepingConfig):
    """Options that every such method has. `full_layers`: how many of the model's first layers read everything.

    The defaults are the paper's: one sink, the latest 2047 tokens, and layer 0 in full (sections 3 and 4).
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
        """Whether a layer that is not among the first can look tokens up."""
        return True

    @abstractmethod
    def new_method(self, layer: int) -> Lookup:
        """How tokens are labelled and found in one layer."""


@dataclass(frozen=True, kw_only=True)
class SortedConfig(LookupConfig):
    """`staging`: how many tokens wait until they are sorted in; every query reads those that wait."""

    staging: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("staging", self.staging, least=1)


@dataclass(frozen=True, kw_only=True)
class BucketedConfig(SortedConfig):
    """`visit`: at most so many tokens (2048), or such a share of the past (0.05); the best bucket is always visited."""

    probes: int = 32
    visit: int | float | str | None = None
    estimate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("probes", self.probes, least=0)
        if self.visit is not None:
            object.__setattr__(self, "visit", _checked_visit(self.visit))
        if not isinstance(self.estimate, bool):
            raise ValueError(f"estimate must be True or False, got {self.estimate!r}")


def _checked_visit(visit: object) -> int | float:
    """The number that a limit of tokens names."""
    wrong = f"visit must be a number of tokens such as 2048, or a share of the past such as 0.05, got {visit!r}"
    if isinstance(visit, str):
        try:
            visit = int(visit) if visit.strip().isdigit() else float(visit)
        except ValueError:
            raise ValueError(wrong) from None
    if isinstance(visit, bool) or not isinstance(visit, int | float):
        raise ValueError(wrong)
    if isinstance(visit, int):
        check_count("visit", visit, least=1)
    elif not 0 < visit <= 1:
        raise ValueError(wrong)
    return visit
