"""Caches on disk: one file of tensors, everything that is not a tensor in its description."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsketch.caches.base import MethodConfig
from kvsketch.caches.registry import METHODS
from kvsketch.files import DTYPES, NAMES, TensorFile, write_tensors
from kvsketch.huggingface import stock
from kvsketch.huggingface.facts import facts
from kvsketch.huggingface.model import attach, detach, fingerprint, is_attached, unwrapped
from kvsketch.huggingface.weights import devices_of_layers

if TYPE_CHECKING:
    from kvsketch.huggingface.cache import SketchCache

FORMAT = 3
# What comes of a state in which no layer can be.
NOT_POSSIBLE = (
    KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, AssertionError, ArithmeticError,
)  # fmt: skip
# What a description has, and of which kind.
KINDS: dict[str, type | tuple[type, ...]] = {
    "method": str,
    "options": dict,
    "rests_on": (str, type(None)),
    "model_type": str,
    "fingerprint": str,
    "dtype": (str, type(None)),
    "layers": list,
}


def save_cache(cache: "SketchCache", path: str | Path) -> None:
    """Write a cache; the file appears whole or not at all."""
    from kvsketch.huggingface.layer import SketchLayer

    if cache.seen == 0:
        raise ValueError("the cache is empty: there is nothing to save before it has read a prompt")
    cache.check_whole()
    if cache.recording:
        cache.end_recording()
    now = cache.model.fingerprint()
    before = cache.read_by or now
    if now is not None and now != before:
        raise ValueError(
            "the model's weights, or its adapters, have changed since this cache began to read: what it holds was made "
            "by others, and a file would say that it fits these. Have a new cache read the text"
        )
    if before is None:
        raise ValueError("the model that this cache was made for is gone, so a file could not say whose it is")
    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any]] = []
    for index, layer in enumerate(cache.layers):
        held, numbers = layer.state() if isinstance(layer, SketchLayer) else stock.state_of(layer)
        tensors |= {f"{index}.{name}": tensor for name, tensor in held.items()}
        layers.append({"type": type(layer).__name__, "state": numbers})
    description = {
        "format": FORMAT,
        "method": cache.config.name,
        "options": asdict(cache.config.anywhere()),
        "rests_on": cache.config.rests_on(),
        "model_type": cache.model.config.model_type,
        "fingerprint": before,
        "dtype": None if cache.dtype is None else NAMES[cache.dtype],
        "layers": layers,
    }
    write_tensors(path, tensors, description)


def load_cache(model: nn.Module, path: str | Path) -> "SketchCache":
    """The cache that `cache.save(path)` wrote, for the same model; also attaches the model.

    Each layer's part goes to where that layer computes, and nothing of it is a view of the file.
    """
    from kvsketch.huggingface.cache import SketchCache

    inner: PreTrainedModel = unwrapped(model)
    with TensorFile(path) as file:
        known = _described(file)
        config = _checked_config(known, inner, file.path)
        was_attached = is_attached(inner)
        try:
            cache = SketchCache(config, attach(inner, before_rotation=config.before_rotation))
            _restore(cache, known, file, devices_of_layers(inner), inner.device)
        except BaseException:
            if not was_attached:
                detach(inner)
            raise
    return cache


def _checked_config(known: dict[str, Any], model: PreTrainedModel, path: Path) -> MethodConfig:
    """The config of a cache that was saved for this model."""
    config = _config(known, path)
    _check_what_it_rests_on(config, model, known["rests_on"], path)
    if known["fingerprint"] != fingerprint(model):
        raise ValueError(
            f"{path} was saved for another model (a {known['model_type']!r:.40}): keys mean nothing to other weights. "
            "Load the model it was made with, in the same dtype and with the same adapters; this one is a "
            f"{model.config.model_type!r}"
        )
    return config


def _restore(
    cache: "SketchCache",
    known: dict[str, Any],
    file: TensorFile,
    devices: Mapping[int, torch.device],
    elsewhere: torch.device,
) -> None:
    """Fill a new cache from a file: layers of ours first, which know how much of what was read is padding."""
    from kvsketch.huggingface.layer import SketchLayer

    kinds = [type(layer).__name__ for layer in cache.layers]
    if [saved["type"] for saved in known["layers"]] != kinds:
        raise ValueError(f"{file.path} does not hold the layers that this model has: {', '.join(dict.fromkeys(kinds))}")
    order = sorted(range(len(kinds)), key=lambda index: not isinstance(cache.layers[index], SketchLayer))
    for index in order:
        layer, state = cache.layers[index], known["layers"][index]["state"]
        held = file.read(f"{index}.", devices.get(index, elsewhere))
        try:
            if isinstance(layer, SketchLayer):
                layer.restore(held, state)
                cache.check_alike(layer)
            else:
                stock.restore(layer, held, state, cache.sketch_layers[0].held if cache.sketch_layers else None)
        except NOT_POSSIBLE as error:
            what = f"{file.path} holds a state of layer {index} that {cache.config} cannot be in"
            raise ValueError(f"{what}: {error!r:.200}") from error
    cache.read_by, cache.dtype = known["fingerprint"], None if known["dtype"] is None else DTYPES[known["dtype"]]
    cache.check_whole()


def _described(file: TensorFile) -> dict[str, Any]:
    """A cache's description, all that it needs of the right kind."""
    known = file.about
    if known.get("format") != FORMAT:
        if "method" not in known:
            raise ValueError(f"{file.path} was not written by cache.save: it does not describe a cache")
        raise ValueError(
            f"{file.path} has format {known.get('format')!r:.40}, this version of kvsketch reads format {FORMAT}: have "
            "a new cache read the text, or use the version that wrote it"
        )
    for name, kind in KINDS.items():
        if name not in known or not isinstance(known[name], kind):
            raise ValueError(f"{file.path} does not describe a cache: its {name} is {known.get(name)!r:.60}")
    if known["dtype"] not in (None, *DTYPES):
        raise ValueError(f"{file.path} does not describe a cache: its dtype is {known['dtype']!r:.60}")
    for layer in known["layers"]:
        kinds = [type(layer.get(name)) for name in ("type", "state")] if isinstance(layer, dict) else []
        if kinds != [str, dict]:
            raise ValueError(f"{file.path} does not describe a cache: one of its layers is {layer!r:.60}")
    return known


def _config(known: Mapping[str, Any], path: str | Path) -> MethodConfig:
    """The method that a description names, with its options."""
    name, options = known["method"], known["options"]
    if name not in METHODS:
        raise ValueError(
            f"{path} holds a cache of a method {name!r:.60}, which this version of kvsketch does not have; it has "
            f"{', '.join(METHODS)}. Use the version that wrote the file"
        )
    unknown = options.keys() - {field.name for field in fields(METHODS[name])}
    if unknown:
        raise ValueError(
            f"{path} holds a cache of {name} with options {', '.join(sorted(unknown))!r:.60}, which this version of "
            "kvsketch does not have. Use the version that wrote the file"
        )
    try:
        return METHODS[name](**options)
    except ValueError as error:
        raise ValueError(f"{path} holds a cache of {name} that cannot be: {error}") from error


def _check_what_it_rests_on(config: MethodConfig, model: PreTrainedModel, before: str | None, path: str | Path) -> None:
    """Refuse a cache whose method now takes something else from outside than when it was saved."""
    try:
        config.check_model(partial(facts, model))
        now = config.rests_on()
    except ValueError as error:
        raise ValueError(f"{path} holds a cache of {config}: {error}") from error
    if now != before:
        raise ValueError(
            f"{path} holds a cache of {config}, and what that names has changed since it was saved: what is held was "
            "sorted by what was there before. Put that back, or have a new cache read the text"
        )
