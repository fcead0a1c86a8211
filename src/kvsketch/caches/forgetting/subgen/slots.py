"""What clusters and value samples share: slots whose number can grow, and random numbers by address."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.caches.core.buffers import writable
from kvsketch.caches.core.storage import tensors_of
from kvsketch.kernels.draws import uniforms


@dataclass
class Slots:
    """A base for dataclasses of tensors [l, slots, …], to which slots can be added."""

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return tensors_of(self)

    def resize(self, wanted: dict[str, int]) -> None:
        """Have at least the wanted slots in each tensor; new ones are 0. All tensors can be written to afterwards."""
        for name, tensor in self.tensors().items():
            more = wanted[name] - tensor.shape[1] if name in wanted else 0
            wide = F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, more)) if more > 0 else tensor
            setattr(self, name, writable(wide))


@dataclass(frozen=True)
class Draws:
    """Random numbers for the tokens of lanes, by address."""

    seed: int
    layer: int
    heads: Int64[Tensor, " l"]  # the KV head of each lane

    def numbers(self, ranks: Int64[Tensor, "#l n"], purpose: int, count: int) -> Float[Tensor, "l n {count}"]:
        """`count` numbers in [0, 1) for every token, different ones for every purpose."""
        number = torch.arange(count, device=ranks.device)
        return uniforms(self.seed, self.layer, self.heads[:, None, None], ranks[:, :, None], purpose, number)
