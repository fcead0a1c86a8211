"""Which of several files that might be a model's is: the user's own, and those that come with kvsketch."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable


@runtime_checkable
class Measured(Protocol):
    """What was measured on a model, and knows on which."""

    @property
    def model(self) -> Mapping[str, Any]:
        """What there is to know about the model."""

    def check_model(self, facts: Mapping[str, Any]) -> None:
        """Refuse another model."""


M = TypeVar("M", bound=Measured)


def first_of_model(places: Iterable[Path], read: Callable[[Path], M], facts: Mapping[str, Any], missing: str) -> M:
    """The first that is of the model with these facts; `missing` is said where there is none.

    One that cannot be read may have been of another model: that is said only where no other is of this one.
    """
    damaged = list[ValueError]()
    for path in places:
        if path.is_file():
            try:
                found = read(path)
            except ValueError as error:
                damaged.append(error)
                continue
            if found.model["fingerprint"] == facts["fingerprint"]:
                found.check_model(facts)
                return found
    raise damaged[0] if damaged else ValueError(missing)
