"""Where keys point in Triton, `kernels/gpu/directions.py`: None where Triton cannot be used."""

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.kernels import gpu
from kvsketch.kernels.directions import reference

ROWS, WARPS = 32, 4  # tokens of a program


def towards(keys: Float[Tensor, "l n d"], mean: Float[Tensor, "l d"]) -> Float[Tensor, "l n"] | None:
    """See `reference.py`."""
    device = keys.device
    if not gpu.wanted_on(device) or not gpu.can_read(device, keys) or mean.dtype != torch.float64:
        return None
    if 0 in keys.shape or keys.shape[2] > gpu.MOST_WIDTH or keys.stride(2) != 1 or len(keys) > gpu.MOST_ALONG_Y:
        return None
    if (
        mean.device != device
        or mean.shape != (len(keys), keys.shape[2])
        or not gpu.works("directions of keys", device, keys.dtype, _check)
    ):
        return None
    what = f"directions of keys of {keys.dtype} × {keys.shape[2]}"
    return gpu.tried(what, device, lambda: _towards(keys, mean.contiguous()))


def _check(device: torch.device, dtype: torch.dtype) -> None:
    """Hold the kernel against torch."""
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 90, 128, generator=draw, device="cpu").to(device, dtype)
    keys[0, 5] = 0
    mean = keys.sum(1, dtype=torch.float64)
    torch.testing.assert_close(_towards(keys, mean), reference.towards(keys, mean), rtol=1e-12, atol=1e-12)


def _towards(keys: Tensor, mean: Tensor) -> Tensor:
    lanes, count, width = keys.shape
    out = torch.empty(lanes, count, dtype=torch.float64, device=keys.device)
    from kvsketch.kernels.gpu.directions import towards as kernel

    with gpu.current(keys.device):
        kernel[(-(-count // ROWS), lanes)](
            *(keys, mean, out, *keys.stride()[:2], count),
            WIDTH=width, BLOCK=gpu.power_of_two(width), ROWS=ROWS, LEAST=reference.LEAST, num_warps=WARPS,
        )  # fmt: skip
    return out
