"""Which model it is that something was made from: the keys of a cache, or the index that Saap looks tokens up by."""

import hashlib
import json
import weakref
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel

from kvsketch.caches.core.config import MethodConfig
from kvsketch.huggingface.frequencies import changing_frequencies
from kvsketch.huggingface.modules import config_value, heads_of
from kvsketch.huggingface.weights import SampledWeights, sample_weights

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


GONE = "the model that this cache was made for is gone"


class Identity:
    """Which model this is, as it was when somebody first asked. Copies of a cache share it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = weakref.ref(model)  # this does not keep the model alive
        self.text = model.config.get_text_config(decoder=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Identity":
        return self

    @cached_property
    def weights(self) -> SampledWeights:
        """A sample of the model's weights."""
        model = self.model()
        if model is None:
            raise ValueError(GONE)
        return sample_weights(model)

    @cached_property
    def architecture(self) -> str:
        """The part of the model's config on which keys depend."""
        known = {name: config_value(self.text, name) for name in ARCHITECTURE}
        plain = {name: value for name, value in known.items() if value is not None}
        return json.dumps(plain, sort_keys=True, default=str)

    def look(self) -> None:
        """Look at the model now. A GPU sends the sampled weights when it has them; only who asks for them waits."""
        _ = self.weights, self.architecture

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the architecture and of a sample of every weight."""
        digest = hashlib.sha256(self.architecture.encode())
        digest.update(self.weights.fingerprint(rounded=False).encode())
        return digest.hexdigest()

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What an index or a profile must fit: shape, rotation and weights, the same in every precision.

        A checkpoint in float32 is the exception: loaded in float16 it was rounded otherwise, and counts as another.
        """
        kv_heads, width = heads_of(self.text)
        found = {
            "model_type": self.text.model_type,
            "layers": self.text.num_hidden_layers,
            "heads": self.text.num_attention_heads,
            "kv_heads": kv_heads,
            "head_width": width,
            "rope": getattr(self.text, "rope_parameters", None),
            "fingerprint": self.weights.fingerprint(rounded=True),
        }
        plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
        return plain

    def fitted(self, config: MethodConfig, *, held: bool = False) -> MethodConfig:
        """A method's config for this model; refuses one that uses something learnt from another model.

        `held`: a cache of this method comes from a file.
        """
        rope = changing_frequencies(self.text) if config.looks_ahead else None
        if rope is not None:
            raise ValueError(
                f"{config.name} depends on how later tokens will be rotated, and this model rotates otherwise once a "
                f"text is longer than {rope.limit} tokens: use a method that does not look ahead, such as keydiff"
            )
        return config.for_model(lambda: self.facts, held=held)

    def learnt(self, configs: Iterable[MethodConfig]) -> dict[str, str]:
        """For configs that use something learnt from this model, its digest now; refuses what is of another model."""
        found = {str(config): self.fitted(config).learnt_digest(lambda: self.facts) for config in configs}
        return {name: digest for name, digest in found.items() if digest is not None}


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of a model as it is now."""
    return Identity(model).fingerprint


def describe_model(model: PreTrainedModel) -> dict[str, Any]:
    """What an index or a profile must fit, of a model as it is now."""
    return Identity(model).facts
