"""The model that a cache was made for."""

import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.core.part import HeadPart
from kvsketch.huggingface.attention import ATTENTION_NAME
from kvsketch.huggingface.frequencies import ChangingFrequencies, DropGuard
from kvsketch.huggingface.identity import GONE, Identity
from kvsketch.huggingface.modules import heads_of, of_layer
from kvsketch.huggingface.spread import TENSOR_PARALLEL, Division, part_of


@dataclass(eq=False)
class ModelLink:
    """The model that a cache was made for. Copies of the cache share it."""

    config: Any  # the text model's
    modules: frozenset[int]  # ids of its attention modules
    decoder: int | None  # the id of the module that runs all of them
    rope: ChangingFrequencies | None
    guard: DropGuard | None
    model: "weakref.ref[PreTrainedModel]"  # not held: a cache does not keep its model alive
    divisions: tuple[Division, ...] = ()  # over which processes it is spread
    looked_at: Identity | None = None  # as it was when last asked for: when a cache begins to read, and for files

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelLink":
        return self

    def now(self) -> Identity | None:
        """The model as it is now; None if it is gone. Layers that begin after this go by it."""
        model = self.model()
        self.looked_at = None if model is None else Identity(model)
        return self.looked_at

    def fingerprint(self) -> str | None:
        """The fingerprint of the model as it is now; None if it is gone."""
        now = self.now()
        return None if now is None else now.fingerprint

    def part_of(self, layer: int, heads: int) -> HeadPart:
        """Which of a layer's KV heads are in this process, if keys of `heads` of them came."""
        return part_of(self.divisions, layer, heads, of_layer(self.heads, layer))

    @cached_property
    def heads(self) -> Any:
        """KV heads; a list, if layers differ. Kept, as layers ask at their beginning and a config is slow to answer."""
        return heads_of(self.config)[0]

    @property
    def group(self) -> int:
        """Query heads of a KV head; the largest number, if layers differ."""
        least = min(heads for heads in self.heads if heads) if isinstance(self.heads, list) else self.heads
        return int(self.config.num_attention_heads // least)

    @property
    def parts(self) -> int:
        """Over how many processes heads are probably divided, before any keys came."""
        return max((one.parts for one in self.divisions if one.name in (None, TENSOR_PARALLEL)), default=1)

    def check_in_one(self, what: str) -> None:
        """Refuse what needs all heads in this process."""
        if self.divisions:
            raise ValueError(f"{what} needs all heads in one process, and this model is spread over several")

    def facts(self) -> dict[str, Any]:
        """The facts about the model (`Identity.facts`), as it was when it was last looked at."""
        known = self.looked_at or self.now()
        if known is None:
            raise ValueError(GONE)
        return known.facts

    def fitted(self, config: MethodConfig) -> MethodConfig:
        """A method's config for the model as it is now; refuses one that does not fit it."""
        now = self.now()
        return config if now is None else now.fitted(config)

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
