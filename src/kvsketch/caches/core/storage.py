"""Tensors of a state: checked, chosen from, and counted."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_args

import torch
from jaxtyping import Bool, Int64, jaxtyped
from torch import Tensor

T = TypeVar("T")


def chosen(x: Tensor, index: Int64[Tensor, "l m"]) -> Tensor:
    """Places of `x` [l, n, …] with the numbers of `index`, lane by lane; whole places are copied at a time."""
    return chosen_of((x,), index)[0]


def chosen_of(each: Sequence[Tensor], index: Int64[Tensor, "l m"]) -> list[Tensor]:
    """The same of several: where they are numbered is found once."""
    found, rows = list[Tensor](), dict[tuple[int, int], Tensor]()
    for x in each:
        unit = math.gcd(x.stride(0), x.stride(1))  # of memory: lanes and places are whole numbers of these apart
        if not unit or 0 in x.shape[:2]:
            found.append(x[torch.arange(len(x), device=x.device)[:, None], index])
            continue
        # All lanes as one: that copies rows as they are, which is three times as fast.
        lane, place = x.stride(0) // unit, x.stride(1) // unit
        if (lane, place) not in rows:
            first = lane * torch.arange(len(x), device=x.device)[:, None]
            rows[lane, place] = ((index if place == 1 else place * index) + first).flatten()
        count = (len(x) - 1) * lane + (x.shape[1] - 1) * place + 1
        one = x.as_strided((count, *x.shape[2:]), (unit, *x.stride()[2:]))
        found.append(one.index_select(0, rows[lane, place]).unflatten(0, index.shape))
    return found


def sent_to(device: torch.device, numbers: Tensor) -> Tensor:
    """Numbers of the CPU's, on a device. CUDA copies them without waiting for what it has to do before.

    Not so in a graph, whose replays would copy from where they were; nor where somebody looks for what waits, who is to
    find this.
    """
    at_once = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    return numbers.to(device, non_blocking=at_once and torch.cuda.get_sync_debug_mode() == 0)


def listed_on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """A list of numbers, on a device."""
    return sent_to(device, torch.tensor(numbers, device="cpu"))


def fetched(numbers: Tensor) -> Callable[[], Tensor]:
    """Numbers of a device's, on the CPU: a GPU sends them when it has them, and what is returned waits for that."""
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


def in_front(there: Bool[Tensor, "*lanes n"]) -> Int64[Tensor, "*lanes n"]:
    """Numbers of the places that hold something, in their order, and then of those that do not."""
    upto, number = there.cumsum(-1), torch.arange(there.shape[-1], device=there.device)
    place = torch.where(there, upto - 1, upto[..., -1:] + number - upto)
    return torch.empty_like(place).scatter_(-1, place, number.expand_as(place))


def made_of(kind: type[T], tensors: dict[str, Tensor]) -> T:
    """A dataclass of tensors, if these are the ones that its annotations ask for: kinds, and sizes that agree."""
    allowed = {field.name: get_args(field.type) or (field.type,) for field in fields(kind)}  # type: ignore[arg-type]
    given: dict[str, Any] = {name: tensors.get(name) for name in allowed}
    with jaxtyped("context"):  # a letter is one number throughout
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
    """Those whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of memory that the tensors pin, each allocation once: a view of a large one counts as the large one."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())
