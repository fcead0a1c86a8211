"""Where keys point in Triton, `kernels/gpu/directions.py`: None where Triton cannot be used."""

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.kernels import gpu
from kvsketch.kernels.directions import reference

ROWS, WARPS = 32, 4  # tokens at a time
SUMMED = 256  # tokens that a program sums up


def towards(keys: Float[Tensor, "l n d"], mean: Float[Tensor, "l d"]) -> Float[Tensor, "l n"] | None:
    """See `reference.py`."""
    device = keys.device
    if mean.dtype != torch.float64 or mean.device != device or mean.shape != (len(keys), keys.shape[2]):
        return None
    if not _can_read(keys) or not gpu.works("directions of keys", device, keys.dtype, _check):
        return None
    what = f"directions of keys of {keys.dtype} × {keys.shape[2]}"
    return gpu.tried(what, device, lambda: _towards(keys, mean.contiguous()))


def total(keys: Float[Tensor, "l n d"]) -> Float[Tensor, "l d"] | None:
    """See `reference.py`."""
    if not _can_read(keys) or not gpu.works("sums of keys", keys.device, keys.dtype, _check_total):
        return None
    what = f"sums of keys of {keys.dtype} × {keys.shape[2]}"
    return gpu.tried(what, keys.device, lambda: _total(keys))


def _can_read(keys: Tensor) -> bool:
    if not gpu.wanted_on(keys.device) or not gpu.can_read(keys.device, keys) or 0 in keys.shape:
        return False
    return keys.shape[2] <= gpu.MOST_WIDTH and keys.stride(2) == 1 and len(keys) <= gpu.MOST_ALONG_Y


def _check(device: torch.device, dtype: torch.dtype) -> None:
    """Compare the kernel with torch."""
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 90, 128, generator=draw, device="cpu").to(device, dtype)
    keys[0, 5] = 0
    mean = keys.sum(1, dtype=torch.float64)
    torch.testing.assert_close(_towards(keys, mean), reference.towards(keys, mean), rtol=1e-12, atol=1e-12)


def _check_total(device: torch.device, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 600, 128, generator=draw, device="cpu").to(device, dtype)
    torch.testing.assert_close(_total(keys), reference.total(keys), rtol=1e-12, atol=1e-12)


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


def _total(keys: Tensor) -> Tensor:
    lanes, count, width = keys.shape
    parts = torch.empty(lanes, -(-count // SUMMED), width, dtype=torch.float64, device=keys.device)
    from kvsketch.kernels.gpu.directions import total as kernel

    with gpu.current(keys.device):
        kernel[(parts.shape[1], lanes)](
            *(keys, parts, *keys.stride()[:2], count),
            WIDTH=width, BLOCK=gpu.power_of_two(width), ROWS=ROWS, SUMMED=SUMMED, num_warps=WARPS,
        )  # fmt: skip
    return parts[:, 0] if parts.shape[1] == 1 else parts.sum(1)
