"""What compressing a long prompt adds to reading it, on the embedded model: `python benchmarks/prefill.py`.

In each round, an exact read comes first, and then every method compresses what was read, so that a busy moment hits all
of them. The paper's comparison reads anew with every method and has 21 % for BalanceKV; the last rows do that too.
Writes docs/results/prefill.jsonl.
"""

import argparse
from functools import partial
from statistics import quantiles

import torch
from transformers import DynamicCache

import kvsketch
from common import RESULTS, seconds, write_row
from kvsketch.evaluation.embedded import load_embedded

METHODS = (
    "streaming_llm(keep=0.25)",
    "uniform(keep=0.25)",
    "balancekv(keep=0.5, sharpness=1, augmented=False)",
    "balancekv(keep=0.25, sharpness=1, augmented=False)",
    "balancekv(keep=0.0625, sharpness=1, augmented=False)",
    "balancekv(keep=0.25, block=128, sharpness=1, augmented=False)",
    "balancekv(keep=0.25, block=64, sharpness=1, augmented=False)",
    "balancekv(keep=0.25)",
    "balancekv(keep=0.25, mode='faithful')",
    "clustergen(keep=0.25)",
)
WAYS = (
    "stock",
    "exact",
    "uniform(keep=0.25)",
    "balancekv(keep=0.5, sharpness=1, augmented=False)",
    "balancekv(keep=0.25, sharpness=1, augmented=False)",
)


def compressing(model, ids: torch.Tensor, repeats: int, about: dict) -> None:
    """Time exact reads, and how each method compresses what was read, in turns."""
    times = dict.fromkeys(("read", *METHODS), ())
    for _ in range(repeats):
        exact = kvsketch.make_cache(model, "exact")
        times["read"] += (seconds(partial(kvsketch.prefill, model, ids, exact)),)
        for method in METHODS:
            times[method] += (seconds(partial(exact.compress, method)),)
    for method in METHODS:
        shares = quantiles([mine / read for mine, read in zip(times[method], times["read"], strict=True)], n=4)
        low, middle, high = quantiles(times[method], n=4)
        row = {"part": "compress", "method": method, "median_seconds": middle, "quartiles": [low, high]}
        row |= {"share_of_read": shares[1], "share_quartiles": [shares[0], shares[2]]}
        write_row("prefill", about | row | {"read_seconds": quantiles(times["read"], n=4)[1]})


def reading(model, ids: torch.Tensor, repeats: int, about: dict) -> None:
    """Time whole reads, with the ways in turns."""

    def read(way: str) -> None:
        if way == "stock":
            kvsketch.detach(model)
            model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)
        else:
            kvsketch.prefill(model, ids, kvsketch.make_cache(model, way))

    times = dict.fromkeys(WAYS, ())
    for _ in range(repeats):
        for way in WAYS:
            times[way] += (seconds(partial(read, way)),)
    for way, found in times.items():
        over = quantiles([mine / other for mine, other in zip(found, times["exact"], strict=True)], n=4)[1]
        low, middle, high = quantiles(found, n=4)
        row = {"part": "read", "method": way, "median_seconds": middle, "quartiles": [low, high]}
        write_row("prefill", about | row | {"over_exact": over, "least_seconds": min(found)})


@torch.inference_mode()
def main(count: int, repeats: int) -> None:
    model, tokenizer = load_embedded()
    ids = torch.randint(len(tokenizer), (1, count), generator=torch.Generator().manual_seed(0))  # as in the paper
    (RESULTS / "prefill.jsonl").unlink(missing_ok=True)
    about = {"n": count, "model": "embedded", "dtype": str(model.dtype).removeprefix("torch.")}
    compressing(model, ids, repeats, about)
    reading(model, ids, repeats, about)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    main(arguments.tokens, arguments.repeats)
