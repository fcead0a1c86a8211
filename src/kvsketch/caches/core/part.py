"""Which KV heads of a layer are here: all of them, or some where a model is spread over several processes."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class HeadPart:
    """All of them. Their numbers are those in the whole model, so that a part of it draws and holds what that does."""

    first: int = 0  # the number of the first one that is here
    parts: int = 1  # so many processes have as many heads each

    def gather(self, of_heads: Float[Tensor, "h ..."]) -> Float[Tensor, "hp ..."]:
        """Numbers of all heads, in every process, of those that each has of its own."""
        return of_heads
