"""Where keys point: methods set apart the keys that point away from all others, since queries look there.

`reference.py` is torch, which first converts all keys to float64. `native.py` reads keys once where they lie; so does
`in_triton.py` on GPUs, in one launch where torch needs seven for every 4,096 tokens.
"""

from jaxtyping import Float
from torch import Tensor

from kvsketch.kernels.directions import in_triton, native, reference
from kvsketch.kernels.directions.reference import lengths


def towards(keys: Float[Tensor, "l n d"], mean: Float[Tensor, "l d"]) -> Float[Tensor, "l n"]:
    """⟨k, mean⟩ / ‖k‖ for the mean of all keys, or any multiple of it: the least are of keys that point away."""
    for form in (native, in_triton):
        if (found := form.towards(keys, mean)) is not None:
            return found
    return reference.towards(keys, mean)


def sum_of_directions(keys: Float[Tensor, "l n d"]) -> Float[Tensor, "l d"]:
    """The sum of all keys, each of length 1."""
    found = native.sum_of_directions(keys)
    return reference.sum_of_directions(keys) if found is None else found


def total(keys: Float[Tensor, "l n d"]) -> Float[Tensor, "l d"]:
    """The sum of all keys."""
    for form in (native, in_triton):
        if (found := form.total(keys)) is not None:
            return found
    return reference.total(keys)


__all__ = ["lengths", "sum_of_directions", "total", "towards"]
