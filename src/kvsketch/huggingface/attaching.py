"""Attaching kvsketch to a model, which then computes attention with it, and detaching it again."""

import inspect
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvsketch.huggingface.attention import ATTENTION_NAME, register
from kvsketch.huggingface.frequencies import GUARD, ChangingFrequencies, DropGuard, changing_frequencies
from kvsketch.huggingface.model import ModelLink
from kvsketch.huggingface.modules import attention_modules
from kvsketch.huggingface.naming import cache_in
from kvsketch.huggingface.rotation import WATCH, BeforeRotation, forget_copied
from kvsketch.huggingface.spread import divisions_of
from kvsketch.huggingface.supported import NOT_EXCHANGED, check_layers_are_found, check_supported, unwrapped

M = TypeVar("M", bound=nn.Module)
CALLS = "_kvsketch_calls"  # on the decoder: the hooks that tell a cache where a call begins and ends
BEFORE = "_kvsketch_before"  # on attention modules: the attention they had
_BLOCKS = weakref.WeakKeyDictionary[Any, tuple[bool, int]]()  # by model: if it was attached before, and how many
_ATTACHING = threading.RLock()  # threads that attach one model at once would register its hooks twice


def attach(model: nn.Module, *, before_rotation: bool = False) -> ModelLink:
    """Let the model compute attention with kvsketch; without one of our caches it answers as before.

    `before_rotation`: note queries and keys before they are rotated, for methods that ask for that (saap,
    expected_attention). `make_cache` and `load_cache` do what their method needs.
    """
    with _ATTACHING:
        inner: PreTrainedModel = unwrapped(model)
        text = check_supported(inner)
        modules = list(attention_modules(inner))
        check_layers_are_found(inner, text, modules)
        watch = BeforeRotation(inner) if before_rotation and not _own_watch(modules) else None
        if watch is not None:
            watch.check()
        _exchange_attention(inner, text, modules)
        decoder = _decoder_of(inner, modules)
        if decoder is not None and not hasattr(decoder, CALLS):
            begun = decoder.register_forward_pre_hook(_begin_call, with_kwargs=True)
            setattr(
                decoder, CALLS, (begun, decoder.register_forward_hook(_end_call, with_kwargs=True, always_call=True))
            )
        rope = changing_frequencies(text)
        guard = None if rope is None or rope.kind != "longrope" else _guard_against_drops(rope, modules)
        if watch is not None:
            forget_copied(inner)
            watch.open()
            for module in modules:
                setattr(module, WATCH, watch)
        known = None if decoder is None else id(decoder)
        return ModelLink(
            text, frozenset(map(id, modules)), known, rope, guard, weakref.ref(inner), divisions_of(modules)
        )


def is_attached(model: PreTrainedModel) -> bool:
    """Whether the model computes attention with kvsketch."""
    return bool(model.config.get_text_config(decoder=True)._attn_implementation == ATTENTION_NAME)


def detach(model: nn.Module) -> None:
    """Give the model back the attention it had; harmless if it is not attached."""
    with _ATTACHING:
        inner: PreTrainedModel = unwrapped(model)
        text = inner.config.get_text_config(decoder=True)
        modules = list(attention_modules(inner))
        if text._attn_implementation == ATTENTION_NAME:
            # Modules lack this note if another model that shares their config was attached instead.
            usual = "sdpa" if getattr(inner, "_supports_sdpa", False) else "eager"
            _set_attention(inner, text, next((getattr(m, BEFORE) for m in modules if hasattr(m, BEFORE)), usual))
        stop_watching(inner)
        decoder = _decoder_of(inner, modules)
        if decoder is not None and hasattr(decoder, CALLS):
            for hook in getattr(decoder, CALLS):
                hook.remove()
            delattr(decoder, CALLS)
        for module in modules:
            for note in (BEFORE, GUARD, WATCH):
                if hasattr(module, note):
                    delattr(module, note)


def is_watched(model: nn.Module) -> bool:
    """Whether queries and keys are noted before they are rotated."""
    return _own_watch(list(attention_modules(unwrapped(model))))


def stop_watching(model: nn.Module) -> None:
    """Stop noting queries and keys before rotation."""
    modules = list(attention_modules(unwrapped(model)))
    if _own_watch(modules):
        getattr(modules[0], WATCH).close()
        for module in modules:
            delattr(module, WATCH)
    forget_copied(unwrapped(model))


@contextmanager
def attached(model: M) -> Iterator[M]:
    """Attach inside a `with` block, whatever caches are made there; a model that was attached before stays so."""
    inner = unwrapped(model)
    with _ATTACHING:
        was_attached, blocks = _BLOCKS.get(inner, (is_attached(inner), 0))
        attach(model)
        _BLOCKS[inner] = was_attached, blocks + 1
    try:
        yield model
    finally:
        with _ATTACHING:
            was_attached, blocks = _BLOCKS.pop(inner)
            if blocks > 1:  # other threads are still at work in theirs
                _BLOCKS[inner] = was_attached, blocks - 1
            elif not was_attached:
                detach(model)


def _exchange_attention(model: PreTrainedModel, text: Any, modules: Sequence[nn.Module]) -> None:
    """Have the model call our attention, and note on its modules which attention it had."""
    before = text._attn_implementation
    if before == ATTENTION_NAME:
        return
    register()
    _set_attention(model, text, ATTENTION_NAME)
    if text._attn_implementation != ATTENTION_NAME:
        text._attn_implementation_internal = before
        raise ValueError(NOT_EXCHANGED.format(type(model).__name__))
    for module in modules:
        setattr(module, BEFORE, before)


def _guard_against_drops(rope: ChangingFrequencies, modules: Sequence[nn.Module]) -> DropGuard:
    """The guard that the modules of a model have, or a new one for all of them."""
    guard = next((getattr(m, GUARD) for m in modules if hasattr(m, GUARD)), None) or DropGuard(rope)
    for module in modules:
        setattr(module, GUARD, guard)
    return guard


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
    cache = cache_in(given)
    if hasattr(cache, "begin_call"):
        cache.begin_call(module, given)


def _end_call(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
    """Tell our cache that all layers have seen the tokens, or that the call failed: then there is no output."""
    for value in (*arguments, *options.values()):
        if isinstance(value, Cache) and hasattr(value, "end_call"):
            value.end_call(failed=output is None)


def _own_watch(modules: Sequence[nn.Module]) -> bool:
    """Whether the watch noted on these modules watches them: that of a copied model watches no modules."""
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
