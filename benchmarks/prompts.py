"""Times of prompts beside stock transformers, in turns: `python benchmarks/prompts.py --tokens 256,1024`.

A Llama of random weights with 8 layers, 32 query and 8 KV heads × 128 in bfloat16. It is narrow outside attention, so
that attention and cache are measured; with `--hidden 4096 --mlp 14336` it is as wide as Llama-3.1-8B. In each round
every way reads the prompt once, compression included, with an empty cache that was made before. A wrong answer of
`exact` ends the run before a time is printed. Rows, with speeds as multiples of stock's in every round, go to
docs/results/prompts.jsonl.
"""

import argparse
from functools import partial
from statistics import median

import torch
from transformers import Cache, DynamicCache

import kvsketch
from common import beside_stock, prompt, random_llama, seconds, shape_of, write_row
from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.registry import parse_spec
from kvsketch.evaluation.board.speed import TOLERANCE
from kvsketch.evaluation.speed.made import made_up
from kvsketch.huggingface.identity import describe_model

HEADS, KV_HEADS, WIDTH, INDEX = 32, 8, 128, (1024, 1024)
STOCK, EXACT = "stock", "exact"
WAYS = (
    EXACT,
    "uniform(keep=0.25)",
    "keydiff(keep=0.25)",
    "snapkv(keep=0.25)",
    "h2o(keep=0.25)",
    "balancekv(keep=0.25)",
    "saap",
)


def new_cache(model, config: MethodConfig | None) -> Cache:
    """An empty cache, stock's for None; the model is prepared for it."""
    kvsketch.detach(model)
    return DynamicCache(config=model.config) if config is None else kvsketch.make_cache(model, config)


@torch.inference_mode()
def main(lengths: list[int], rounds: int, ways: list[str], layers: int, hidden: int, mlp: int | None) -> None:
    model = random_llama(
        layers=layers, heads=HEADS, kv_heads=KV_HEADS, head_dim=WIDTH, hidden=hidden, mlp=mlp, dtype=torch.bfloat16
    )
    about = shape_of(model.config) | {"hidden": hidden, "mlp": model.config.intermediate_size, "rounds": rounds}
    with made_up(KV_HEADS, WIDTH, range(layers), INDEX, describe_model(model)) as ready:
        configs = {STOCK: None} | {way: ready(parse_spec(way)) for way in (EXACT, *ways)}  # an index is read once
        for tokens in lengths:
            ids = prompt(tokens)
            read = partial(model, ids, logits_to_keep=1)
            expected, found = (read(past_key_values=new_cache(model, configs[way])).logits for way in (STOCK, EXACT))
            error = float((found - expected).norm() / expected.norm())
            assert error < TOLERANCE, f"exact answers differ from stock by {error:.3f}: no times are printed"
            times: dict[str, list[float]] = {way: [] for way in (STOCK, *ways)}
            for number in range(rounds + 1):
                for way, taken in times.items():
                    cache = new_cache(model, configs[way])
                    spent = seconds(partial(read, past_key_values=cache))
                    if number:  # the first round warms up
                        taken.append(spent)
            for way, taken in times.items():
                row = {"tokens": tokens, "method": way, "seconds": median(taken)}
                row |= beside_stock(times[STOCK], taken) | {"threads": torch.get_num_threads()}
                write_row("prompts", about | row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="256,512,1024", help="lengths of prompts, separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--methods", default="; ".join(WAYS), help="specs, separated by semicolons")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--mlp", type=int, help="width inside the MLP of a block; twice --hidden if left out")
    given = parser.parse_args()
    specs = [spec.strip() for spec in given.methods.split(";")]
    main([int(n) for n in given.tokens.split(",")], given.rounds, specs, given.layers, given.hidden, given.mlp)
