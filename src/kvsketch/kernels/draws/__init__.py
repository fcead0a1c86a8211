"""Random numbers by address, `algorithms/draws.uniforms`; `native.py` draws the same ones in C."""

from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.algorithms import draws
from kvsketch.kernels.draws import native


def uniforms(*address: int | Int64[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Numbers in [0, 1), one per element of the broadcast address, independent between addresses."""
    found = native.uniforms(*address)
    return draws.uniforms(*address) if found is None else found


__all__ = ["uniforms"]
