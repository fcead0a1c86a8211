"""The lines of the board: a method, how its heads share the budget, and how much is held."""

from dataclasses import dataclass

from kvsketch.caches.core.config import BudgetedConfig
from kvsketch.caches.registry import METHODS, read_call
from kvsketch.evaluation.board.names import EXACT

OWN = ""  # the package of our own methods


@dataclass(frozen=True)
class Line:
    """A method of some package with its options; `keep` is None where everything is held.

    `given` is what it was told to keep, if that is less than `keep` so that it holds no more than `keep`.
    """

    name: str
    heads: str
    keep: float | None
    package: str = OWN
    given: float | None = None

    @property
    def reference(self) -> bool:
        """Whether this line is exact, which holds and reads everything: the others are compared with it."""
        return self.name == EXACT


def line_of(method: str, package: str = OWN, budget: float | None = None) -> Line:
    """The line of a row: its spec without budget and heads, and these two by themselves.

    `budget` is the line's budget, where the method was given less.
    """
    name, options = read_call(method)
    config = METHODS.get(name) if package == OWN else None
    usual = config.heads if config is not None and issubclass(config, BudgetedConfig) else ""
    keep, heads = options.pop("keep", None), str(options.pop("heads", usual))
    said = ", ".join(f"{option}={value!r}" for option, value in options.items())
    named = f"{name}({said})" if said else name
    return Line(named, heads, keep, package) if budget in (None, keep) else Line(named, heads, budget, package, keep)
