"""How far a cache is from exact attention: a prompt's last queries are answered exactly too."""

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens, log_mass_of
from kvsketch.caches.core.query import Query
from kvsketch.caches.core.tokens import NewTokens
from kvsketch.kernels.weighted_attention import weighted_attention

PROBES = 8  # queries of a prompt that are answered twice


@torch.no_grad()
def exact_probe(asked: Query, new: NewTokens) -> Partial | None:
    """The answers to the last queries of a first call if nothing were dropped; None if padding is among them."""
    if new.valid is not None and not bool(new.valid[:, -PROBES:].all()):
        return None
    everything = WeightedTokens(new.keys, new.values, log_mass_of(new.valid))
    return weighted_attention(asked.queries[:, :, -PROBES:], everything, asked.scale, softcap=asked.softcap)


def relative_error(answer: Partial, exact: Partial) -> Float[Tensor, "b hg"]:
    """‖answer - exact answer‖ / ‖exact answer‖, per row and query head."""
    expected = exact.out.float()
    length = torch.linalg.vector_norm
    return length(answer.out.float() - expected, dim=(2, 3)) / length(expected, dim=(2, 3)).clamp_min(1e-30)
