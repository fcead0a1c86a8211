"""Kernels in C: compiled once for the machine at hand, into the user's cache folder, and called through ctypes.

`build.py` compiles and checks them; the C files lie beside it. Torch can do everything they do, in the files beside
their callers, and does so where there is no compiler, on other devices, and under `KVSKETCH_CPU_KERNELS=off`; only the
weights of large classifiers are rounded for kernels alone (`kernels/routing/rounded.py`).
"""

import ctypes
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor

from kvsketch.kernels.native.build import CannotBuildError, built

SWITCH = "KVSKETCH_CPU_KERNELS"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_log = logging.getLogger("kvsketch")
_off = ContextVar("kernels in C are off", default=False)


def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there are none, or where they are off."""
    return None if _off.get() else loaded()


@contextmanager
def off() -> Iterator[None]:
    """Use torch's own kernels in this context, as with the switch: to compare the two in one process."""
    before = _off.set(True)
    try:
        yield
    finally:
        _off.reset(before)


@cache
def loaded() -> ctypes.CDLL | None:
    """The compiled kernels; None where there are none, which is logged once."""
    wanted = os.environ.get(SWITCH, "auto")
    if wanted not in ("auto", "off"):
        raise ValueError(f"{SWITCH} is {wanted!r}, and must be auto or off")
    if wanted == "off":
        return None
    try:
        path = built()
        found = ctypes.CDLL(str(path))
    except (CannotBuildError, OSError) as error:
        _log.warning("torch's own kernels are used instead of the faster ones in C: %s", error)
        return None
    os.register_at_fork(after_in_child=found.kvs_forked)
    return found


def name() -> str:
    """Which kernels are in use on the CPU, for reports."""
    found = library()
    if found is None:
        return "torch"
    found.kvs_instructions.restype = ctypes.c_char_p
    return f"C ({found.kvs_instructions().decode()})"


def library_for(*tensors: Tensor, kinds: Collection[torch.dtype] = DTYPES) -> ctypes.CDLL | None:
    """The kernels, if C can read these: on the CPU, of one dtype, in memory as they are, and no gradient is wanted."""
    kind = tensors[0].dtype
    if torch.compiler.is_compiling() or kind not in kinds:
        return None
    learning = torch.is_grad_enabled()
    for x in tensors:
        if type(x) is not Tensor or x.dtype != kind or not x.is_cpu or x.is_neg() or (learning and x.requires_grad):
            return None
    return library()


def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A CPU tensor for C to write to, whatever torch's default device and dtype are."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def addresses(*tensors: Tensor) -> list[ctypes.c_void_p]:
    """Where tensors begin, as C takes it."""
    return [ctypes.c_void_p(x.data_ptr()) for x in tensors]


def where(*tensors: Tensor) -> list[int]:
    """Where tensors begin: torch may move one, for example to share it with a process, and free the old memory."""
    return [x.data_ptr() for x in tensors]


def pointers(*tensors: Tensor) -> "ctypes.Array[ctypes.c_void_p]":
    """The same as an array, for kernels that read any number of tensors."""
    return (ctypes.c_void_p * len(tensors))(*where(*tensors))


def numbers(values: Sequence[int]) -> "ctypes.Array[ctypes.c_int64]":
    """Integers as C takes them."""
    return (ctypes.c_int64 * len(values))(*values)


def threads() -> int:
    """As many as torch would use."""
    return torch.get_num_threads()


__all__ = [
    "CannotBuildError",
    "addresses",
    "library",
    "library_for",
    "name",
    "numbers",
    "off",
    "pointers",
    "room",
    "threads",
    "where",
]
