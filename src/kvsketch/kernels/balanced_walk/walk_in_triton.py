"""The walk of the experiments in Triton, `kernels/gpu/walk.py`: None where Triton cannot be used."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.kernels import gpu
from kvsketch.kernels.balanced_walk import strips
from kvsketch.kernels.balanced_walk.reference import ONES
from kvsketch.kernels.places.reference import chosen_of

STRIP = 64  # tokens
TILE = 32  # earlier tokens at a time
READ = 32  # tokens at a time before the walk
PART = 32  # tokens that walk at a time: a number for every lane of a warp
WARPS = 2
STAGES = 2
AT_ONCE = 1 << 13  # blocks, in whole lanes, at least one lane: 150 MiB of room with blocks of 256 tokens


def keep_half(
    keys: Float[Tensor, "l n d"],
    values: Float[Tensor, "l n e"],
    uniforms: Float[Tensor, "l n"],
    sizes: Int64[Tensor, " l"],
    scale: float,
    gain: float,
) -> Bool[Tensor, "l n"] | None:
    """Which half to keep; see `strips.halving_signs`."""
    if not gpu.wanted_on(keys.device):
        return None
    every = torch.arange(keys.shape[1], device=keys.device).expand(len(keys), -1)
    return keep_half_of(keys, values, every, uniforms[:, None], sizes[:, None], scale, gain)


def keep_half_of(
    keys: Float[Tensor, "l n d"],
    values: Float[Tensor, "l n e"],
    index: Int64[Tensor, "l w"],
    uniforms: Float[Tensor, "l c m"],
    sizes: Int64[Tensor, "l c"],
    scale: float,
    gain: float,
) -> Bool[Tensor, "lc m"] | None:
    """The same for blocks of numbered tokens, which are read where they lie."""
    lanes, blocks, width = *uniforms.shape[:2], keys.shape[2]
    if not gpu.can_read(keys.device, keys, values) or keys.dtype != values.dtype:
        return None
    widest = max(width, values.shape[2])
    if uniforms.numel() == 0 or widest > gpu.MOST_WIDTH or gpu.spills(keys.device, keys.dtype, STRIP, widest):
        return None
    if not gpu.works("BalanceKV's walk", keys.device, keys.dtype, _check):
        return None
    what = f"halving blocks of {keys.dtype} × {width} and {values.shape[2]}"
    step = max(1, AT_ONCE // blocks)
    parts = [slice(start, start + step) for start in range(0, lanes, step)]

    def call() -> Tensor:
        found = [_kept(keys[x], values[x], index[x], uniforms[x], sizes[x], scale, gain) for x in parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    return gpu.tried(what, keys.device, call)


def _check(device: torch.device, dtype: torch.dtype) -> None:
    """Compare the kernel with torch in float64: rounding may decide in a few blocks."""
    draw = torch.Generator().manual_seed(0)
    keys, values = ((torch.rand(2, 210, 128, generator=draw, device="cpu") * 2 - 1).to(device, dtype) for _ in range(2))
    uniforms = torch.rand(2, 3, 70, generator=draw, device="cpu").to(device)
    index = torch.stack([torch.randperm(210, generator=draw, device="cpu") for _ in range(2)]).to(device)
    own_keys, own_values = (x.view(6, 70, 128).double() for x in chosen_of((keys, values), index))
    own_uniforms = uniforms.flatten(0, 1)
    for gain in (0.25, 1e6):
        sizes = torch.full((6,), 70, device=device)
        found = _kept(keys, values, index, uniforms, sizes.view(2, 3), 0.1, gain)
        right = strips.halving_signs(own_keys, own_values, own_uniforms, sizes, 0.1, gain) > 0
        same = int((found == right).all(1).sum())
        assert same >= 4, f"{same} of 6 blocks are halved as by torch"
        assert bool((found.sum(1) == 35).all()), "a half is kept"


def _kept(
    keys: Tensor, values: Tensor, index: Tensor, uniforms: Tensor, sizes: Tensor, scale: float, gain: float
) -> Tensor:
    (lanes, blocks, count), width = uniforms.shape, keys.shape[2]
    from kvsketch.kernels.gpu.walk import keep_half as kernel

    keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (keys, values))
    strip = STRIP if max(width, values.shape[2]) <= 128 else STRIP // 2
    kept = torch.empty(lanes * blocks, count, dtype=torch.bool, device=keys.device)
    padded = -(-count // strip) * strip
    rooms = torch.empty(lanes * blocks, strip * (strip + 1) + 2 * padded, dtype=torch.float32, device=keys.device)
    with gpu.current(keys.device):
        kernel[(lanes * blocks,)](
            *(keys, values, index, uniforms.contiguous(), sizes, kept.view(torch.int8), rooms),
            *(*keys.stride()[:2], *values.stride()[:2], *index.stride(), *sizes.stride(), blocks, count),
            *(float(scale), float(gain), ONES),
            WIDTH=width, VALUE_WIDTH=values.shape[2], KEY_BLOCK=gpu.power_of_two(width, 16),
            VALUE_BLOCK=gpu.power_of_two(values.shape[2], 16), STRIP=strip, PART=PART,
            READ=READ, TILE=TILE, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return kept
