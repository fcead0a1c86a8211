"""Tensors of a state: sent to and from a device, checked, and counted."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_args

import torch
from jaxtyping import jaxtyped
from torch import Tensor

T = TypeVar("T")


def sent_to(device: torch.device, numbers: Tensor) -> Tensor:
    """Numbers from the CPU, on a device. With CUDA the caller does not wait for work that is queued before the copy.

    It does wait while a graph is captured, whose replays would copy from where the numbers were; and in torch's sync
    debug mode, which is to find this call.
    """
    at_once = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    return numbers.to(device, non_blocking=at_once and torch.cuda.get_sync_debug_mode() == 0)


def listed_on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """A list of numbers, on a device."""
    return sent_to(device, torch.tensor(numbers, device="cpu"))


def fetched(numbers: Tensor) -> Callable[[], Tensor]:
    """Numbers from a device, on the CPU: a GPU sends them when it has them, and calling the result waits for that."""
    if numbers.device.type != "cuda":
        return numbers.cpu
    here = torch.empty_like(numbers, device="cpu", pin_memory=True)
    here.copy_(numbers, non_blocking=True)
    sent = torch.cuda.Event()
    sent.record(torch.cuda.current_stream(numbers.device))

    def wait() -> Tensor:
        sent.synchronize()
        return here

    return wait


def made_of(kind: type[T], tensors: dict[str, Tensor]) -> T:
    """A dataclass of these tensors, if they are what its annotations ask for: the right types, and sizes that agree."""
    allowed = {field.name: get_args(field.type) or (field.type,) for field in fields(kind)}  # type: ignore[arg-type]
    given: dict[str, Any] = {name: tensors.get(name) for name in allowed}
    with jaxtyped("context"):  # a letter stands for one number throughout
        right = all(any(isinstance(given[name], one) for one in allowed[name]) for name in allowed)
    if not right or not tensors.keys() <= allowed.keys():
        shapes = {name: (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in tensors.items()}
        raise ValueError(f"{kind.__name__} of {shapes!s:.150}")
    return kind(**given)


def tensors_of(state: object, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a dataclass by name; those that are None are left out."""
    named = {f"{prefix}{field.name}": getattr(state, field.name) for field in fields(state)}  # type: ignore[arg-type]
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def with_prefix(named: dict[str, T], prefix: str) -> dict[str, T]:
    """The values whose names begin with the prefix, by their names without it."""
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of memory that the tensors pin, each allocation once: a view of a large one counts as the large one."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())
