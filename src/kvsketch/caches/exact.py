"""Exact attention: nothing leaves the window."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from kvsketch.caches.core.asking import CONTEXT, LAST, MAX, MEAN, QUESTIONS, SECOND, SUM, WINDOW, Asking, Askings
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.config import KeepingConfig

NOTHING = "nothing"
ASKINGS = {
    WINDOW: Asking(WINDOW, MEAN, 32),
    CONTEXT: Asking(CONTEXT, SUM),
    LAST: Asking(WINDOW, LAST, 1),
    SECOND: Asking(SECOND, MAX),
    QUESTIONS: Asking(QUESTIONS, MAX),
}


def noting_for(asking: Asking | None) -> str | None:
    """What an exact cache is told to note for methods with this asking; None if it cannot note that."""
    return NOTHING if asking is None else next((name for name, own in ASKINGS.items() if own == asking), None)


@dataclass(frozen=True, kw_only=True)
class Exact(KeepingConfig):
    """Keeps every token: what the others are compared with.

    `noting` makes it note how much attention tokens get, so that `compress` can make caches of methods that choose by
    that: from a prompt's last queries ("window", for snapkv), from all of them ("context", for h2o), from the very last
    one ("last", for tova), from a second reading or from questions ("second reading" and "questions", for kvzip), or
    from several ("window, context"). Each takes a number or two for every token and KV head.
    """

    name: ClassVar[str] = "exact"

    noting: str = NOTHING

    def __post_init__(self) -> None:
        super().__post_init__()
        names = _names(self.noting)
        if unknown := [name for name in names if name not in (NOTHING, *ASKINGS)]:
            several = ", or several with commas, as in noting='window, context'"
            raise ValueError(f"noting must be one of {', '.join((NOTHING, *ASKINGS))}{several}; got {unknown[0]!r}")
        if len(set(names)) < len(names) or (NOTHING in names and len(names) > 1):
            raise ValueError(
                f"noting must name each kind once, 'nothing' by itself, as in noting='window, context'; got {names}"
            )
        if SECOND in names and QUESTIONS in names:
            raise ValueError(
                f"noting={self.noting!r}: a prompt is read a second time, or questions are: leave one of them out"
            )

    @cached_property
    def askings(self) -> Askings:
        return Askings(tuple(ASKINGS[name] for name in _names(self.noting) if name != NOTHING))

    @property
    def holds_back(self) -> bool:
        return self.askings.behind

    def window_size(self, budget: Budget, count: int) -> int | None:
        return None

    def new_method(self, layer: int) -> None:
        """Nothing ever leaves the window."""


def _names(noting: Any) -> list[Any]:
    """What is noted, one by one."""
    return [name.strip() for name in noting.split(",")] if isinstance(noting, str) else [noting]
