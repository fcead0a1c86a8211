"""Which of several files belongs to a model: of the user's own, and of those that come with kvsketch."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable


@runtime_checkable
class Measured(Protocol):
    """Something that was measured on a model, and knows on which one."""

    @property
    def model(self) -> Mapping[str, Any]:
        """What there is to know about the model."""

    def check_model(self, facts: Mapping[str, Any]) -> None:
        """Refuse another model."""


M = TypeVar("M", bound=Measured)


def first_of_model(places: Iterable[Path], read: Callable[[Path], M], facts: Mapping[str, Any], missing: str) -> M:
    """What the first file holds that belongs to the model with these facts; `missing`: the error if there is none.

    A file that cannot be read may belong to another model: its error is raised only if no other belongs to this one.
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
