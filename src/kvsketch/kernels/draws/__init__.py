"""Random numbers by address, `algorithms/draws.uniforms`; `native.py` draws the same in C, `in_triton.py` on GPUs."""

from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.algorithms import draws
from kvsketch.kernels.draws import in_triton, native


def uniforms(*address: int | Int64[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Numbers in [0, 1), one per element of the broadcast address, independent between addresses."""
    for form in (native, in_triton):
        if (found := form.uniforms(*address)) is not None:
            return found
    return draws.uniforms(*address)


__all__ = ["uniforms"]
