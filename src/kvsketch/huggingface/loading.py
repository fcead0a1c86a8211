"""Loading saved caches, ready to go on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvsketch.files import DTYPES, TensorFile
from kvsketch.huggingface import stock
from kvsketch.huggingface.attaching import attach, detach, is_attached, is_watched, stop_watching
from kvsketch.huggingface.cache import SketchCache
from kvsketch.huggingface.cache_file import config_for, read_description
from kvsketch.huggingface.layer import SketchLayer
from kvsketch.huggingface.modules import heads_of, of_layer
from kvsketch.huggingface.supported import unwrapped
from kvsketch.huggingface.weights import devices_of_layers

# What is raised by a state in which no layer can be.
NOT_POSSIBLE = (
    KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, AssertionError, ArithmeticError,
)  # fmt: skip


def load_cache(model: nn.Module, path: str | Path) -> SketchCache:
    """The cache that `cache.save(path)` wrote, for the same model; also attaches the model.

    Each layer's part goes to the device where that layer computes, and nothing of it is a view of the file.
    """
    inner: PreTrainedModel = unwrapped(model)
    with TensorFile(path) as file:
        known = read_description(file)
        config = config_for(known, inner, file.path)
        was_attached, was_watched = is_attached(inner), is_watched(inner)
        try:
            link = attach(inner, before_rotation=config.before_rotation)
            link.check_in_one("a cache from a file")
            cache = SketchCache(config, link)
            _restore(cache, known, file, devices_of_layers(inner), inner.device)
        except BaseException:
            if not was_attached:
                detach(inner)
            elif not was_watched:
                stop_watching(inner)
            raise
    return cache


def _restore(
    cache: SketchCache,
    known: dict[str, Any],
    file: TensorFile,
    devices: Mapping[int, torch.device],
    elsewhere: torch.device,
) -> None:
    """Fill a new cache from a file: layers of ours first, as they know how much of the text is padding."""
    kinds = [type(layer).__name__ for layer in cache.layers]
    if [saved["type"] for saved in known["layers"]] != kinds:
        raise ValueError(f"{file.path} does not hold the layers that this model has: {', '.join(dict.fromkeys(kinds))}")
    states, widths = [layer["state"] for layer in known["layers"]], _widths(cache)
    _check_shares([state.get("budgets", []) for state in states], widths, file)
    _check_row_shares([state.get("row_shares") for state in states], widths, file)
    order = sorted(range(len(kinds)), key=lambda index: not isinstance(cache.layers[index], SketchLayer))
    for index in order:
        layer, state = cache.layers[index], known["layers"][index]["state"]
        tensors = file.read(f"{index}.", devices.get(index, elsewhere))
        try:
            if isinstance(layer, SketchLayer):
                layer.restore(tensors, state)
                cache.stack.check_alike(layer)
            else:
                stock.restore(layer, tensors, state, cache.sketch_layers[0].held if cache.sketch_layers else None)
        except NOT_POSSIBLE as error:
            what = f"{file.path} holds a state of layer {index} that {cache.config} cannot be in"
            raise ValueError(f"{what}: {error!r:.200}") from error
    cache.read_by, cache.prompt.noted = known["fingerprint"], known["noted"]
    cache.stack.whole.dtype = None if known["dtype"] is None else DTYPES[known["dtype"]]
    cache.stack.check_whole()


def _widths(cache: SketchCache) -> list[int]:
    """The width of every layer's keys: a share of a wider layer's budget is more bytes."""
    width = heads_of(cache.model.config)[1]
    return [of_layer(width, index) for index in range(len(cache.layers))]


def _check_shares(budgets: Sequence[Any], widths: Sequence[int], file: TensorFile) -> None:
    """Refuse heads that together would have more than there is: the mean of their shares, by bytes, is 1."""
    heads = [
        (head[-1], width)
        for layer, width in zip(budgets, widths, strict=True)
        if isinstance(layer, list)
        for head in layer
        if isinstance(head, list) and head
    ]
    known = [(share, width) for share, width in heads if type(share) is float]  # others are refused when they are read
    if sum(share * width for share, width in known) > 1.001 * sum(width for _, width in known):
        shares = [share for share, _ in known]
        raise ValueError(f"{file.path} holds heads with shares of {shares!s:.80}, whose mean cannot be above 1")


def _check_row_shares(given: Sequence[Any], widths: Sequence[int], file: TensorFile) -> None:
    """The same for shares that a prompt has set, row by row."""
    known = [
        (rows, width)
        for rows, width in zip(given, widths, strict=True)
        if isinstance(rows, list) and all(isinstance(row, list) for row in rows)
    ]
    for row in zip(*(rows for rows, _ in known), strict=False):
        _check_shares([[[share] for share in heads] for heads in row], [width for _, width in known], file)
