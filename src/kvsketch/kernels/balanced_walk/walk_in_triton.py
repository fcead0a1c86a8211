"""The walk of the experiments in Triton, `kernels/gpu/walk.py`: None where Triton cannot be used."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.kernels import gpu
from kvsketch.kernels.balanced_walk import strips
from kvsketch.kernels.balanced_walk.reference import ONES

STRIP = 64  # tokens
TILE = 32  # earlier tokens at a time
READ = 32  # tokens at a time before the walk
PART = 32  # tokens that walk at a time: a number for every lane of a warp
WARPS = 2
STAGES = 2
AT_ONCE = 1 << 13  # blocks: 150 MiB of room for those of 256 tokens


def keep_half(
    keys: Float[Tensor, "l n d"],
    values: Float[Tensor, "l n e"],
    uniforms: Float[Tensor, "l n"],
    sizes: Int64[Tensor, " l"],
    scale: float,
    gain: float,
) -> Bool[Tensor, "l n"] | None:
    """Which half to keep; see `strips.halving_signs`."""
    blocks, count, width = keys.shape
    if not gpu.can_read(keys.device, keys, values) or keys.dtype != values.dtype:
        return None
    widest = max(width, values.shape[2])
    if blocks * count == 0 or widest > gpu.MOST_WIDTH or gpu.spills(keys.device, keys.dtype, STRIP, widest):
        return None
    if not gpu.works("BalanceKV's walk", keys.device, keys.dtype, _check):
        return None
    what = f"halving blocks of {keys.dtype} × {width} and {values.shape[2]}"
    parts = [slice(start, start + AT_ONCE) for start in range(0, blocks, AT_ONCE)]

    def call() -> Tensor:
        found = [_kept(keys[x], values[x], uniforms[x], sizes[x], scale, gain) for x in parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    return gpu.tried(what, keys.device, call)


def _check(device: torch.device, dtype: torch.dtype) -> None:
    """Hold the kernel against torch in float64: rounding may decide in a few blocks."""
    draw = torch.Generator().manual_seed(0)
    keys, values, uniforms = (
        torch.rand(6, 70, *width, generator=draw, device="cpu").to(device) for width in ((128,), (128,), ())
    )
    keys, values = (2 * (x - 0.5).to(dtype) for x in (keys, values))
    for gain in (0.25, 1e6):
        rest = uniforms, torch.full((6,), 70, device=device), 0.1, gain
        found, right = _kept(keys, values, *rest), strips.halving_signs(keys.double(), values.double(), *rest) > 0
        same = int((found == right).all(1).sum())
        assert same >= 4, f"{same} of 6 blocks are halved as by torch"
        assert bool((found.sum(1) == 35).all()), "a half is kept"


def _kept(keys: Tensor, values: Tensor, uniforms: Tensor, sizes: Tensor, scale: float, gain: float) -> Tensor:
    blocks, count, width = keys.shape
    from kvsketch.kernels.gpu.walk import keep_half as kernel

    keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (keys, values))
    strip = STRIP if max(width, values.shape[2]) <= 128 else STRIP // 2
    kept = torch.zeros(blocks, count, dtype=torch.bool, device=keys.device)
    padded = -(-count // strip) * strip
    rooms = torch.empty(blocks, strip * (strip + 1) + 2 * padded, dtype=torch.float32, device=keys.device)
    with gpu.current(keys.device):
        kernel[(blocks,)](
            *(keys, values, uniforms.contiguous(), sizes.contiguous(), kept.view(torch.int8), rooms),
            *(*keys.stride()[:2], *values.stride()[:2], count, float(scale), float(gain), ONES),
            WIDTH=width, VALUE_WIDTH=values.shape[2], KEY_BLOCK=gpu.power_of_two(width, 16),
            VALUE_BLOCK=gpu.power_of_two(values.shape[2], 16), STRIP=strip, PART=PART,
            READ=READ, TILE=TILE, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return kept
