"""Decode speed beside stock, in one process: `python benchmarks/decode.py`.

Every cache is filled with the same random keys and values, its answers are checked, and the methods take turns, so that
a busy machine slows all of them alike.
"""

import argparse
import statistics

import torch
from transformers import DynamicCache

import kvsketch
from common import random_llama, seconds, write_row
from kvsketch.caches.core.tokens import NewTokens

METHODS = ("exact", "uniform(keep=0.25)", "uniform(keep=4096)", "streaming_llm(keep=0.25)")


def filled_caches(model, count, methods):
    """A stock cache and ours, all filled with the same tokens."""
    config = model.config
    shape = (1, config.num_key_value_heads, count, config.head_dim)
    stock = DynamicCache(config=config)
    caches = {method: kvsketch.make_cache(model, method) for method in methods}
    generator = torch.Generator().manual_seed(2)
    for index in range(config.num_hidden_layers):
        keys, values = (torch.randn(shape, generator=generator).to(model.dtype) for _ in range(2))
        stock.update(keys, values, index)
        for cache in caches.values():
            cache.sketch_layers[index].held.hold(NewTokens(keys, values))
    return stock, caches


@torch.no_grad()
def measure(count: int, heads: int, kv_heads: int, steps: int, dtype: torch.dtype) -> None:
    model = random_llama(heads=heads, kv_heads=kv_heads, dtype=dtype)
    stock, caches = filled_caches(model, count, METHODS)
    full_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in stock.layers)
    tokens = torch.randint(1, 1000, (steps + 2, 1, 1), generator=torch.Generator().manual_seed(3))

    def with_stock(token):
        kvsketch.detach(model)
        return model(token, past_key_values=stock).logits

    def with_ours(cache, token):
        kvsketch.attach(model)
        return model(token, past_key_values=cache).logits

    for token in tokens[:2]:  # warm up, and check
        expected = with_stock(token)
        answers = {method: with_ours(cache, token) for method, cache in caches.items()}
    errors = {method: float((answer - expected).norm() / expected.norm()) for method, answer in answers.items()}
    assert errors["exact"] < 0.05, f"exact answers differ from stock by {errors['exact']:.3f}: no times are printed"

    times: dict[str, list[float]] = {"stock": []} | {method: [] for method in METHODS}
    for token in tokens[2:]:
        kvsketch.detach(model)  # this is not timed
        times["stock"].append(seconds(lambda token=token: model(token, past_key_values=stock)))
        kvsketch.attach(model)
        for method, cache in caches.items():
            times[method].append(seconds(lambda token=token, cache=cache: model(token, past_key_values=cache)))
    stock_median = statistics.median(times["stock"])
    about = {
        "n": count, "layers": model.config.num_hidden_layers, "heads": heads, "kv_heads": kv_heads,
        "head_dim": model.config.head_dim, "dtype": str(dtype).removeprefix("torch."), "device": "cpu", "steps": steps,
    }  # fmt: skip
    for method, taken in times.items():
        nbytes = full_bytes if method == "stock" else caches[method].nbytes
        wrong = None if method == "stock" else round(errors[method], 5)
        row = {"method": method} | about | timed(taken, stock_median) | {"cache_bytes": nbytes}
        write_row("decode", row | {"of_full": round(nbytes / full_bytes, 4), "logits_error": wrong})


def timed(taken: list[float], stock_median: float) -> dict:
    """The part of a row about the times of a method's steps."""
    median = statistics.median(taken)
    return {
        "ms_per_token": round(median * 1e3, 2),
        "ms_quartiles": [round(q * 1e3, 2) for q in statistics.quantiles(taken, n=4)],
        "tokens_per_second": round(1 / median, 2),
        "times_stock": round(stock_median / median, 2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 8192, 32768])
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8, 32])
    arguments = parser.parse_args()
    for tokens in arguments.tokens:
        for kv_heads in arguments.kv_heads:
            measure(tokens, 32, kv_heads, arguments.steps, torch.bfloat16)
