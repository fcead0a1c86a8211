"""A model's attention modules, and what its config says about them."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

OURS = ("full_attention", "hybrid")  # kinds of layers that attend to everything


def attention_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules that fill a cache: those that know their layer's number and have keys of their own."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "config"):
            yield module


def config_value(config: Any, name: str) -> Any:
    """A value of a config; a list with each layer's value, if layers differ (Gemma 4); None if it says nothing."""
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        return [getattr(layer, name, None) for layer in config.per_layer_config]
    return getattr(config, name, None)


def heads_of(config: Any) -> tuple[Any, Any]:
    """KV heads and the width of their keys; lists with a number for each layer, if layers differ."""
    heads, width = config_value(config, "num_key_value_heads"), config_value(config, "head_dim")
    queries = config.num_attention_heads
    return heads or queries, width or config.hidden_size // queries


def of_layer(said: Any, index: int) -> Any:
    """A config's value for one layer, given its value for all layers or a list of them."""
    return said[index] if isinstance(said, list) else said
