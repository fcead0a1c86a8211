"""Attaching to a model and letting go of it again; what kvsketch can serve, and how it knows a model."""

import hashlib
import json
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from kvsketch.huggingface.attention import NAME, register

ATTACHED = "_kvsketch_attached"  # on the model: what it had before
GUARD = "_kvsketch_guard"  # on attention modules of models that may drop a cache
SAMPLED_WEIGHTS = 64  # numbers of every parameter that go into a model's fingerprint


@dataclass(frozen=True)
class Rotation:
    """Rotary frequencies that change when the text gets longer than `limit`."""

    kind: str
    limit: int

    def crossing(self, seen: int, total: int) -> str:
        """What to say when a text crosses the limit."""
        return (
            f"this model switches its rotary frequencies at {self.limit} tokens, and keys from both sides do not fit "
            f"together: the cache has seen {seen} tokens and the text has {total}. Stay below the switch, or read a "
            "longer prompt in one call with kvsketch.prefill(model, ids, cache) before generate"
        )


@dataclass(frozen=True)
class ModelLink:
    """The model that a cache was made for. Copies of the cache share it."""

    config: Any  # the text model's config, the very object
    fingerprint: str
    rope: Rotation | None

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelLink":
        return self

    def check_attached(self) -> None:
        """Refuse to work for a model whose attention is not ours."""
        implementation = self.config._attn_implementation
        if implementation != NAME:
            raise ValueError(
                f'the model computes attention with "{implementation}", which would ignore what this cache has '
                "compressed: attach it again with kvsketch.attach(model)"
            )

    def check_module(self, module: nn.Module) -> None:
        """Refuse the layers of another model."""
        if getattr(module, "config", self.config) is not self.config:
            raise ValueError(
                "this cache was made for another model object: make one for this model with "
                "kvsketch.make_cache(model, ...), or save it and use kvsketch.load_cache(model, path)"
            )


@dataclass
class DropGuard:
    """Notices that a model has dropped its cache at the rotary switch (Phi-3 does, without a word)."""

    rope: Rotation
    caches: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DropGuard":
        return DropGuard(self.rope)

    def check_not_dropped(self, total: int) -> None:
        """Called where attention runs without one of our caches."""
        for cache in self.caches:
            seen = cache.get_seq_length()
            if seen <= self.rope.limit < total:
                raise ValueError(self.rope.crossing(seen, total))


def attach(model: PreTrainedModel) -> ModelLink:
    """Let the model compute attention with kvsketch; without one of our caches it answers as before."""
    text = _check_supported(model)
    if not hasattr(model, ATTACHED):
        before = text._attn_implementation
        register()
        _set_attention(model, text, NAME)
        if text._attn_implementation != NAME or not model._can_set_attn_implementation():
            text._attn_implementation_internal = before
            raise ValueError(
                f"{type(model).__name__} does not let its attention be exchanged (it does not use transformers' "
                "AttentionInterface), so kvsketch cannot serve it"
            )
        setattr(model, ATTACHED, before)
    elif text._attn_implementation != NAME:  # somebody has set another one since
        _set_attention(model, text, NAME)
    rope = _changing_rotation(text)
    if rope is not None and rope.kind == "longrope":
        for module in attention_modules(model):
            if not hasattr(module, GUARD):
                setattr(module, GUARD, DropGuard(rope))
    return ModelLink(text, fingerprint(model, text), rope)


def detach(model: PreTrainedModel) -> None:
    """Give the model back the attention it had; harmless where it is not attached."""
    if not hasattr(model, ATTACHED):
        return
    text = model.config.get_text_config(decoder=True)
    _set_attention(model, text, getattr(model, ATTACHED))
    delattr(model, ATTACHED)
    for module in attention_modules(model):
        if hasattr(module, GUARD):
            delattr(module, GUARD)


def watch(model: PreTrainedModel, cache: Any) -> None:
    """Have the model's guards, if it has any, notice when this cache is dropped."""
    for module in attention_modules(model):
        if hasattr(module, GUARD):
            getattr(module, GUARD).caches.add(cache)


def attention_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules that fill a cache: those that know their layer's number and have keys of their own."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "config"):
            yield module


def _set_attention(model: PreTrainedModel, text: Any, name: str) -> None:
    """Set the text model's attention, and leave vision towers and the like alone."""
    if text is model.config:
        model.set_attn_implementation(name)
        return
    for key in model.config.sub_configs:
        if getattr(model.config, key) is text:
            model.set_attn_implementation({key: name})


def _check_supported(model: PreTrainedModel) -> Any:
    """The text model's config, if kvsketch can serve the model."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"expected a transformers model, got {type(model).__name__}")
    name = type(model).__name__
    if type(model).__module__.startswith("transformers_modules"):
        raise ValueError(f"{name} is remote code: kvsketch serves only models that are part of transformers")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model: kvsketch serves decoder-only models")
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        raise ValueError(
            f"{name} caches latents from which keys are made later (MLA): kvsketch does not serve it, "
            "use transformers' own cache"
        )
    if getattr(text, "num_kv_shared_layers", None) or getattr(text, "kv_sharing_modes", None):
        raise ValueError(f"layers of {name} share one cache: kvsketch does not serve it, use transformers' own cache")
    kinds, _ = get_layer_types_and_kwargs(text)
    if "full_attention" not in kinds:
        warnings.warn(
            f"{name} has no full-attention layer ({', '.join(sorted(set(kinds)))}): there is nothing to compress",
            stacklevel=4,
        )
    return text


def _changing_rotation(text: Any) -> Rotation | None:
    """The model's rotary scaling, if it depends on the length of the text."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        kind = rope.get("rope_type")
        if kind in ("longrope", "dynamic"):
            limit = rope.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            return Rotation(kind, int(limit or text.max_position_embeddings))
    return None


def fingerprint(model: PreTrainedModel, text: Any) -> str:
    """A hash of the architecture and of a sample of every parameter: two checkpoints of one family differ."""
    skipped = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache", "architectures")
    known = {key: value for key, value in text.to_dict().items() if key not in skipped and not key.startswith("_")}
    digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if parameter.device.type != "meta" and parameter.numel():
            step = max(1, parameter.numel() // SAMPLED_WEIGHTS)
            sample = parameter.detach().reshape(-1)[::step][:SAMPLED_WEIGHTS]
            digest.update(sample.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


__all__ = ["ModelLink", "Rotation", "attach", "attention_modules", "detach", "fingerprint", "watch"]
