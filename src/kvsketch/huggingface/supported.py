"""Which models kvsketch can serve, and which it refuses."""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, CacheLayerMixin, get_layer_types_and_kwargs

from kvsketch.huggingface.frequencies import changing_frequencies
from kvsketch.huggingface.modules import OURS

# Kinds of layers that we know: ours, and those that stay as they are. Others have masks that only their code knows.
SERVED = (
    *OURS, "sliding_attention", "chunked_attention", "hybrid_sliding", "linear_attention", "conv", "dummy",
)  # fmt: skip
NOT_EXCHANGED = (
    "{} does not let its attention be exchanged (it does not use transformers' AttentionInterface), so kvsketch "
    "cannot serve it: use transformers' own cache"
)


def unwrapped(model: nn.Module) -> Any:
    """The transformers model itself, without adapters (peft) or the compiler that are wrapped around it."""
    inner: Any = getattr(model, "_orig_mod", model)
    if isinstance(inner, PreTrainedModel):
        return inner
    if not hasattr(inner, "get_base_model"):
        raise ValueError(f"expected a transformers model, got {type(inner).__name__}")
    for name, adapter in getattr(inner, "peft_config", {}).items():
        if getattr(adapter, "is_prompt_learning", False):
            raise ValueError(
                f"the adapter {name!r} puts learnt tokens before the text (a {type(adapter).__name__}), in a cache of "
                "its own: kvsketch serves adapters that change weights, such as LoRA"
            )
    return unwrapped(inner.get_base_model())


def check_supported(model: PreTrainedModel) -> Any:
    """The text model's config, if kvsketch can serve the model."""
    name = type(model).__name__
    if type(model).__module__.startswith("transformers_modules"):
        raise ValueError(f"{name} is remote code: kvsketch serves only models that are part of transformers")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model: kvsketch serves decoder-only models")
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        raise ValueError(
            f"{name} caches latents from which keys are made later (MLA): kvsketch does not serve it, "
            "use transformers' own cache"
        )
    sharing = getattr(text, "kv_sharing_modes", None) or ()  # "store" alone: for assistants, whichever they are
    if getattr(text, "num_kv_shared_layers", None) or any("reuse" in (mode or "") for mode in sharing):
        raise ValueError(f"layers of {name} share one cache: kvsketch does not serve it, use transformers' own cache")
    if any(hasattr(module, "_setup_cache") for module in model.modules()):  # RecurrentGemma
        raise ValueError(
            f"layers of {name} keep what they have read in the model itself, so that no cache has all of it: kvsketch "
            "does not serve it, use transformers' own cache"
        )
    kinds, _ = get_layer_types_and_kwargs(text)
    if others := sorted(set(kinds) - set(SERVED)):
        raise ValueError(
            f"{name} has layers that kvsketch does not know ({', '.join(others)}): it does not serve the model, use "
            "transformers' own cache"
        )
    if not any(issubclass(DYNAMIC_LAYER_TYPE_MAPPING.get(kind, object), CacheLayerMixin) for kind in kinds):
        raise ValueError(
            f"{name} has no attention layer ({', '.join(sorted(set(kinds)))}): use transformers' own cache"
        )
    if not model._can_set_attn_implementation():
        raise ValueError(NOT_EXCHANGED.format(name))
    if not set(OURS) & set(kinds):
        warnings.warn(
            f"{name} has no full-attention layer ({', '.join(sorted(set(kinds)))}): there is nothing to compress",
            stacklevel=4,
        )
    return text


def context_of(model: PreTrainedModel) -> int | None:
    """How many tokens a model was made to read; None if its config does not say, or if it rotates otherwise beyond."""
    text = model.config.get_text_config(decoder=True)
    most: int | None = getattr(text, "max_position_embeddings", None)
    return most if changing_frequencies(text) is None else None


def check_context(model: PreTrainedModel, tokens: int, what: str, advice: str = "") -> None:
    """Refuse to read more tokens than a model was made for: what it writes after those is noise."""
    most = context_of(model)
    if most is not None and tokens > most:
        raise ValueError(
            f"{what} {tokens:,} tokens, and the context of {type(model).__name__} is {most:,}: give it less to read, "
            f"or choose a model with a longer context{'. ' * bool(advice)}{advice}"
        )


def check_layers_are_found(model: PreTrainedModel, text: Any, modules: Sequence[nn.Module]) -> None:
    """Refuse a model whose attention layers do not know their numbers (Zamba)."""
    kinds, _ = get_layer_types_and_kwargs(text)
    found = {module.layer_idx for module in modules if hasattr(module, "is_causal")}  # other modules sum tokens up
    missing = [i for i, kind in enumerate(kinds) if kind in OURS and i not in found]
    name = type(model).__name__
    if missing:
        raise ValueError(
            f"layer {missing[0]} of {name} has attention that does not know its number (it may be shared): kvsketch "
            "does not serve it, use transformers' own cache"
        )
