"""The precision of `torch.autocast`, and how an attention function follows it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def autocast_of(device: torch.device) -> torch.dtype | None:
    """The precision of `torch.autocast`; None outside of it."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


# Whether `torch.autocast` is on for any device: to ask by a device's name takes ten times as long, in a model's layers.
_anywhere: Callable[[], bool] | None = getattr(torch._C, "_is_any_autocast_enabled", None)


def may_be_on() -> bool:
    """Whether `torch.autocast` may be on for some device."""
    return _anywhere is None or torch.compiler.is_compiling() or _anywhere()


def is_on(like: Tensor) -> bool:
    """Whether `torch.autocast` is on for this tensor's device."""
    return may_be_on() and torch.is_autocast_enabled(like.device.type)


def dtype_of(x: Tensor) -> torch.dtype:
    """The precision in which stock's attention would take this: under `torch.autocast` keys and values differ."""
    return x.dtype if x.dtype == torch.float64 or not is_on(x) else torch.get_autocast_dtype(x.device.type)


def as_autocast(x: Tensor) -> Tensor:
    """The tensor as stock's attention would take it."""
    return x.to(dtype_of(x))


def without_autocast(like: Tensor) -> AbstractContextManager[Any]:
    """A block in which tensors keep their own precision: what is held must not depend on who asks for it."""
    return torch.autocast(like.device.type, enabled=False) if is_on(like) else nullcontext()
