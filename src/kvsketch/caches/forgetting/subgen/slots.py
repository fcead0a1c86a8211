"""What clusters and value samples share: slots that can become more, and random numbers by address."""

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
    """Tensors [l, slots, …] of the dataclass that derives from this, which can have more slots."""

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return tensors_of(self)

    def resize(self, wanted: dict[str, int]) -> None:
        """Have so many slots at least; all tensors can be written to afterwards, and new slots are 0."""
        for name, tensor in self.tensors().items():
            more = wanted[name] - tensor.shape[1] if name in wanted else 0
            wide = F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, more)) if more > 0 else tensor
            setattr(self, name, writable(wide))


@dataclass(frozen=True)
class Draws:
    """Numbers for the tokens of lanes, by address."""

    seed: int
    layer: int
    heads: Int64[Tensor, " l"]  # the KV head of each lane

    def numbers(self, ranks: Int64[Tensor, "#l n"], purpose: int, count: int) -> Float[Tensor, "l n {count}"]:
        """`count` numbers in [0, 1) for every token; other ones for every purpose."""
        number = torch.arange(count, device=ranks.device)
        return uniforms(self.seed, self.layer, self.heads[:, None, None], ranks[:, :, None], purpose, number)
