"""Places of lanes in Triton, `kernels/gpu/places.py`: None where Triton cannot be used."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.kernels import gpu
from kvsketch.kernels.places import reference

LEAST_WIDTH, MOST_WIDTH = 16, 1024  # of a place
COPIED, WARPS = 1 << 12, 4  # numbers that a program copies, in whole places
NUMBERED, MOST_NUMBERED = 1 << 10, 1 << 16  # places of a program, and of a lane: each program looks at the whole lane
COUNTED, COUNTING_WARPS = 1 << 12, 32  # numbers at a time: those of a whole lane are counted again and again


def chosen_of(each: Sequence[Tensor], index: Int64[Tensor, "l m"]) -> list[Tensor] | None:
    """See `reference.py`."""
    device = index.device
    if not gpu.wanted_on(device) or 0 in index.shape or index.dtype != torch.int64 or not gpu.can_read(device, *each):
        return None
    if any(x.ndim != 3 or x.stride(2) != 1 or not LEAST_WIDTH <= x.shape[2] <= MOST_WIDTH for x in each):
        return None
    if any(len(x) != len(index) for x in each) or len(index) > gpu.MOST_ALONG_Y:
        return None
    if not gpu.works("copies of places", device, torch.float32, _check_copies):
        return None
    what = f"copies of places of {[(str(x.dtype), x.shape[2]) for x in each]}"
    return gpu.tried(what, device, lambda: [_copied(x, index) for x in each])


def in_front(there: Bool[Tensor, "*lanes n"]) -> Int64[Tensor, "*lanes n"] | None:
    """See `reference.py`."""
    device = there.device
    if not gpu.wanted_on(device) or type(there) is not Tensor or there.dtype != torch.bool:
        return None
    if not 0 < there.shape[-1] <= MOST_NUMBERED:
        return None
    if not 0 < there.numel() // there.shape[-1] <= gpu.MOST_ALONG_Y:
        return None
    if not gpu.works("numbers of places", device, torch.float32, _check_numbers):
        return None
    return gpu.tried("numbers of places", device, lambda: _numbered(there))


def least_in_front(x: Float[Tensor, "l n"], most: int) -> Int64[Tensor, "l n"] | None:
    """See `reference.py`."""
    device = x.device
    if not gpu.wanted_on(device) or type(x) is not Tensor or x.dtype != torch.float64 or not x.is_contiguous():
        return None
    if not 0 < x.shape[1] <= MOST_NUMBERED or not len(x) or not 0 <= most <= x.shape[1]:
        return None
    if not gpu.works("the least in front", device, x.dtype, _check_least):
        return None
    return gpu.tried("the least in front", device, lambda: _least(x, most))


def _check_copies(device: torch.device, dtype: torch.dtype) -> None:
    """Compare the kernel with torch, bit for bit."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 70, 40, generator=draw, device="cpu").to(device, dtype).transpose(0, 1)[:, :, 3:]
    index = torch.randint(3, (70, 130), generator=draw, device="cpu").to(device)
    for some in (index, index[:, ::2], index[:, :1].expand(-1, 90)):
        torch.testing.assert_close(_copied(x, some), reference.chosen_of((x,), some)[0], rtol=0, atol=0)


def _check_numbers(device: torch.device, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    there = torch.rand(3, 2500, generator=draw, device="cpu").to(device, dtype) < 0.3
    for some in (there, ~there, there[:, ::2], there[:, :7], there.expand(2, 3, -1), there & ~there):
        assert torch.equal(_numbered(some), reference.in_front(some)), "places are numbered otherwise"


def _check_least(device: torch.device, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, COUNTED + 100, generator=draw, device="cpu").to(device, dtype)
    x[1] = (x[1] * 2).round()
    for most in (0, 1, 700, x.shape[1]):
        assert torch.equal(_least(x, most), reference.least_in_front(x, most)), f"others than the {most} least"


def _copied(x: Tensor, index: Tensor) -> Tensor:
    lanes, count = index.shape
    out = x.new_empty(lanes, count, x.shape[2])
    block = gpu.power_of_two(x.shape[2])
    rows = max(1, COPIED // block)
    from kvsketch.kernels.gpu.places import copy as kernel

    with gpu.current(x.device):
        kernel[(-(-count // rows), lanes)](
            *(x, index, out, *x.stride()[:2], *index.stride(), count),
            WIDTH=x.shape[2], BLOCK=block, ROWS=rows, num_warps=WARPS,
        )  # fmt: skip
    return out


def _numbered(there: Tensor) -> Tensor:
    count = there.shape[-1]
    lanes = there.reshape(-1, count)
    out = torch.empty(there.shape, dtype=torch.int64, device=there.device)
    from kvsketch.kernels.gpu.places import number as kernel

    with gpu.current(there.device):
        kernel[(-(-count // NUMBERED), len(lanes))](
            *(lanes.view(torch.int8), out, *lanes.stride(), count), BLOCK=NUMBERED, num_warps=WARPS
        )
    return out


def _least(x: Tensor, most: int) -> Tensor:
    out = torch.empty_like(x, dtype=torch.int64)
    from kvsketch.kernels.gpu.places import least as kernel

    with gpu.current(x.device):
        kernel[(len(x),)](x, out, x.shape[1], most, BLOCK=COUNTED, num_warps=COUNTING_WARPS)
    return out
