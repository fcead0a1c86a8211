"""Tokens that methods set apart: those whose keys point away from all others, which is where queries look."""

import torch
from jaxtyping import Float
from torch import Tensor

LEAST = 1e-12  # what a key of length zero is divided by


def towards(keys: Float[Tensor, "l n d"], mean: Float[Tensor, "l d"]) -> Float[Tensor, "l n"]:
    """⟨k, mean⟩ / ‖k‖ for the mean of all keys, or any multiple of it: the least ones point away."""
    precise = keys.double()
    return torch.einsum("lnd,ld->ln", precise, mean) / precise.norm(dim=2).clamp_min(LEAST)
