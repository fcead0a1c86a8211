"""What a model's weights are, and where its layers compute, wherever the weights lie: on devices, offloaded, on disk.

A fingerprint is made of a few numbers of every tensor, and of the adapters at work. It is taken when it is needed:
weights may be trained, merged or converted at any time.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsketch.caches.core.storage import fetched, sent_to
from kvsketch.huggingface.modules import attention_modules
from kvsketch.huggingface.spread import combined, groups_of, is_divided, numbers_at
from kvsketch.kernels.places import few_of_each

SAMPLED = 64  # numbers of every tensor that go into a fingerprint
# One number in each of 64 equal parts of a tensor, at the multiples of the golden ratio, so that no two are of one
# column, where the matrix allows it.
_NUMBERS = torch.arange(SAMPLED, dtype=torch.float64, device="cpu")
PLACES = _NUMBERS.mul((math.sqrt(5) - 1) / 2).frac() + _NUMBERS
TINY = torch.finfo(torch.float16).tiny  # float16 has fewer bits for what is smaller than bfloat16 has
_PLAIN = nn.Module._save_to_state_dict
NO_MATTER = ("path", "dropout", "init", "inference_mode", "task_type", "revision", "version", "mapping")  # in a config
Modules = Sequence[tuple[str, nn.Module]]  # all modules of a model, by name
ADAPTER = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")  # what a peft layer computes by


@dataclass(frozen=True)
class SampledWeights:
    """A few numbers of every weight, and what adapters do, at one moment."""

    shapes: Mapping[str, tuple[int, ...]]  # of the weights, by name
    coming: Callable[[], Mapping[str, Tensor]]  # waits for the numbers, if a GPU has not sent them yet
    adapters: Sequence[str]

    @cached_property
    def numbers(self) -> Mapping[str, Tensor]:
        """The numbers, on the CPU."""
        return self.coming()

    def fingerprint(self, *, rounded: bool) -> str:
        """A hash of shapes, numbers and adapters.

        `rounded`: to bfloat16, with tiny numbers as zeros, so that the hash is the same in whatever precision a
        checkpoint is loaded; otherwise the precision counts as well.
        """
        digest = hashlib.sha256()
        for name, shape in self.shapes.items():
            digest.update(f"{name} {shape} {'' if rounded else self.numbers[name].dtype}".encode())
        for dtype, alike in groupby(self.numbers.values(), key=lambda sample: sample.dtype):
            some = torch.cat([_bytes_of(sample) for sample in alike])
            digest.update((_bytes_of(_rounded(some.view(dtype))) if rounded else some).numpy().tobytes())
        for said in self.adapters:
            digest.update(said.encode())
        return digest.hexdigest()


def sample_weights(model: PreTrainedModel) -> SampledWeights:
    """A sample of the model's weights as they are now. This does not wait for a GPU that has all of them."""
    modules = tuple(model.named_modules())
    weights = dict(_weights(model, modules))
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    return SampledWeights(shapes, _coming(weights), _adapters(model, modules))


def _adapters(model: PreTrainedModel, modules: Modules) -> list[str]:
    """Which adapters there are, and what they do."""
    found = list[str]()
    for name, module in modules:
        if isinstance(getattr(type(module), "active_adapters", None), property):  # models have methods of that name
            _refuse_adapters_by_row(name, module)
            found.append(f"{name} {[repr(getattr(module, what, None)) for what in ADAPTER]}")
    for name, adapter in sorted(getattr(model, "peft_config", {}).items()):
        found.append(f"{name} {json.dumps(_computed_by(adapter), sort_keys=True, default=str)}")
    return found


def _computed_by(adapter: Any) -> dict[str, Any]:
    """The part of an adapter's config on which its answers depend."""
    known = adapter.to_dict() if hasattr(adapter, "to_dict") else {}
    sets = {name: sorted(value, key=str) if isinstance(value, set) else value for name, value in known.items()}
    return {name: sets[name] for name in sets if not any(part in name for part in NO_MATTER)}


def _refuse_adapters_by_row(name: str, module: nn.Module) -> None:
    """Refuse a call in which rows go through different adapters: their keys would be those of several models."""
    for hook in module._forward_pre_hooks.values():
        if "adapter_names" in (getattr(hook, "keywords", None) or {}):
            raise ValueError(
                f"adapter_names lets rows of {name} go through different adapters, which a cache cannot tell apart: "
                "read the rows of each adapter with a cache of their own"
            )


def _rounded(sample: Tensor) -> Tensor:
    """Numbers as they are if a checkpoint is loaded in the precision that has the fewest bits."""
    if not sample.is_floating_point():
        return sample
    sample = sample.to(torch.bfloat16)
    return sample.where(sample.abs() >= TINY, 0)


def _bytes_of(sample: Tensor) -> Tensor:
    return sample.view(torch.uint8)


def _coming(weights: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Numbers of all tensors, each device's sent at once, and put together from the processes that have parts."""
    by_device, groups = defaultdict[torch.device, list[str]](list), groups_of(weights.values())
    for name, tensor in weights.items():
        by_device[tensor.device].append(name)
    kinds = {name: (min(x.numel(), SAMPLED) * x.element_size(), x.dtype) for name, x in weights.items()}
    sent = [
        (names, fetched(combined(_sampled([weights[name].detach() for name in names]), groups)))
        for names in by_device.values()
    ]

    def arrived() -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for names, content in sent:
            each = content().split([kinds[name][0] for name in names])
            found |= {name: part.clone().view(kinds[name][1]) for name, part in zip(names, each, strict=True)}
        return {name: found[name] for name in kinds}

    return arrived


def _sampled(tensors: Sequence[Tensor]) -> Tensor:
    """Bytes of a few numbers of each of these tensors, which are on one device."""
    found = few_of_each(tensors, PLACES)
    if found is not None:
        return found
    samples, places = list[Tensor](), dict[int, Tensor]()
    for tensor in tensors:
        count = tensor.numel()
        if count > SAMPLED and count not in places:  # for all tensors of one size they are sent once
            at = (PLACES * (count / SAMPLED)).long()
            places[count] = at if is_divided(tensor) else sent_to(tensor.device, at)
        samples.append(_bytes_of(numbers_at(tensor, places.get(count)).contiguous()))
    return torch.cat(samples)


def _weights(model: PreTrainedModel, modules: Modules) -> Iterator[tuple[str, Tensor]]:
    """All parameters and whatever else is saved with a model, by name; offloaded ones come from where they lie."""
    offloaded = {name: (weights, key) for name, weights, key in _offloaded(modules)}
    for prefix, module in modules:
        if not module._parameters and not module._buffers:
            continue
        passing = module._non_persistent_buffers_set
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            name = f"{prefix}.{key}" if prefix else key
            if key in passing:
                continue
            if tensor.device.type != "meta":
                yield name, tensor
                continue
            if name not in offloaded:
                raise ValueError(
                    f"{name} of {type(model).__name__} has no numbers (it is on the meta device), so it cannot be "
                    "known which weights these are: load the weights first"
                )
            weights, place = offloaded[name]
            yield name, weights[place].to(tensor.dtype)  # as accelerate brings it
    yield from _packed(modules)


def _packed(modules: Modules) -> Iterator[tuple[str, Tensor]]:
    """Tensors saved with a model beside its parameters and buffers, as some quantized layers have them."""
    for prefix, module in modules:
        if type(module)._save_to_state_dict is _PLAIN:
            continue
        known = {**module._parameters, **module._buffers}
        kept = dict[str, Any]()
        module._save_to_state_dict(kept, "", True)
        for key, value in kept.items():
            if key not in known:
                yield from _tensors_in(f"{prefix}.{key}", value)


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in what a module saves; refuses what may be weights in a form that is not known here."""
    if isinstance(value, Tensor):
        yield name, value.dequantize() if value.is_quantized else value
    elif isinstance(value, tuple | list):
        for number, part in enumerate(value):
            yield from _tensors_in(f"{name}.{number}", part)
    elif not isinstance(value, int | float | str | bytes | torch.dtype | None):
        raise ValueError(f"{name} is a {type(value).__name__}, so it cannot be known which weights these are")


def _offloaded(modules: Modules) -> Iterator[tuple[str, Any, str]]:
    """Weights that accelerate keeps elsewhere: the name, the mapping that has the weight, and its key there."""
    for prefix, module in modules:
        for hook in _hooks(module):
            weights = getattr(hook, "weights_map", None)
            if weights is None:
                continue
            deep = bool(getattr(hook, "place_submodules", False))
            for key, _ in [*module.named_parameters(recurse=deep), *module.named_buffers(recurse=deep)]:
                yield (f"{prefix}.{key}" if prefix else key), weights, key


def _hooks(module: nn.Module) -> list[Any]:
    """A module's hooks of accelerate, which may be several in one."""
    hook = vars(module).get("_hf_hook")  # its own: `getattr` would search all parts of a module for what it lacks
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def devices_of_layers(model: PreTrainedModel) -> dict[int, torch.device]:
    """The device on which each attention layer computes."""
    found = dict[int, torch.device]()
    for module in attention_modules(model):
        device = device_of(module)
        if device is not None:
            found.setdefault(int(module.layer_idx), device)  # type: ignore[arg-type]
    return found


def device_of(module: nn.Module) -> torch.device | None:
    """The device on which a module computes: to which accelerate brings its weights, or on which they are."""
    for part in module.modules():
        for hook in _hooks(part):
            if getattr(hook, "execution_device", None) is not None:
                place = hook.execution_device
                return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    return next((p.device for p in module.parameters() if p.device.type != "meta"), None)
