"""A cache of one method made from an exact one, as if it had read the text itself."""

import copy

from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.exact import Exact
from kvsketch.huggingface.layer import SketchLayer
from kvsketch.huggingface.layers import LayerStack


def check_can_become(old: MethodConfig, new: MethodConfig) -> None:
    """Refuse to make a cache of another method from one that does not hold the text as that would have read it."""
    if not isinstance(old, Exact):
        raise ValueError(f"only an exact cache can be compressed by another method, this one is {old}")
    if new.prefill != "exact":
        raise ValueError(f"{new} reads a prompt in chunks that see compressed ones: have it read the text itself")
    if new.before_rotation:
        raise ValueError(
            f"{new.name} files keys as they are before rotation, and an exact cache holds them rotated: have a "
            "cache of this method read the text itself"
        )


def read_again(exact: LayerStack, new: LayerStack) -> None:
    """Have new layers hold the text that exact ones hold: ours compressed, transformers' own as they are."""
    for old, layer in zip(exact.layers, new.layers, strict=True):
        if isinstance(layer, SketchLayer):
            layer.read_again(old)
        else:
            layer.__dict__.update(copy.deepcopy(old.__dict__))
