"""Indexes made up for tests: random buckets and classifiers, in the format that `kvsketch fit` writes."""

import torch
import torch.nn.functional as F

from kvsketch.caches.lookup.key_index import layer_file, write_index
from kvsketch.files import write_tensors


def make_index(folder, model=None, *, layers=range(4), heads=2, width=16, buckets=8, hidden=12, seed=0):
    """Write an index for a model, or for layers without a model; returns the folder's name."""
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
        write_tensors(folder / layer_file(layer), tensors, {})
    described = {"fingerprint": ""}
    if model is not None:
        from kvsketch.huggingface.identity import describe_model

        described = describe_model(model)
    description = {
        "model": described | {"id": "made up"},
        "buckets": buckets,
        "hidden": hidden,
        "layers": {str(layer): {} for layer in layers},
    }
    write_index(folder, description)
    return str(folder)
