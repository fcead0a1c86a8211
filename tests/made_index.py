"""Indexes made up for tests: random buckets and classifiers, in the format that `kvsketch fit` writes."""

import json

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from kvsketch.caches.key_index import DESCRIPTION, FORMAT, layer_file


def make_index(folder, model=None, *, layers=range(4), heads=2, width=16, buckets=8, hidden=12, seed=0):
    """Write an index for a model's facts, or for layers without a model; returns the folder's name."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    folder.mkdir(parents=True, exist_ok=True)
    for layer in layers:
        inner = hidden or width
        tensors = {
            "centroids": F.normalize(normal(heads, buckets, width), dim=2),
            "rotated_centroids": F.normalize(normal(heads, buckets, width), dim=2),
            "second": normal(heads, inner, buckets),
            "second_bias": normal(heads, 1, buckets),
        }
        if hidden:
            tensors |= {"first": normal(heads, width, hidden), "first_bias": normal(heads, 1, hidden)}
        save_file(tensors, folder / layer_file(layer))
    facts = {"fingerprint": ""}
    if model is not None:
        from kvsketch.huggingface.facts import facts as facts_of

        facts = facts_of(model)
    description = {
        "format": FORMAT,
        "model": facts | {"id": "made up"},
        "buckets": buckets,
        "hidden": hidden,
        "layers": {str(layer): {} for layer in layers},
    }
    (folder / DESCRIPTION).write_text(json.dumps(description))
    return str(folder)
