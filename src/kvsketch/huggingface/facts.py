"""What a model must be for something that was learnt from it to fit: its shape, its rotation and its weights."""

import json
from typing import Any

from transformers import PreTrainedModel

from kvsketch.huggingface.modules import heads_of
from kvsketch.huggingface.weights import fingerprint_of_weights


def facts(model: PreTrainedModel) -> dict[str, Any]:
    """Plain facts by name, the same for a checkpoint in whichever precision it is loaded.

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
