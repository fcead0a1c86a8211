"""Random numbers by address: a pure function of a seed and where the number is used.

Methods draw by (seed, layer, head, rank of the token in its row), so the same token gets the same
number whether it comes alone or in a chunk, in a batch or by itself, on a CPU or elsewhere; there is
no generator to save, and no global generator is touched.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

# The increment and the two multipliers of SplitMix64 (Steele, Lea, Flood 2014), as signed integers.
_STEP, _FIRST, _SECOND = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def uniforms(*address: int | Int64[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Numbers in [0, 1), one per element of the broadcast address, independent between addresses."""
    return _shift(state_of(*address), 11).to(torch.float64) * 2.0**-53


def state_of(*address: int | Int64[Tensor, "..."]) -> Int64[Tensor, "..."]:
    """64 bits into which all parts of an address were mixed, one after another."""
    state: Tensor | None = None
    for part in address:
        number = part.long() if isinstance(part, Tensor) else torch.tensor(part, dtype=torch.int64, device="cpu")
        state = _scramble(number) if state is None else _scramble(state + number)
    assert state is not None, "an address has at least one part"
    return state


def _scramble(x: Tensor) -> Tensor:
    x = x + _STEP
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
