"""A model's attention modules."""

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel


def attention_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules that fill a cache: those that know their layer's number and have keys of their own."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "config"):
            yield module
