"""Kernels in Triton, for GPUs: compiled at their first call, for the kinds of arguments that it has.

Torch can do everything they do, in the files beside their callers, and does so where there is no Triton, on old GPUs,
where a kernel's first try differs from torch, and under `KVSKETCH_GPU_KERNELS=off`. Under Triton's interpreter
(`TRITON_INTERPRET=1`) they run on the CPU, slowly: so they are tested where there is no GPU. What C can do too
is done in C there, unless those kernels are off: a step is not to ask for more than it needs.
"""

import itertools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

SWITCH = "KVSKETCH_GPU_KERNELS"
INTERPRETED = "TRITON_INTERPRET"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NOT_INTERPRETED = torch.bfloat16  # products of these come out wrong there
NOT_COMPILED = "PassManager::run failed"  # so begin messages of Triton's compiler about a kernel
NO_ROOM = "Triton Error [CUDA]: out of memory"  # and Triton's where a kernel's own memory has no room
MOST_WIDTH = 256  # of keys and of values
MOST_ALONG_Y = 65_535  # programs along the second axis of a launch
MOST_SINGLE_ROWS, MOST_SINGLE_WIDTH = 16, 128  # of tiles in float32
NOT_TRITON = "torch's own kernels are used instead of the faster ones in Triton"
FOR_GRAPHS, APART = 16_384, 32  # launches in graphs that have counters of their own, and how many numbers each has
FIRST_EARLY = (9, 0)  # compute capability: kernels can themselves wait for the one before them
OLDEST = (8, 0)  # compute capability: bfloat16 in products

T = TypeVar("T")
_log = logging.getLogger("kvsketch")
_found = dict[tuple[str, torch.device], bool]()
_refused = set[str]()
_counters = dict[tuple[torch.device, int], Tensor]()  # by device and stream
_for_graphs = dict[torch.device, tuple[Tensor, Iterator[int]]]()  # kept for good: graphs count there; how many are used


def wanted_on(device: torch.device) -> bool:
    """Whether kernels for this device are wanted at all. Callers ask this first: on most CPUs that is all they ask."""
    if torch.compiler.is_compiling():
        return False
    wanted = os.environ.get(SWITCH, "auto")
    if wanted not in ("auto", "off"):
        raise ValueError(f"{SWITCH} is {wanted!r}, and must be auto or off")
    return wanted == "auto" and device.type == ("cpu" if os.environ.get(INTERPRETED) == "1" else "cuda")


def works(
    what: str,
    device: torch.device,
    dtype: torch.dtype,
    check: Callable[[torch.device, torch.dtype], None],
    *,
    triton: bool = True,
) -> bool:
    """Whether a kernel is used on a device for numbers of this dtype; if it is wanted but is not, why is logged once.

    `check` runs once: it raises an error if the kernel's answers differ from its definition's. `triton=False`: the
    kernel is not in Triton.
    """
    if not wanted_on(device):
        return False
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    what = f"{what} in {str(dtype).removeprefix('torch.')}"
    needed = [("Triton", lambda: _missing_on(device))] if triton else []
    for one, find in (*needed, (what, lambda: _wrong_with(check, device, dtype))):
        if (one, device) not in _found:
            if recording(device):
                return False  # nothing can be tried while a graph is recorded
            wrong = find()
            if wrong is not None:
                said = f"{NOT_TRITON if triton else f'{what} is not used'}: {wrong.said}"
                _say_once(said, wrong.reason if triton else None)
            _found[one, device] = wrong is None
        if not _found[one, device]:
            return False
    return True


class Wrong(NamedTuple):
    """What is said against a kernel, and the reason: a missing compiler is missing for all kernels, and logged once."""

    said: str
    reason: str


def _wrong_with(
    check: Callable[[torch.device, torch.dtype], None], device: torch.device, dtype: torch.dtype
) -> Wrong | None:
    """What a check says against a kernel."""
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            check(device, dtype)
    except torch.OutOfMemoryError:
        raise  # another time there may be room
    except Exception as error:  # a driver, a compiler or a kernel can fail in any way
        if str(error).startswith(NO_ROOM):
            raise
        said = f"{check.__module__.removeprefix('kvsketch.')}, {dtype}: {_said(error)}"
        return Wrong(said, said if isinstance(error, AssertionError) else f"{_said(error)} on {device}")
    return None


def _missing_on(device: torch.device) -> Wrong | None:
    """Why there can be no kernels for a device, if there is a reason."""
    said = None
    if find_spec("triton") is None:
        said = "Triton is not installed"
    elif device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < OLDEST:
        said = f"{torch.cuda.get_device_name(device)} is older than compute capability {OLDEST[0]}.{OLDEST[1]}"
    return None if said is None else Wrong(said, said)


def can_read(device: torch.device, *tensors: Tensor) -> bool:
    """Whether kernels can read these: they are on the device, of known dtypes, and no gradient is wanted."""
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return False
    if not all(type(x) is Tensor and x.dtype in DTYPES and x.device == device for x in tensors):
        return False
    return device.type != "cpu" or all(x.dtype != NOT_INTERPRETED for x in tensors)


def too_wide(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether heads are wider than kernels are made for, or than registers hold; logged once, as torch takes longer."""
    if width <= MOST_WIDTH and not spills(device, dtype, 1, width):
        return False
    _say_once(
        f"torch attends to heads of {width} numbers in {dtype}, more slowly: kernels in Triton are made for "
        f"{MOST_WIDTH} at most (steps in float32: {MOST_SINGLE_WIDTH})"
    )
    return True


def spills(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> bool:
    """Whether tiles of so many rows are more than a GPU's registers hold, as high or wide ones of float32 are."""
    return device.type == "cuda" and dtype == torch.float32 and (rows > MOST_SINGLE_ROWS or width > MOST_SINGLE_WIDTH)


def power_of_two(count: int, least: int = 1) -> int:
    """The next power of two, the size of a block."""
    return max(least, 1 << max(0, count - 1).bit_length())


def odd(number: int) -> int:
    """A number that changes from step to step, as kernels take it (`numbers.plain`)."""
    return 2 * number + 3


def bits(*things: object | None) -> int:
    """A bit for each that is there."""
    return sum(1 << place for place, thing in enumerate(things) if thing is not None)


def tried(what: str, device: torch.device, call: Callable[[], T]) -> T | None:
    """What a kernel returns; None where there is no room for it now, or none can be made for this GPU.

    The latter is logged once for each `what`.
    """
    what = f"{what} on {device}"
    if what in _refused:
        return None
    try:
        return call()
    except Exception as error:
        if str(error).startswith(NO_ROOM):
            return None
        if not type(error).__module__.startswith("triton") and not str(error).startswith(NOT_COMPILED):
            raise
        _say_once(f"no kernel in Triton could be compiled for {what}, so torch does it: {_said(error)}", what)
        return None


def _say_once(what: str, key: str | None = None) -> None:
    key = what if key is None else key
    if key not in _refused:
        _refused.add(key)
        _log.warning("%s", what)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"


def recording(device: torch.device) -> bool:
    """Whether a graph is being recorded: nothing is computed before it is replayed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def counters(count: int, device: torch.device) -> Tensor:
    """Zeros with which a launch's programs count themselves; the last program writes 0 again.

    Each stream has its own, because its launches come one after another. A graph may be replayed on any stream, beside
    others, so each launch in a graph has counters that nothing else gets. When those are used up, the graph itself sets
    some to 0 in each replay, which takes a microsecond longer.
    """
    if device.type == "cpu":
        return torch.zeros(count, dtype=torch.int32, device=device)
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if recording(device):
        if device in _for_graphs and count <= APART:
            places, used = _for_graphs[device]
            place = next(used, len(places))
            if place < len(places):
                return places[place]
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _counters or len(_counters[key]) < count:
        _counters[key] = torch.zeros(power_of_two(count, 1024), dtype=torch.int32, device=device)
    if device not in _for_graphs:  # what graphs share cannot be made while one is recorded
        _for_graphs[device] = torch.zeros(FOR_GRAPHS, APART, dtype=torch.int32, device=device), itertools.count()
    return _counters[key]


def assert_like(out: Tensor, right: Tensor, lse: Tensor, right_lse: Tensor) -> None:
    """Raise an error if answers differ from the right ones, in float64, by more than their own rounding."""
    most = 1e-5 if out.dtype == torch.float32 else 0.01
    torch.testing.assert_close(out.double(), right, rtol=2 * most, atol=most)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-3, atol=1e-3)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """The context in which to launch kernels: Triton takes the device that is current."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def early(device: torch.device) -> dict[str, Any]:
    """Options for a launch that begins before the one ahead of it has ended, where a GPU has that, and waits for it."""
    has = device.type == "cuda" and torch.version.hip is None
    has = has and torch.cuda.get_device_capability(device) >= FIRST_EARLY
    return {"EARLY": True, "launch_pdl": True} if has else {"EARLY": False}


@cache
def processors(device: torch.device) -> int:
    """How many programs run at once, at least."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may use beside its registers."""
    known = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(known, "shared_memory_per_block_optin", 0)
