"""Caches on disk: one safetensors file, everything that is not a tensor as JSON in its header."""

import json
import os
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.caches.base import MethodConfig
from kvsketch.caches.registry import METHODS
from kvsketch.huggingface.facts import facts
from kvsketch.huggingface.model import attach

if TYPE_CHECKING:
    from kvsketch.huggingface.cache import SketchCache

FORMAT = 1


def save_cache(cache: "SketchCache", path: str | Path) -> None:
    """Write a cache; the file appears whole or not at all."""
    from kvsketch.huggingface.layer import SketchLayer

    if cache.seen == 0:
        raise ValueError("the cache is empty: there is nothing to save before it has read a prompt")
    cache.check_whole()
    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any]] = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, SketchLayer):
            held, numbers = layer.state()
        else:
            held, numbers = _stock_state(layer)
        tensors |= {f"{index}.{name}": tensor for name, tensor in held.items()}
        layers.append({"type": type(layer).__name__, "state": numbers})
    header = {
        "format": FORMAT,
        "method": cache.config.name,
        "options": asdict(cache.config.anywhere()),
        "rests_on": cache.config.rests_on(),
        "model_type": cache.model.config.model_type,
        "fingerprint": cache.model.fingerprint,
        "layers": layers,
    }
    path = Path(path)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        # Tensors may be views of one buffer; a file wants each for itself.
        apart = {name: x.clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
        save_file(apart, unfinished, {"kvsketch": json.dumps(header)})
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def load_cache(model: PreTrainedModel, path: str | Path) -> "SketchCache":
    """The cache that `cache.save(path)` wrote, for the same model; also attaches the model."""
    from kvsketch.huggingface.cache import SketchCache
    from kvsketch.huggingface.layer import SketchLayer

    header, tensors = _read(Path(path))
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} has format {header.get('format')!r}, this version of kvsketch reads format {FORMAT}")
    config = METHODS[header["method"]](**header["options"])
    _check_what_it_rests_on(config, model, header.get("rests_on"), path)
    link = attach(model, before_rotation=config.before_rotation)
    if header["fingerprint"] != link.fingerprint:
        raise ValueError(
            f"{path} was saved for another model (a {header['model_type']!r}): keys mean nothing to other weights. "
            f"Load the model it was made with, in the same dtype; this one is a {link.config.model_type!r}"
        )
    cache = SketchCache(config, link)
    device = next(model.parameters()).device
    for index, (layer, saved) in enumerate(zip(cache.layers, header["layers"], strict=True)):
        prefix = f"{index}."
        held = {n.removeprefix(prefix): t.to(device) for n, t in tensors.items() if n.startswith(prefix)}
        if isinstance(layer, SketchLayer):
            layer.restore(held, saved["state"])
        else:
            _restore_stock(layer, held, saved["state"])
    return cache


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


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    if "kvsketch" not in metadata:
        raise ValueError(f"{path} was not written by cache.save: its header has no 'kvsketch' entry")
    return json.loads(metadata["kvsketch"]), tensors


def _stock_state(layer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and numbers of a stock sliding layer."""
    if not hasattr(layer, "cumulative_length"):
        raise ValueError(f"layers of type {type(layer).__name__} cannot be saved, only full and sliding attention")
    return {"keys": layer.keys, "values": layer.values}, {"cumulative_length": int(layer.cumulative_length)}


def _restore_stock(layer: Any, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    layer.lazy_initialization(tensors["keys"], tensors["values"])
    layer.keys, layer.values = tensors["keys"], tensors["values"]
    layer.cumulative_length = numbers["cumulative_length"]
    assert isinstance(layer.keys, torch.Tensor)
