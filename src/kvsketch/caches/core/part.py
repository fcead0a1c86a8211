"""Which KV heads of a layer are here, and which of those go together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class HeadPart:
    """All of them, or some where a model is spread over several processes.

    Their numbers are those in the whole model, so that a part of it draws and holds what that does.
    """

    first: int = 0  # the number of the first one that is here
    parts: int = 1  # so many processes have as many heads each

    def gather(self, of_heads: Float[Tensor, "h ..."]) -> Float[Tensor, "hp ..."]:
        """Numbers of all heads, in every process, of those that each has of its own."""
        return of_heads


class Heads(NamedTuple):
    """Heads that go together: their places among all that are here, their numbers in the whole model, how many are."""

    places: Sequence[int]
    numbers: Sequence[int]
    here: int

    @classmethod
    def every(cls, count: int) -> "Heads":
        """All of a layer's, in a model that is not spread."""
        return cls(range(count), range(count), count)

    @property
    def all_here(self) -> bool:
        """Whether these are all."""
        return len(self.places) == self.here
