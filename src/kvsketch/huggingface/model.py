"""Attaching to a model and letting go of it again; what kvsketch can serve, and how it knows a model."""

import hashlib
import inspect
import json
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, CacheLayerMixin, get_layer_types_and_kwargs

from kvsketch.caches.base import MethodConfig
from kvsketch.huggingface.attention import NAME, register
from kvsketch.huggingface.facts import facts
from kvsketch.huggingface.modules import attention_modules, said_of
from kvsketch.huggingface.rotation import WATCH, BeforeRotation
from kvsketch.huggingface.weights import fingerprint_of_weights

M = TypeVar("M", bound=nn.Module)
CALLS = "_kvsketch_calls"  # on the decoder: the hooks that tell a cache where a call begins and ends
BEFORE = "_kvsketch_before"  # on attention modules: the attention they had
GUARD = "_kvsketch_guard"  # on attention modules of models that may drop a cache
ARCHITECTURE = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "sliding_window",
    "rope_parameters",
    "attn_logit_softcapping",
)  # what keys depend on beside the weights


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


@dataclass
class DropGuard:
    """Notices that a model has dropped the cache it was given at its rotary switch (Phi-3 does, without a word)."""

    rope: Rotation
    caches: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DropGuard":
        return DropGuard(self.rope)

    def check_not_dropped(self, total: int) -> None:
        """Called where attention runs without one of our caches."""
        for cache in self.caches:
            # `generate` asks the cache that it was given for its length before every call, dropped or not. It then
            # reads the whole text again; transformers 5.17 goes on with the last token alone.
            crossed = cache.seen <= self.rope.limit < total or cache.seen == self.rope.limit
            if cache.asked_for_length and crossed:
                cache.asked_for_length = False
                raise ValueError(self.rope.crossing(cache.seen, total))


@dataclass(frozen=True)
class ModelLink:
    """The model that a cache was made for. Copies of the cache share it."""

    config: Any  # the text model's
    modules: frozenset[int]  # ids of its attention modules
    decoder: int | None  # the id of the module that runs all of them
    rope: Rotation | None
    guard: DropGuard | None
    model: "weakref.ref[PreTrainedModel]"  # not held: a cache does not keep its model alive

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelLink":
        return self

    def fingerprint(self) -> str | None:
        """Of the model as it is now; None if it is gone."""
        model = self.model()
        return None if model is None else fingerprint(model)

    def check_method(self, config: MethodConfig) -> None:
        """Refuse a method that does not fit the model as it is now."""
        model = self.model()
        if model is not None:
            config.check_model(partial(facts, model))

    def check_attached(self) -> None:
        """Refuse to work for a model whose attention is not ours."""
        implementation = self.config._attn_implementation
        if implementation != NAME:
            raise ValueError(
                f'the model computes attention with "{implementation}", which would ignore what this cache has '
                "compressed: attach it again with kvsketch.attach(model)"
            )

    def check_module(self, module: nn.Module) -> None:
        """Refuse the layers, or the decoder, of another model."""
        if id(module) not in self.modules and id(module) != self.decoder:
            raise ValueError(
                "this cache was made for another model object: make one for this model with "
                "kvsketch.make_cache(model, ...), or save it and use kvsketch.load_cache(model, path)"
            )


def attach(model: nn.Module, *, before_rotation: bool = False) -> ModelLink:
    """Let the model compute attention with kvsketch; without one of our caches it answers as before.

    `before_rotation`: have queries and keys noted before they are rotated, for methods that ask for that (saap).
    `make_cache` and `load_cache` do what their method needs.
    """
    inner: PreTrainedModel = unwrapped(model)
    text = _check_supported(inner)
    modules = list(attention_modules(inner))
    _check_layers_are_found(inner, text, modules)
    watch = BeforeRotation(inner) if before_rotation and not _own_watch(modules) else None
    if watch is not None:
        watch.check()
    before = text._attn_implementation
    if before != NAME:
        register()
        _set_attention(inner, text, NAME)
        if text._attn_implementation != NAME or not inner._can_set_attn_implementation():
            text._attn_implementation_internal = before
            raise ValueError(
                f"{type(inner).__name__} does not let its attention be exchanged (it does not use transformers' "
                "AttentionInterface), so kvsketch cannot serve it"
            )
        for module in modules:
            if not hasattr(module, BEFORE):
                setattr(module, BEFORE, before)
    decoder = _decoder_of(inner, modules)
    if decoder is not None and not hasattr(decoder, CALLS):
        begun = decoder.register_forward_pre_hook(_begin_call, with_kwargs=True)
        setattr(decoder, CALLS, (begun, decoder.register_forward_hook(_end_call, with_kwargs=True, always_call=True)))
    rope = _changing_rotation(text)
    guard = None
    if rope is not None and rope.kind == "longrope":
        guard = next((getattr(m, GUARD) for m in modules if hasattr(m, GUARD)), None) or DropGuard(rope)
        for module in modules:
            setattr(module, GUARD, guard)
    if watch is not None:
        watch.open()
        for module in modules:
            setattr(module, WATCH, watch)
    known = None if decoder is None else id(decoder)
    return ModelLink(text, frozenset(map(id, modules)), known, rope, guard, weakref.ref(inner))


def is_attached(model: PreTrainedModel) -> bool:
    """Whether it computes attention with kvsketch."""
    return bool(model.config.get_text_config(decoder=True)._attn_implementation == NAME)


def detach(model: nn.Module) -> None:
    """Give the model back the attention it had; harmless where it is not attached."""
    inner: PreTrainedModel = unwrapped(model)
    text = inner.config.get_text_config(decoder=True)
    modules = list(attention_modules(inner))
    if text._attn_implementation == NAME:
        # Not noted down where a model that shares this config was attached instead.
        usual = "sdpa" if getattr(inner, "_supports_sdpa", False) else "eager"
        _set_attention(inner, text, next((getattr(m, BEFORE) for m in modules if hasattr(m, BEFORE)), usual))
    if _own_watch(modules):
        getattr(modules[0], WATCH).close()
    decoder = _decoder_of(inner, modules)
    if decoder is not None and hasattr(decoder, CALLS):
        for hook in getattr(decoder, CALLS):
            hook.remove()
        delattr(decoder, CALLS)
    for module in modules:
        for note in (BEFORE, GUARD, WATCH):
            if hasattr(module, note):
                delattr(module, note)


@contextmanager
def attached(model: M) -> Iterator[M]:
    """Attach inside a `with` block, whatever caches are made there; one that was attached before stays so."""
    was_attached = is_attached(unwrapped(model))
    attach(model)
    try:
        yield model
    finally:
        if not was_attached:
            detach(model)


def unwrapped(model: nn.Module) -> Any:
    """The transformers model itself, where adapters (peft) or the compiler are wrapped around it."""
    inner: Any = getattr(model, "_orig_mod", model)
    if isinstance(inner, PreTrainedModel) or not hasattr(inner, "get_base_model"):
        return inner
    for name, adapter in getattr(inner, "peft_config", {}).items():
        if getattr(adapter, "is_prompt_learning", False):
            raise ValueError(
                f"the adapter {name!r} puts learnt tokens before the text (a {type(adapter).__name__}), in a cache of "
                "its own: kvsketch serves adapters that change weights, such as LoRA"
            )
    return unwrapped(inner.get_base_model())


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of the architecture and of a sample of every weight as it is now."""
    text = model.config.get_text_config(decoder=True)
    known = {name: said_of(text, name) for name in ARCHITECTURE}
    plain = {name: value for name, value in known.items() if value is not None}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode())
    digest.update(fingerprint_of_weights(model, rounded=False).encode())
    return digest.hexdigest()


def _decoder_of(model: PreTrainedModel, modules: Sequence[nn.Module]) -> nn.Module | None:
    """The innermost model that runs all attention modules."""
    wanted, found = set(map(id, modules)), None
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and wanted <= set(map(id, module.modules())):
            found = module
    return found if wanted else None


def _begin_call(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Tell one of our caches that tokens are coming, before any layer sees them."""
    given = options
    if arguments:
        names = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
        given = dict(zip(names, arguments, strict=False)) | options
    cache = given.get("past_key_values")
    if isinstance(cache, Cache) and hasattr(cache, "begin_call"):
        cache.begin_call(module, given)


def _end_call(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
    """Tell it that all layers have seen them; there is no output after a failure."""
    for value in (*arguments, *options.values()):
        if isinstance(value, Cache) and hasattr(value, "end_call"):
            value.end_call(failed=output is None)


def _own_watch(modules: Sequence[nn.Module]) -> bool:
    """Whether the watch noted down on a model's modules is of these: a copy's has none."""
    watch: BeforeRotation | None = getattr(modules[0], WATCH, None) if modules else None
    return watch is not None and bool(watch.modules) and watch.modules[0] is modules[0]


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
    if getattr(text, "num_kv_shared_layers", None) or any(getattr(text, "kv_sharing_modes", None) or ()):
        raise ValueError(f"layers of {name} share one cache: kvsketch does not serve it, use transformers' own cache")
    kinds, _ = get_layer_types_and_kwargs(text)
    if not any(issubclass(DYNAMIC_LAYER_TYPE_MAPPING.get(kind, object), CacheLayerMixin) for kind in kinds):
        raise ValueError(
            f"{name} has no attention layer ({', '.join(sorted(set(kinds)))}): use transformers' own cache"
        )
    if not {"full_attention", "hybrid"} & set(kinds):
        warnings.warn(
            f"{name} has no full-attention layer ({', '.join(sorted(set(kinds)))}): there is nothing to compress",
            stacklevel=4,
        )
    return text


def _check_layers_are_found(model: PreTrainedModel, text: Any, modules: Sequence[nn.Module]) -> None:
    """Refuse a model whose attention layers do not know their numbers (Zamba)."""
    kinds, _ = get_layer_types_and_kwargs(text)
    found = {module.layer_idx for module in modules if hasattr(module, "is_causal")}  # others sum tokens up
    missing = [i for i, kind in enumerate(kinds) if kind in ("full_attention", "hybrid") and i not in found]
    name = type(model).__name__
    if missing:
        raise ValueError(
            f"layer {missing[0]} of {name} has attention that does not know its number (it may be shared): kvsketch "
            "does not serve it, use transformers' own cache"
        )


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
