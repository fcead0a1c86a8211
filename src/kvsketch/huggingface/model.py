"""The model that a cache was made for."""

import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvsketch.caches.core.config import MethodConfig
from kvsketch.huggingface.attention import ATTENTION_NAME
from kvsketch.huggingface.frequencies import ChangingFrequencies, DropGuard
from kvsketch.huggingface.identity import describe_model, fingerprint, fitted


@dataclass(frozen=True)
class ModelLink:
    """The model that a cache was made for. Copies of the cache share it."""

    config: Any  # the text model's
    modules: frozenset[int]  # ids of its attention modules
    decoder: int | None  # the id of the module that runs all of them
    rope: ChangingFrequencies | None
    guard: DropGuard | None
    model: "weakref.ref[PreTrainedModel]"  # not held: a cache does not keep its model alive

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelLink":
        return self

    def fingerprint(self) -> str | None:
        """Of the model as it is now; None if it is gone."""
        model = self.model()
        return None if model is None else fingerprint(model)

    def facts(self) -> dict[str, Any]:
        """What there is to know about the model as it is now."""
        model = self.model()
        if model is None:
            raise ValueError("the model that this cache was made for is gone")
        return describe_model(model)

    def fitted(self, config: MethodConfig) -> MethodConfig:
        """A method for the model as it is now; refuses one that does not fit it."""
        model = self.model()
        return config if model is None else fitted(config, model)

    def check_attached(self) -> None:
        """Refuse to work for a model whose attention is not ours."""
        implementation = self.config._attn_implementation
        if implementation != ATTENTION_NAME:
            raise ValueError(
                f'the model computes attention with "{implementation}", which would ignore what this cache has '
                "compressed: attach it again with kvsketch.attach(model)"
            )

    def check_module(self, module: nn.Module) -> None:
        """Refuse the layers, or the decoder, of another model."""
        if id(module) not in self.modules and id(module) != self.decoder:
            raise ValueError(
                "this cache was made for another model object: make one for this model with "
                "kvsketch.make_cache(model, ...), or save it and use kvsketch.load_cache(model, path)"
            )
