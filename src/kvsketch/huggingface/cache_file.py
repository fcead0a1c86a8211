"""A cache's file: tensors, and a description with everything else."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.registry import METHODS
from kvsketch.files import DTYPE_NAMES, DTYPES, TensorFile, begins_as_tensors, is_another, write_tensors
from kvsketch.huggingface import stock
from kvsketch.huggingface.identity import Identity, fingerprint
from kvsketch.huggingface.layer import SketchLayer
from kvsketch.huggingface.model import ModelLink

FORMAT, ALSO_READ = 7, (6,)  # format 6 has other runs in the stores of look-up methods
READ = f"formats {ALSO_READ[0]} to {FORMAT}"
# What a description must have, and of which type.
KINDS: dict[str, type | tuple[type, ...]] = {
    "method": str,
    "options": dict,
    "source": (str, type(None)),
    "model_type": str,
    "fingerprint": str,
    "dtype": (str, type(None)),
    "layers": list,
}


def write_cache(
    path: str | Path,
    config: MethodConfig,
    layers: Sequence[Any],
    *,
    model_type: str,
    read_by: str,
    dtype: torch.dtype | None,
    noted: int | None,
) -> None:
    """Write the layers of a cache that the model with the fingerprint `read_by` has filled.

    `noted`: for how many tokens there are notes of what was read after them.
    """
    if is_another(Path(path), begins_as_tensors):
        raise ValueError(f"{path} is there and is no saved cache: name another file, or remove it")
    tensors: dict[str, Tensor] = {}
    described: list[dict[str, Any]] = []
    for index, layer in enumerate(layers):
        state, numbers = layer.state() if isinstance(layer, SketchLayer) else stock.state_of(layer)
        tensors |= {f"{index}.{name}": tensor for name, tensor in state.items()}
        described.append({"type": type(layer).__name__, "state": numbers})
    description = {
        "format": FORMAT,
        "method": config.name,
        "options": asdict(config.with_full_paths()),
        "source": config.source_digest(),
        "model_type": model_type,
        "fingerprint": read_by,
        "dtype": None if dtype is None else DTYPE_NAMES[dtype],
        "noted": noted,
        "layers": described,
    }
    write_tensors(path, tensors, description)


def check_same_weights(read_by: str | None, model: ModelLink) -> str:
    """The fingerprint of the weights that made a cache's keys; refuses a model that has others by now, or is gone."""
    now = model.fingerprint()
    read_by = read_by or now
    if now is not None and now != read_by:
        raise ValueError(
            "the model's weights, or its adapters, have changed since this cache began to read: what it holds was "
            "made by others, and a file would say that it fits these. Have a new cache read the text"
        )
    if read_by is None:
        raise ValueError("the model that this cache was made for is gone, so a file could not say whose it is")
    return read_by


def read_description(file: TensorFile) -> dict[str, Any]:
    """A cache's description; refused if anything that it needs is missing or of the wrong type."""
    known = file.about
    if known.get("format") not in (FORMAT, *ALSO_READ):
        if "method" not in known:
            raise ValueError(f"{file.path} was not written by cache.save: it does not describe a cache")
        raise ValueError(
            f"{file.path} has format {known.get('format')!r:.40}, this version of kvsketch reads {READ}: have "
            "a new cache read the text, or use the version that wrote it"
        )
    for name, kind in KINDS.items():
        if name not in known or not isinstance(known[name], kind):
            raise ValueError(f"{file.path} does not describe a cache: its {name} is {known.get(name)!r:.60}")
    noted = known.setdefault("noted", None)  # not in earlier files
    if noted is not None and (type(noted) is not int or noted < 0):
        raise ValueError(f"{file.path} does not describe a cache: it has notes of {noted!r:.60} tokens")
    if known["dtype"] not in (None, *DTYPES):
        raise ValueError(f"{file.path} does not describe a cache: its dtype is {known['dtype']!r:.60}")
    for layer in known["layers"]:
        kinds = [type(layer.get(name)) for name in ("type", "state")] if isinstance(layer, dict) else []
        if kinds != [str, dict]:
            raise ValueError(f"{file.path} does not describe a cache: one of its layers is {layer!r:.60}")
    return known


def config_for(known: dict[str, Any], model: PreTrainedModel, path: Path) -> MethodConfig:
    """The config of a cache that was saved for this model."""
    config = _with_its_source(_config(known, path), model, known["source"], path)
    if known["fingerprint"] != fingerprint(model):
        raise ValueError(
            f"{path} was saved for another model (a {known['model_type']!r:.40} of other weights, or of other layers "
            f"and heads, than this {model.config.model_type!r}): keys mean nothing to other weights. Load the model "
            "that it was made with, in the same dtype and with the same adapters"
        )
    return config


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
        raise ValueError(f"{path} holds a cache of {name} with options that it cannot have: {error}") from error


def _with_its_source(
    config: MethodConfig, model: PreTrainedModel, before: str | None, path: str | Path
) -> MethodConfig:
    """The config for the model; refused if what it takes from outside has changed since the cache was saved."""
    try:
        config = Identity(model).fitted(config, held=True)
        now = config.source_digest()
    except ValueError as error:
        raise ValueError(f"{path} holds a cache of {config}: {error}") from error
    if now != before:
        raise ValueError(
            f"{path} holds a cache of {config}, and what that names has changed since it was saved: what is held was "
            "sorted by what was there before. Put that back, or have a new cache read the text"
        )
    return config
