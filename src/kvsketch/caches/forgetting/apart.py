"""Tokens that methods set apart: those whose keys point away from all others, which is where queries look."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def towards(keys: Float[Tensor, "l n d"], mean: Float[Tensor, "l d"]) -> Float[Tensor, "l n"]:
    """⟨k, mean⟩ / ‖k‖ for the mean of all keys, or any multiple of it: the least ones point away."""
    return torch.einsum("lnd,ld->ln", F.normalize(keys.double(), dim=2), mean)
