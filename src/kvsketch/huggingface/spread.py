"""A model that is spread over several processes (`torchrun`, `tp_plan="auto"`): each has some heads of every layer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from kvsketch.caches.core.part import HeadPart
from kvsketch.caches.core.storage import sent_to

TENSOR_PARALLEL = "tp"  # how transformers names the dimension of a mesh over which heads are divided


@dataclass(frozen=True)
class OneOfSeveral(HeadPart):
    """The heads that this process has, and the group of processes that have the rest."""

    group: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "OneOfSeveral":
        return self

    def gather(self, of_heads: Float[Tensor, "h ..."]) -> Float[Tensor, "hp ..."]:
        device = "cpu" if dist.get_backend(self.group) == "gloo" else torch.device("cuda", torch.cuda.current_device())
        own = of_heads.to(device).contiguous()
        found = [torch.empty_like(own) for _ in range(self.parts)]
        dist.all_gather(found, own, group=self.group)
        return torch.cat(found).to(of_heads.device)


@dataclass(frozen=True)
class Division:
    """One dimension of a mesh of processes over which weights of attention are divided."""

    name: str | None
    rank: int
    parts: int
    group: Any


def divisions_of(modules: Iterable[nn.Module]) -> tuple[Division, ...]:
    """The divisions of a model's attention modules; none if this process has whole weights."""
    found: Any = next((x for module in modules for x in module.parameters() if is_divided(x)), None)
    if found is None:
        return ()
    mesh, names = found.device_mesh, found.device_mesh.mesh_dim_names
    return tuple(
        Division(names[i] if names else None, mesh.get_local_rank(i), mesh.size(i), mesh.get_group(i))
        for i, placement in enumerate(found.placements)
        if placement.is_shard()
    )


def part_of(divisions: Sequence[Division], layer: int, heads: int, every: int) -> HeadPart:
    """Which of a layer's KV heads are in this process, if keys of `heads` came and the layer has `every` in all."""
    if heads == every:
        return HeadPart()
    fits = [one for one in divisions if one.parts * heads == every]
    fits = [one for one in fits if one.name == TENSOR_PARALLEL] or fits
    if len(fits) != 1:
        raise ValueError(
            f"keys of {heads} KV heads came to layer {layer}, and the model has {every}: which of them these are is "
            "known where transformers divides a model over processes, from_pretrained(..., tp_plan='auto')"
        )
    return OneOfSeveral(fits[0].rank * heads, fits[0].parts, fits[0].group)


def numbers_at(tensor: Tensor, places: Tensor | None) -> Tensor:
    """The numbers at these places of a flattened tensor, or all; zeros for those that other processes have."""
    if not is_divided(tensor):
        flat = tensor.detach().reshape(-1)
        return flat if places is None else flat[sent_to(flat.device, places)]
    here = _corner(tensor)
    if here is None:
        return numbers_at(tensor.full_tensor(), places)  # type: ignore[attr-defined]
    own = tensor.detach().to_local()  # type: ignore[attr-defined]
    places = torch.arange(tensor.numel(), device="cpu") if places is None else places
    where = [at - first for at, first in zip(torch.unravel_index(places, tensor.shape), here, strict=True)]
    inside = torch.stack([(at >= 0) & (at < n) for at, n in zip(where, own.shape, strict=True)]).all(0)
    found = own.new_zeros(len(places))
    found[inside.to(own.device)] = own[tuple(at[inside].to(own.device) for at in where)]
    return found


def combined(content: Tensor, groups: Iterable[Any]) -> Tensor:
    """All bytes, from processes that each have some of them, and zeros for the others."""
    for group in groups:
        dist.all_reduce(content, dist.ReduceOp.MAX, group=group)
    return content


def groups_of(tensors: Iterable[Tensor]) -> list[Any]:
    """The groups of processes that have the rest of these tensors."""
    found = dict[str, Any]()
    for tensor in tensors:
        if is_divided(tensor):
            for i, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
                if not placement.is_replicate():
                    group = tensor.device_mesh.get_group(i)  # type: ignore[attr-defined]
                    found[group.group_name] = group
    return list(found.values())


def is_divided(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, which need not be imported to tell."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def _corner(tensor: Any) -> list[int] | None:
    """Where this process's part of a tensor begins; None if the tensor is not cut into parts one after the other."""
    first, size = [0] * tensor.ndim, list(tensor.shape)
    for i, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard":
            return None
        cut, each = placement.dim, -(-size[placement.dim] // tensor.device_mesh.size(i))
        before = min(size[cut], each * tensor.device_mesh.get_local_rank(i))
        first[cut], size[cut] = first[cut] + before, min(each, size[cut] - before)
    return first
