"""The precision of `torch.autocast`, and how an attention function goes by it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def autocast_of(device: torch.device) -> torch.dtype | None:
    """The precision of `torch.autocast`; None outside of it."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def as_autocast(x: Tensor) -> Tensor:
    """As stock's attention would take it: under `torch.autocast` keys come in another precision than values."""
    wanted = autocast_of(x.device)
    return x if wanted is None or x.dtype == torch.float64 else x.to(wanted)


def without_autocast(like: Tensor) -> AbstractContextManager[Any]:
    """Where the precision is what the tensors have: what is held must not depend on who asks for it."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
