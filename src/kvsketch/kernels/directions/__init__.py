"""Where keys point: methods set apart those that point away from all others, which is where queries look.

`reference.py` is torch, `in_triton.py` does in one launch on GPUs what takes torch seven for every 4,096 tokens, and
reads keys once to sum them up, where torch makes numbers of 64 bits of them first.
"""

from jaxtyping import Float
from torch import Tensor

from kvsketch.kernels.directions import in_triton, reference
from kvsketch.kernels.directions.reference import lengths, sum_of_directions


def towards(keys: Float[Tensor, "l n d"], mean: Float[Tensor, "l d"]) -> Float[Tensor, "l n"]:
    """⟨k, mean⟩ / ‖k‖ for the mean of all keys, or any multiple of it: the least ones point away."""
    found = in_triton.towards(keys, mean)
    return reference.towards(keys, mean) if found is None else found


def total(keys: Float[Tensor, "l n d"]) -> Float[Tensor, "l d"]:
    """The sum of all keys."""
    found = in_triton.total(keys)
    return reference.total(keys) if found is None else found


__all__ = ["lengths", "sum_of_directions", "total", "towards"]
