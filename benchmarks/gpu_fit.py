"""How long fitting an index for `saap` takes on a GPU, for a model of the shape of Llama 3.1 8B.

A model with random weights reads texts of random tokens, and one of its layers is fitted with the default settings of
`kvsketch fit`; all layers take that many times as long. The index is of no use, but the work is the same.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gpu_large import SHAPE, SMALL, model_of, now
from gpu_machine import Machine
from kvsketch.fitting.corpus import Text
from kvsketch.fitting.layer import LayerFit, report_of
from kvsketch.fitting.settings import FitSettings, Recipe, ShardSettings
from kvsketch.fitting.shards import Reader, Shards
from kvsketch.huggingface.identity import describe_model

TEXTS = 5  # one of them to measure the fit on


def fitting(on: Machine, tokens: int) -> Iterator[dict[str, Any]]:
    """A row for reading such texts, and one for each stage of a fit."""
    on_gpu = on.device.type == "cuda"
    model = model_of(SHAPE if on_gpu else SMALL, on)
    layer, layers = model.config.num_hidden_layers // 2, model.config.num_hidden_layers
    shards = ShardSettings(layers=(layer,)) if on_gpu else ShardSettings(layers=(layer,), apart=24, away=12, queries=30)
    settings = FitSettings(shards=shards)
    if not on_gpu:
        settings = FitSettings(shards=shards, recipe=Recipe(steps=5, batch=16), buckets=8, hidden=10, pool=100)
    row: dict[str, Any] = {"what": "fitting, 8B", "tokens": tokens, "texts": TEXTS}
    with tempfile.TemporaryDirectory() as folder:
        held = Shards(Path(folder) / "shards", describe_model(model), settings.shards)
        reader = Reader(lambda: model, held)
        ids = torch.randint(1, model.config.vocab_size, (TEXTS, tokens), generator=on.draw, device=on.device).cpu()
        texts = [Text(one, f"made up, {number}") for number, one in enumerate(ids)]
        at = now(on)
        for text in texts:
            reader(text)
        yield row | {"form": "reading, one layer noted", "us": {"eager": {"median": 1e6 * (now(on) - at) / TEXTS}}}
        paths = [held.path(text) for text in texts]
        work = Path(folder) / "work"
        one = LayerFit(
            out=Path(folder), work=work, train=paths[1:], lengths=[tokens] * (TEXTS - 1), held_out=paths[:1],
            settings=settings, device=str(on.device),
        )  # fmt: skip
        with torch.enable_grad():
            one(layer)
        for stage, seconds in report_of(Path(folder), layer)["seconds"].items():
            yield row | {"form": f"{stage}, {layers} layers", "us": {"eager": {"median": 1e6 * seconds * layers}}}
