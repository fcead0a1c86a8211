"""Resident memory while a very long prompt is read in streaming mode: `python benchmarks/long_prompt.py`."""

import argparse
import time

import torch
from transformers import DynamicCache

import kvsketch
from common import prompt, random_llama, resident_bytes, shape_of, write_row

CHUNK = 2048


@torch.no_grad()
def measure(way: str, count: int) -> None:
    model = random_llama(layers=4, heads=8, kv_heads=4, head_dim=64, hidden=256)
    ids = prompt(count)
    curve: list[tuple[int, int]] = []
    start_bytes, start = resident_bytes(), time.perf_counter()
    if way == "stock chunked":
        cache = DynamicCache(config=model.config)
        for begin in range(0, count, CHUNK):
            chunk = ids[:, begin : begin + CHUNK]
            model(chunk, past_key_values=cache, logits_to_keep=1)
            curve.append((begin + chunk.shape[1], resident_bytes() - start_bytes))
        nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    else:
        cache = kvsketch.make_cache(model, way)
        kvsketch.prefill(
            model, ids, cache, chunk=CHUNK, progress=lambda n: curve.append((n, resident_bytes() - start_bytes))
        )
        nbytes = cache.nbytes
    taken = time.perf_counter() - start
    config = model.config
    write_row(
        "long_prompt",
        {
            "way": way,
            "n": count,
            "chunk": CHUNK,
            **shape_of(config),
            "seconds": round(taken, 1),
            "tokens_per_second": round(count / taken, 1),
            "cache_bytes": nbytes,
            "full_bytes": 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * count,
            "resident_growth": curve,
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--way", default="uniform(keep=4096, prefill='streaming', chunk=2048)")
    arguments = parser.parse_args()
    measure(arguments.way, arguments.tokens)
