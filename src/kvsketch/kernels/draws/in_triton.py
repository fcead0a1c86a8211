"""Random numbers by address in Triton, `kernels/gpu/draws.py`: None where Triton cannot be used."""

from functools import lru_cache
from itertools import takewhile
from math import prod

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.algorithms import draws
from kvsketch.kernels import gpu

PARTS, SIZES = 6, 4  # of an address, and of the result, at most
BLOCK, WARPS = 512, 4
MOST = 1 << 61  # of integers that follow the first tensor


def uniforms(*address: int | Int64[Tensor, "..."]) -> Float[Tensor, "..."] | None:
    """The numbers of `algorithms/draws.uniforms`, bit for bit."""
    tensors = [x for x in address if isinstance(x, Tensor)]
    if not tensors or not gpu.wanted_on(tensors[0].device):
        return None
    device, shape = tensors[0].device, torch.broadcast_shapes(*(x.shape for x in tensors))
    alike = all(type(x) is Tensor and x.dtype == torch.int64 and x.device == device for x in tensors)
    small = all(isinstance(x, Tensor) or abs(x) < MOST for x in _split(address)[1])
    if not alike or not small or len(address) > PARTS or len(shape) > SIZES or 0 in shape:
        return None
    if not gpu.works("draws", device, torch.float64, _check):
        return None
    return gpu.tried("draws", device, lambda: _drawn(address, shape, device))


def _check(device: torch.device, dtype: torch.dtype) -> None:
    """Compare the kernel with torch, bit for bit."""
    heads, ranks = torch.tensor([[5], [0], [77]], device=device), torch.arange(1000, device=device)
    for address in ((3, 1, heads, 2, ranks), (heads, ranks[::3] - 9), (2**62, ranks)):
        shape = torch.broadcast_shapes(*(x.shape for x in address if isinstance(x, Tensor)))
        found = _drawn(address, shape, device)
        assert torch.equal(found, draws.uniforms(*address).to(dtype)), f"draws by {len(address)} numbers differ"


def _drawn(address: tuple[int | Tensor, ...], shape: tuple[int, ...], device: torch.device) -> Tensor:
    from kvsketch.kernels.gpu.draws import draw as kernel

    first, rest = _split(address)
    given = tuple(x if isinstance(x, Tensor) else gpu.odd(x) for x in rest)
    steps = [x.expand(shape).stride() if isinstance(x, Tensor) else () for x in rest]
    strides = tuple(tuple(gpu.odd(step) for step in (*[0] * SIZES, *each)[-SIZES:]) for each in steps)
    out, sizes = torch.empty(shape, dtype=torch.float64, device=device), ([1] * SIZES + [*shape])[-SIZES:]
    with gpu.current(device):
        kernel[(-(-prod(shape) // BLOCK),)](
            *(given, strides, out, _state(first), prod(shape), *sizes[1:]),
            PARTS=len(rest), LISTED=gpu.bits(*(x if isinstance(x, Tensor) else None for x in rest)), BLOCK=BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
    return out


def _split(address: tuple[int | Tensor, ...]) -> tuple[tuple[int | Tensor, ...], tuple[int | Tensor, ...]]:
    """The integers before the first tensor, which the CPU has at once, and the rest."""
    first = tuple(takewhile(lambda x: isinstance(x, int), address))
    return first, address[len(first) :]


@lru_cache(maxsize=1024)
def _state(address: tuple[int, ...]) -> int:
    """The state that the first parts of an address lead to."""
    return int(draws.state_of(*address)) if address else 0
