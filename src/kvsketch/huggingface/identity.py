"""Which model this is, for what was made from it: the keys of a cache, and the index that Saap looks things up by."""

import hashlib
import json
from typing import Any

from transformers import PreTrainedModel

from kvsketch.caches.core.config import MethodConfig
from kvsketch.huggingface.frequencies import changing_frequencies
from kvsketch.huggingface.modules import config_value, heads_of
from kvsketch.huggingface.weights import fingerprint_of_weights

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


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of the architecture and of a sample of every weight as it is now."""
    text = model.config.get_text_config(decoder=True)
    known = {name: config_value(text, name) for name in ARCHITECTURE}
    plain = {name: value for name, value in known.items() if value is not None}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode())
    digest.update(fingerprint_of_weights(model, rounded=False).encode())
    return digest.hexdigest()


def describe_model(model: PreTrainedModel) -> dict[str, Any]:
    """What an index must fit: shape, rotation and weights, the same in whichever precision a checkpoint is loaded.

    But for a checkpoint in float32: what is loaded from it in float16 was rounded otherwise, and counts as another.
    """
    text = model.config.get_text_config(decoder=True)
    kv_heads, width = heads_of(text)
    found = {
        "model_type": text.model_type,
        "layers": text.num_hidden_layers,
        "heads": text.num_attention_heads,
        "kv_heads": kv_heads,
        "head_width": width,
        "rope": getattr(text, "rope_parameters", None),
        "fingerprint": fingerprint_of_weights(model, rounded=True),
    }
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain


def fitted(config: MethodConfig, model: PreTrainedModel, *, held: bool = False) -> MethodConfig:
    """A method for this model; refuses one that rests on something learnt from another.

    `held`: a cache of it comes from a file.
    """
    rope = changing_frequencies(model.config.get_text_config(decoder=True)) if config.looks_ahead else None
    if rope is not None:
        raise ValueError(
            f"{config.name} goes by how what follows will be rotated, and this model rotates otherwise once a text is "
            f"longer than {rope.limit} tokens: use a method that does not look ahead, such as keydiff"
        )
    return config.for_model(lambda: describe_model(model), held=held)
