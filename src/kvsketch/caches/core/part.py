"""Which KV heads of a layer are in this process, and which of them go together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class HeadPart:
    """All KV heads of a layer, or some of them if a model is spread over several processes.

    Heads have the numbers of the whole model, so that a part of it draws and holds what the whole would.
    """

    first: int = 0  # the number of the first head that is here
    parts: int = 1  # the number of processes, which have equally many heads each

    def gather(self, of_heads: Float[Tensor, "h ..."]) -> Float[Tensor, "hp ..."]:
        """In every process, the numbers of all heads, from those that each process has of its own heads."""
        return of_heads


class Heads(NamedTuple):
    """Heads that go together: their places among all heads here, their numbers in the model, how many are here."""

    places: Sequence[int]
    numbers: Sequence[int]
    here: int

    @classmethod
    def every(cls, count: int) -> "Heads":
        """All heads of a layer, in a model that is not spread."""
        return cls(range(count), range(count), count)

    @property
    def all_here(self) -> bool:
        """Whether these are all heads here."""
        return len(self.places) == self.here
