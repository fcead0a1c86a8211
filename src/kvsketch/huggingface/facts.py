"""What a model must be for something that was learnt from it to fit: its shape, its rotation and its weights."""

import hashlib
import json
from typing import Any

import torch
from transformers import PreTrainedModel

from kvsketch.huggingface.model import sample_of

TINY = torch.finfo(torch.float16).tiny  # float16 has fewer bits for what is smaller than bfloat16 has


def facts(model: PreTrainedModel) -> dict[str, Any]:
    """Plain facts by name, the same for a checkpoint in whichever precision it is loaded.

    But for a checkpoint in float32: what is loaded from it in float16 was rounded otherwise, and counts as another.
    """
    text = model.config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    found = {
        "model_type": text.model_type,
        "layers": text.num_hidden_layers,
        "heads": heads,
        "kv_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_width": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "rope": getattr(text, "rope_parameters", None),
        "fingerprint": _of_weights(model),
    }
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain


def _of_weights(model: PreTrainedModel) -> str:
    """A hash of a sample of every parameter, rounded to bfloat16; tiny numbers count as zeros."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        if (sample := sample_of(parameter)) is not None:
            rounded = sample.to(torch.bfloat16)
            digest.update(rounded.where(rounded.abs() >= TINY, 0).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
