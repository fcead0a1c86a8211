"""A model in training, with Adam's moments of its parameters, as tensors with names."""

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def state_of(model: nn.Module, adam: torch.optim.Adam) -> dict[str, Tensor]:
    """Parameters and buffers, and the moments of each parameter."""
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"{moment}.{name}": adam.state[parameter][moment] for moment in MOMENTS}
    return found


def restore(model: nn.Module, adam: torch.optim.Adam, tensors: dict[str, Tensor], path: object) -> None:
    """Put back what `state_of` gave; `path` is the file it comes from."""
    parameters = dict(model.named_parameters())
    wanted = [f"model.{name}" for name in model.state_dict()]
    wanted += [f"{moment}.{name}" for name in parameters for moment in MOMENTS]
    if missing := [name for name in wanted if name not in tensors]:
        raise ValueError(
            f"{path} is no checkpoint that this version of kvsketch can go on from: {missing[0]} is missing. Begin "
            "anew in another folder, or use the version that wrote it"
        )
    model.load_state_dict({name: tensors[f"model.{name}"] for name in model.state_dict()})
    for name, parameter in parameters.items():
        moments = {moment: tensors[f"{moment}.{name}"] for moment in MOMENTS}
        # Fused Adam counts steps on the parameter's device, otherwise they are counted on the CPU.
        stays = {"step"} if not adam.defaults["fused"] else set()
        adam.state[parameter] = {k: v if k in stays else v.to(parameter.device) for k, v in moments.items()}
