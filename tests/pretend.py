"""A device that is not there: tensors that say they are on a GPU, and whose numbers the CPU computes.

What a GPU would refuse is refused: tensors of two devices in one operation. So a program that mixes them is found where
there is no GPU. Kernels for GPUs are not called.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import adam
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy", 0)  # a device that every build of torch knows by name; none of its kernels is called
ANYWHERE = {"aten::copy_", "aten::_to_copy", "aten::to"}
AUTOCAST = ("autocast", "is_autocast_enabled")  # which do not know the device
FUSED = "_device_dtype_check_for_fused"  # nor does an optimizer whose steps are fused
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}  # indices may be on the CPU


class There(Tensor):
    """A tensor that says it is there; `here` has its numbers."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "There":
        made = Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=DEVICE,
        )
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(function, args, kwargs or {})

    def __repr__(self) -> str:
        return f"There({self.here})"


class _Made(TorchDispatchMode):
    """Makes new tensors there that are asked for there."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(function, args, kwargs or {})


class _Copied(TorchFunctionMode):
    """Copies lists there that torch would put there by itself."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if function is Tensor.tolist and isinstance(args[0], There):
            return args[0].cpu().tolist()
        if function in (torch.norm, Tensor.norm) and isinstance(args[0], There):  # known devices take another way
            return There(function(args[0].here, *args[1:], **kwargs))
        if function is Tensor.untyped_storage and isinstance(args[0], There):
            return args[0].here.untyped_storage()
        if function in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], There):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(x) if isinstance(x, list) else x for x in index)
            return function(args[0], index, *args[2:])
        if function in (torch.tensor, torch.as_tensor) and device is not None and not isinstance(args[0], Tensor):
            return function(*args, **kwargs | {"device": "cpu"}).to(device)
        return function(*args, **kwargs)


def computed(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What the CPU makes of it, on the device where a GPU would have put it."""
    name, leaves = function._schema.name, tree_leaves((args, kwargs))
    given = [x for x in leaves if isinstance(x, Tensor)]
    wanted = [x for x in leaves if isinstance(x, torch.device)]
    there = {id(x.here): x for x in given if isinstance(x, There)}
    if there and name not in ANYWHERE:
        here = any(not isinstance(x, There) and x.dim() > 0 for x in given)
        if here and not (name in INDEXING and isinstance(given[0], There)):
            raise RuntimeError(f"{name}: tensors of {DEVICE} and of the CPU: {[tuple(x.shape) for x in given]}")
    out = function(*_here(args), **_here(kwargs))
    if name == "aten::copy_":
        put_there = isinstance(given[0], There)
    else:
        put_there = wanted[0].type == DEVICE.type if wanted else bool(there)
    if not put_there:
        return out
    return tree_map(lambda x: there[id(x)] if id(x) in there else There(x) if isinstance(x, Tensor) else x, out)


def _here(tree: Any) -> Any:
    """The same, as it is on the CPU."""
    at_home = {There: lambda x: x.here, torch.device: lambda x: torch.device("cpu") if x.type == DEVICE.type else x}
    return tree_map(lambda x: at_home[type(x)](x) if type(x) in at_home else x, tree)


@contextmanager
def pretended() -> Iterator[torch.device]:
    """The device, for as long as the block lasts."""
    known = {name: getattr(torch, name) for name in AUTOCAST}

    def as_on_the_cpu(function: Any) -> Any:
        return lambda device, **options: function("cpu" if device == DEVICE.type else device, **options)

    with pytest.MonkeyPatch.context() as patch:
        for name, function in known.items():
            patch.setattr(torch, name, as_on_the_cpu(function))
        patch.setattr(adam, FUSED, lambda *_, **__: None)
        with _Made(), _Copied():
            yield DEVICE
