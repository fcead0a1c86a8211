"""Unequal shares, for tests: head h of a layer gets the share h + 1; and profiles made up for a model."""

from dataclasses import replace

from transformers.cache_utils import get_layer_types_and_kwargs

from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.profile import write_profile
from kvsketch.caches.registry import parse_spec
from kvsketch.huggingface.identity import describe_model
from kvsketch.huggingface.modules import OURS


def uneven(spec, layer=1, spans_of=None):
    """A layer's cache whose heads have unequal shares."""
    return LayerCache(replace(parse_spec(spec), heads="pyramid"), layer, shares=_shares, spans_of=spans_of)


def _shares(layer, heads, budget):
    mean = (heads + 1) / 2
    return tuple((1.0 + head) / mean for head in range(heads))


def made_profile(path, model, keeps=(0.5, 0.25, 0.1), tokens=400):
    """A profile in which every head of every layer has another part, and the last head of the last layer most."""
    known = describe_model(model)
    kinds, _ = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    heads, layers = known["kv_heads"], [layer for layer, kind in enumerate(kinds) if kind in OURS]
    whole = heads * len(layers)
    parts = {
        str(layer): [[2 * keep * (place * heads + head + 0.5) / whole for keep in keeps] for head in range(heads)]
        for place, layer in enumerate(layers)
    }
    write_profile(path, {"model": known, "tokens": tokens, "keeps": list(keeps), "layers": parts})
    return str(path)
