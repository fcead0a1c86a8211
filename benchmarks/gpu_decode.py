"""Decoding with whole models on a GPU: steps launched by Python, and recorded as CUDA graphs."""

import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from gpu_machine import Machine, summed_up
from kvsketch import SketchCache, make_cache, parse_spec, prefill
from kvsketch.evaluation.speed.made import made_up, random_llama
from kvsketch.huggingface.graphs import CudaGraphs, recorded
from kvsketch.huggingface.identity import describe_model

FORMS = {
    "exact": "exact",
    "balancekv": "balancekv(keep=0.25)",
    "keydiff, profile": "keydiff(keep=0.25, heads='profile')",
    "saap": "saap(probes=32, window=255, staging=64)",
}
LLAMA: dict[str, Any] = {"layers": 8, "heads": 32, "kv_heads": 8, "head_dim": 128}
SMALL: dict[str, Any] = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 32}
CHUNK = 8192
STOCK_STEPS = 60  # few, as each copies the cache
APART = 0.05  # how far logits may differ from those of unrecorded steps, as a share of the largest


def decoding(on: Machine, count: int, steps: int) -> Iterator[dict[str, Any]]:
    """Microseconds of a step after `count` tokens; the mean over all steps too, as some are recorded anew."""
    on_gpu = on.device.type == "cuda"
    model = random_llama(**(LLAMA if on_gpu else SMALL), dtype=on.dtype if on_gpu else torch.float32).to(on.device)
    text = model.config
    ids = torch.randint(1, text.vocab_size, (1, count + steps), generator=on.draw, device=on.device)
    index = (1024, 1024) if on_gpu else (8, 12)
    layers, about = range(text.num_hidden_layers), describe_model(model)
    with made_up(text.num_key_value_heads, text.head_dim, layers, index, about) as ready:
        yield {"what": "model", "form": "stock", "tokens": count, "us": {"eager": _stock(on, model, ids, count)}}
        for form, spec in FORMS.items():
            config = ready(parse_spec(spec)).for_model(lambda: about)
            cache = prefill(model, ids[:, :count], make_cache(model, config), chunk=CHUNK)
            row: dict[str, Any] = {"what": "model", "form": form, "tokens": count, "us": {}}
            twin = cache.fork()
            expected, row["us"]["eager"] = taken(on, model, cache, ids[:, count:], count)
            if on_gpu:
                graphs = recorded(model, CudaGraphs(on.device))
                got, row["us"]["graph"] = taken(on, model, twin, ids[:, count:], count, graphs)
                apart = float((got - expected).abs().max() / expected.abs().max())
                assert apart < APART, f"{form}: recorded steps are off by {apart:.3f} of the largest logit"
                assert cache.seen == twin.seen
            yield row


def _stock(on: Machine, model: PreTrainedModel, ids: Tensor, count: int) -> dict[str, Any]:
    """Times of steps with a cache of transformers' own."""
    cache = DynamicCache(config=model.config)
    for part in ids[:, :count].split(CHUNK, 1):
        model(input_ids=part, past_key_values=cache, logits_to_keep=1)
    return taken(on, model, cache, ids[:, count : count + STOCK_STEPS], count)[1]


def taken(
    on: Machine,
    model: PreTrainedModel,
    cache: SketchCache | DynamicCache,
    following: Tensor,
    first: int,
    way: AbstractContextManager[Any] | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """The logits of tokens read one by one, at places from `first` on, and how long a step takes."""
    said, taken = list[Tensor](), list[float]()
    with torch.no_grad(), way or nullcontext():
        for place, token in enumerate(following.split(1, 1), first):
            with on.clock(taken):
                at = torch.full_like(token, place)
                said.append(model(input_ids=token, position_ids=at, past_key_values=cache).logits)
    behind = taken[len(taken) // 4 :]  # the first steps compile, and examine what is new
    return torch.cat(said, 1), summed_up(behind) | {"mean": statistics.fmean(behind)}
