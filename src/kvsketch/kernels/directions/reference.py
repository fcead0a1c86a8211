"""Where keys point, and how long they are: in torch, in float64, some tokens at a time."""

import torch
from jaxtyping import Float
from torch import Tensor

AT_ONCE = 1 << 12  # tokens: in float64 all keys of a long prompt would be larger than its cache
LEAST = 1e-12  # what a key of length zero is divided by


def towards(keys: Float[Tensor, "l n d"], mean: Float[Tensor, "l d"]) -> Float[Tensor, "l n"]:
    """⟨k, mean⟩ / ‖k‖ for the mean of all keys, or any multiple of it: the least are of keys that point away."""
    strips = (part.double() for part in keys.split(AT_ONCE, dim=1))
    return torch.cat([(part @ mean.unsqueeze(2)).squeeze(2) / _divisors(part) for part in strips], 1)


def lengths(x: Float[Tensor, "l n d"]) -> Float[Tensor, "l n"]:
    """Norms in full precision."""
    return torch.cat([part.double().norm(dim=2) for part in x.split(AT_ONCE, dim=1)], 1)


def sum_of_directions(keys: Float[Tensor, "l n d"]) -> Float[Tensor, "l d"]:
    """The sum of all keys, each of length 1."""
    strips = (part.double() for part in keys.split(AT_ONCE, dim=1))
    return torch.stack([(_divisors(part).reciprocal().unsqueeze(1) @ part).squeeze(1) for part in strips]).sum(0)


def total(keys: Float[Tensor, "l n d"]) -> Float[Tensor, "l d"]:
    """The sum of all keys."""
    return keys.sum(1, dtype=torch.float64)


def _divisors(keys: Float[Tensor, "l n d"]) -> Float[Tensor, "l n"]:
    return keys.norm(dim=2).clamp_min(LEAST)
