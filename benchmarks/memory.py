"""Peak memory of reading a long prompt, each way in its own process: `python benchmarks/memory.py`.

For kvpress, run the script with a Python that has it and a transformers it supports:
`python benchmarks/memory.py --way kvpress`.
"""

import argparse
import subprocess
import sys
import time

import torch
from transformers import DynamicCache

from common import PeakMemory, prompt, random_llama, shape_of, write_row

CHUNK = 1024
WAYS = ("stock", "stock chunked", "exact", "uniform", "uniform streaming", "streaming_llm streaming")


@torch.no_grad()
def read(way: str, model, ids) -> tuple[object, int]:
    """The cache after the prompt was read in one way, and its bytes."""
    if way.startswith("stock"):
        cache = DynamicCache(config=model.config)
        for chunk in ids.split(CHUNK if "chunked" in way else ids.shape[1], 1):
            model(chunk, past_key_values=cache, logits_to_keep=1)
        return cache, stock_bytes(cache)
    if way == "kvpress":
        import kvpress

        cache = DynamicCache(config=model.config)
        with kvpress.KnormPress(compression_ratio=0.75)(model):
            model(ids, past_key_values=cache, logits_to_keep=1)
        return cache, stock_bytes(cache)
    import kvsketch

    name, _, mode = way.partition(" ")
    options = [] if name == "exact" else ["keep=0.25"]
    options += [f"prefill='streaming', chunk={CHUNK}"] if mode else []
    cache = kvsketch.make_cache(model, f"{name}({', '.join(options)})")
    kvsketch.prefill(model, ids, cache)
    return cache, cache.nbytes


def stock_bytes(cache) -> int:
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def measure(way: str, count: int) -> None:
    model = random_llama(heads=16)
    read(way, model, prompt(256))  # warm up
    ids = prompt(count)
    with PeakMemory() as memory:
        start = time.perf_counter()
        cache, nbytes = read(way, model, ids)
        taken = time.perf_counter() - start
    del cache
    config = model.config
    full = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * count
    write_row(
        "memory",
        {
            "way": way,
            "n": count,
            **shape_of(config),
            "peak_growth_bytes": memory.growth,
            "cache_bytes": nbytes,
            "full_bytes": full,
            "of_full": round(nbytes / full, 4),
            "prefill_seconds": round(taken, 2),
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--way", help="measure one way, in this process; otherwise all, each in its own process")
    arguments = parser.parse_args()
    if arguments.way:
        measure(arguments.way, arguments.tokens)
    else:
        for each in WAYS:
            subprocess.run([sys.executable, __file__, "--tokens", str(arguments.tokens), "--way", each], check=True)
