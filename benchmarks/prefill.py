"""What compressing a long prompt adds to reading it, on the embedded model: `python benchmarks/prefill.py`.

One exact read, timed; then every method compresses what was read, in turns, so that a busy moment hits all of them.
The paper's comparison reads anew with every method and has 21 % for BalanceKV: the last rows do that too. Writes
docs/results/prefill.jsonl.
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
    "balancekv(keep=0.5)",
    "balancekv(keep=0.25)",
    "balancekv(keep=0.0625)",
    "balancekv(keep=0.25, augmented=True)",
    "balancekv(keep=0.25, mode='faithful')",
    "clustergen(keep=0.25)",
)


@torch.inference_mode()
def main(count: int, repeats: int, reads: int) -> None:
    model, tokenizer = load_embedded()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(tokenizer), (1, count), generator=generator)  # random tokens, as in the paper
    (RESULTS / "prefill.jsonl").unlink(missing_ok=True)
    about = {"n": count, "model": "embedded", "dtype": str(model.dtype).removeprefix("torch.")}

    def read(method: str) -> None:
        if method == "stock":
            kvsketch.detach(model)
            model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)
        else:
            kvsketch.prefill(model, ids, kvsketch.make_cache(model, method))

    exact = kvsketch.make_cache(model, "exact")
    first = seconds(lambda: kvsketch.prefill(model, ids, exact))
    times = dict.fromkeys(METHODS, ())
    for _ in range(repeats):
        for method in METHODS:
            times[method] += (seconds(partial(exact.compress, method)),)
    for method, found in times.items():
        low, middle, high = quantiles(found, n=4)
        row = {"part": "compress", "method": method, "median_seconds": middle, "quartiles": [low, high]}
        write_row("prefill", about | row | {"exact_read_seconds": first, "share": middle / first})
    del exact

    ways = ("stock", "exact", "uniform(keep=0.25)", "balancekv(keep=0.25)")
    times = dict.fromkeys(ways, ())
    for _ in range(reads):
        for way in ways:
            times[way] += (seconds(partial(read, way)),)
    for way, found in times.items():
        ratios = [mine / other for mine, other in zip(found, times["exact"], strict=True)]
        low, middle, high = quantiles(found, n=4)
        row = {"part": "read", "method": way, "median_seconds": middle, "quartiles": [low, high]}
        write_row("prefill", about | row | {"over_exact": quantiles(ratios, n=4)[1], "least_seconds": min(found)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--reads", type=int, default=5)
    arguments = parser.parse_args()
    main(arguments.tokens, arguments.repeats, arguments.reads)
