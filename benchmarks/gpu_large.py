"""A model of the shape of Llama 3.1 8B with random weights, on a GPU: times of reading and of steps, and memory.

Reading 16,384 tokens is timed for a cache of transformers' own and each of ours, in turn. Steps are timed after
131,072 tokens of one text, and after 16,384 tokens of each of eight texts: a cache that holds all of eight texts of
131,072 tokens is larger than the memory of such a GPU.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gpu_decode import STOCK_STEPS, taken
from gpu_machine import Machine, summed_up
from kvsketch import SketchCache, make_cache, parse_spec, prefill
from kvsketch.evaluation.speed.made import made_up
from kvsketch.huggingface.graphs import CudaGraphs, recorded
from kvsketch.huggingface.identity import describe_model

SHAPE: dict[str, Any] = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
FORMS = {
    "exact": "exact",
    "balancekv": "balancekv(keep=0.25)",
    "kvzip": "kvzip(keep=0.25)",
    "saap": "saap(probes=32, window=2047)",
}
STOCK = "stock"  # a cache of transformers' own
CHUNK = 16_384
ROUNDS = 3  # how often each form reads the prompt


def large(on: Machine, read: int, count: int, steps: int) -> Iterator[dict[str, Any]]:
    """Rows of reading `read` tokens, and of steps after `count` tokens, and after `read` tokens of eight texts."""
    on_gpu = on.device.type == "cuda"
    model = model_of(SHAPE if on_gpu else SMALL, on)
    text, about = model.config, describe_model(model)
    ids = torch.randint(1, text.vocab_size, (8, max(read, count) + steps), generator=on.draw, device=on.device)
    index = (1024, 1024) if on_gpu else (8, 12)
    with made_up(text.num_key_value_heads, text.head_dim, range(text.num_hidden_layers), index, about) as ready:
        configs = {form: ready(parse_spec(spec)).for_model(lambda: about) for form, spec in FORMS.items()}

        def new(form: str) -> SketchCache | DynamicCache:
            return make_cache(model, configs[form]) if form in configs else DynamicCache(config=model.config)

        yield from _reading(on, model, ids[:1, :read], new)
        for texts, tokens in ((ids[:1], count), (ids, read)):
            for form in (*FORMS, STOCK):
                yield _steps(on, model, texts[:, : tokens + steps], tokens, form, new)


def model_of(shape: dict[str, Any], on: Machine) -> PreTrainedModel:
    config = LlamaConfig(**shape, max_position_embeddings=1 << 20, bos_token_id=None, eos_token_id=None)
    kind = torch.get_default_dtype()
    torch.set_default_dtype(on.dtype if on.device.type == "cuda" else torch.float32)
    try:
        with on.device, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(kind)


def _reading(
    on: Machine, model: PreTrainedModel, ids: Tensor, new: Callable[[str], SketchCache | DynamicCache]
) -> Iterator[dict[str, Any]]:
    """How long each form takes to read a prompt, in turn."""
    seconds = {form: list[float]() for form in (STOCK, *FORMS)}
    for number in range(ROUNDS + 1):
        for form, found in seconds.items():
            at = now(on)
            _read(model, ids, new(form), len(ids[0]))
            if number:  # the first round compiles
                found.append(1e6 * (now(on) - at))
    for form, found in seconds.items():
        ratio = statistics.median(found) / statistics.median(seconds["exact"])
        row = {"what": "prompt, 8B", "form": form, "tokens": ids.shape[1]}
        yield row | {"us": {"eager": summed_up(found)}, "of_exact": ratio}


def _read(model: PreTrainedModel, ids: Tensor, cache: SketchCache | DynamicCache, chunk: int) -> None:
    if isinstance(cache, SketchCache):
        prefill(model, ids, cache, chunk=chunk)
        return
    with torch.no_grad():
        for part in ids.split(chunk, 1):
            model(input_ids=part, past_key_values=cache, logits_to_keep=1)


def _steps(
    on: Machine, model: PreTrainedModel, ids: Tensor, count: int, form: str,
    new: Callable[[str], SketchCache | DynamicCache],
) -> dict[str, Any]:  # fmt: skip
    """Steps after `count` tokens, recorded if there is a GPU and the cache is ours."""
    before = _held(on)
    at = now(on)
    cache = new(form)
    _read(model, ids[:, :count], cache, max(1, CHUNK // len(ids)))
    row: dict[str, Any] = {"what": "steps, 8B", "form": form, "tokens": count, "texts": len(ids)}
    row |= {"reading_s": now(on) - at, "reading_peak": _peak(on) - before}
    _held(on)  # the peak of the steps is measured from here on
    row |= {"cache_bytes": cache.nbytes} if isinstance(cache, SketchCache) else {}
    graphs = recorded(model, CudaGraphs(on.device)) if on.device.type == "cuda" and form != STOCK else None
    following = ids[:, count : count + STOCK_STEPS] if form == STOCK else ids[:, count:]
    us = taken(on, model, cache, following, count, graphs)[1]
    row |= {"us": {"graph" if graphs else "eager": us}}
    return row | {"tokens_per_s": 1e6 * len(ids) / us["mean"], "peak": _peak(on) - before}


def now(on: Machine) -> float:
    if on.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _held(on: Machine) -> int:
    if on.device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(on: Machine) -> int:
    return torch.cuda.max_memory_allocated() if on.device.type == "cuda" else 0
