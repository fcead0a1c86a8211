"""Kernels in Triton, for GPUs: compiled when they are first called, for what they are called with.

Everything they do torch does too, in the files beside their callers, and does it where there is no Triton, on old GPUs,
where a first try says another thing than torch, and under `KVSKETCH_GPU_KERNELS=off`. Under Triton's interpreter
(`TRITON_INTERPRET=1`) they run on the CPU, slowly: so they are tested where there is no GPU.
"""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

SWITCH = "KVSKETCH_GPU_KERNELS"
INTERPRETED = "TRITON_INTERPRET"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NOT_INTERPRETED = torch.bfloat16  # products of these come out wrong there
OLDEST = (8, 0)  # compute capability: bfloat16 in products

T = TypeVar("T")
_log = logging.getLogger("kvsketch")
_found = dict[tuple[str, torch.device], bool]()


def wanted_on(device: torch.device) -> bool:
    """Whether kernels for this device are asked for at all."""
    wanted = os.environ.get(SWITCH, "auto")
    if wanted not in ("auto", "off"):
        raise ValueError(f"{SWITCH} is {wanted!r}, and must be auto or off")
    return wanted == "auto" and device.type == ("cpu" if os.environ.get(INTERPRETED) == "1" else "cuda")


def works(what: str, device: torch.device, check: Callable[[torch.device], None]) -> bool:
    """Whether a kernel is used on a device; why it is not though wanted is said once.

    `check` is made once: it raises an error if the kernel does not say what its definition says.
    """
    if not wanted_on(device):
        return False
    if (what, device) not in _found:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # nothing can be tried while a graph is made
        _found[what, device] = _tried_on(what, device, check)
    return _found[what, device]


def _tried_on(what: str, device: torch.device, check: Callable[[torch.device], None]) -> bool:
    missing = missing_on(device)
    if missing is None:
        try:
            check(device)
        except torch.OutOfMemoryError:
            raise  # another time there may be room
        except Exception as error:  # a driver, a compiler or a kernel can fail in any way
            missing = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
    if missing is not None:
        _log.warning("torch's own kernels are used for %s, not those in Triton, which are faster: %s", what, missing)
    return missing is None


def missing_on(device: torch.device) -> str | None:
    """Why there can be no kernels for a device, if there is a reason."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < OLDEST:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability {OLDEST[0]}.{OLDEST[1]}"
    return None


def can_read(device: torch.device, *tensors: Tensor) -> bool:
    """Whether kernels can read these: they are there, of known kinds, and nobody wants a gradient."""
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return False
    if not all(type(x) is Tensor and x.dtype in DTYPES and x.device == device for x in tensors):
        return False
    return device.type != "cpu" or all(x.dtype != NOT_INTERPRETED for x in tensors)


def power_of_two(count: int, least: int = 1) -> int:
    """The next one: so large are blocks."""
    return max(least, 1 << max(0, count - 1).bit_length())


def tried(what: str, call: Callable[[], T]) -> T | None:
    """What a kernel says; None where it cannot be made for this GPU, which is said once for each such thing."""
    if what in _refused():
        return None
    try:
        return call()
    except Exception as error:
        if not type(error).__module__.startswith("triton"):
            raise
        _refused().add(what)
        said = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
        _log.warning("torch does what no kernel in Triton could be made for, %s: %s", what, said)
        return None


@cache
def _refused() -> set[str]:
    return set()


def current(device: torch.device) -> AbstractContextManager[Any]:
    """There kernels are launched: Triton takes the device that is current."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def processors(device: torch.device) -> int:
    """How many programs run at once, at least."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
