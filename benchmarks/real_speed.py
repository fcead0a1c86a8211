"""Prompt and decode speed on smollm2 beside stock transformers, in turns: `python benchmarks/real_speed.py TEXT`.

Every way reads the first tokens of TEXT again and again; then each decodes the same tokens after its prompt, one step
each in turn, so that a busy moment hits all. Beside the median over turns stands what all steps took together, as a
median does not show what is done only every so often. A wrong answer of `exact` ends the run before a time is printed.
With `--reread` only the second reading, which `kvzip` needs, is timed, beside the first. Writes
docs/results/real-speed.jsonl.
"""

import argparse
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache, PreTrainedModel

import kvsketch
from common import beside_stock, seconds, write_row
from kvsketch.checkpoints import smollm2_folder

METHODS = (
    "exact",
    "streaming_llm(keep=0.25)",
    "uniform(keep=0.25)",
    "clustergen(keep=0.25)",
    "balancekv(keep=0.25)",
    "keydiff(keep=0.25, heads='profile')",
    "kvzip(keep=0.25)",
)

READ, READ_AGAIN = "exact", "exact(noting='second reading')"


def new_cache(model, way: str) -> Cache:
    """An empty cache; the model is prepared for it."""
    if way == "stock":
        kvsketch.detach(model)
        return DynamicCache(config=model.config)
    return kvsketch.make_cache(model, way)


def read(model, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    """The logits after the prompt."""
    return model(ids, past_key_values=cache, logits_to_keep=1).logits


def prompts(model, ids: torch.Tensor, ways: list[str], repeats: int) -> tuple[dict[str, list[float]], dict[str, Cache]]:
    """Seconds of every way's readings, and the caches of the last one."""
    expected = read(model, ids, new_cache(model, "stock"))  # also warms up
    wrong = (read(model, ids, new_cache(model, "exact")) - expected).norm() / expected.norm()
    assert wrong < 0.05, f"exact answers differ from stock by {wrong:.3f}: no times are printed"
    times: dict[str, list[float]] = {way: [] for way in ways}
    caches: dict[str, Cache] = {}
    for _ in range(repeats):
        for way in ways:
            caches[way] = new_cache(model, way)
            times[way].append(seconds(lambda way=way: read(model, ids, caches[way])))
    return times, caches


def steps(model, tokens: torch.Tensor, caches: dict[str, Cache]) -> dict[str, list[float]]:
    """Seconds of every cache's steps; the first two of each are not counted."""
    times: dict[str, list[float]] = {way: [] for way in caches}
    for token in tokens.view(-1, 1, 1):
        for way, cache in caches.items():
            kvsketch.detach(model)  # this is not timed
            if way != "stock":
                kvsketch.attach(model, before_rotation=way.startswith("saap"))
            times[way].append(seconds(lambda token=token, cache=cache: model(token, past_key_values=cache)))
    return {way: taken[2:] for way, taken in times.items()}


def said(part: str, times: dict[str, list[float]], tokens: int) -> list[dict]:
    """A row for each way: tokens a second, and multiples of stock's speed, as median over turns and over all turns."""
    rows = []
    for way, taken in times.items():
        row = {"part": part, "method": way, "tokens_per_second": tokens / median(taken)}
        rows.append(row | beside_stock(times["stock"], taken) | {"turns": len(taken)})
    return rows


def loaded(text: str, least: int, dtype: str) -> tuple[PreTrainedModel, torch.Tensor]:
    """The model, and the tokens of a text: at least `least` of them."""
    folder = smollm2_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ids = AutoTokenizer.from_pretrained(folder)(Path(text).read_text(), return_tensors="pt").input_ids
    assert ids.shape[1] >= least, f"{text} has {ids.shape[1]} tokens; give a longer text"
    return model, ids


@torch.inference_mode()
def reread(text: str, count: int, dtype: str, repeats: int) -> None:
    """Write how long the second reading takes, in multiples of the first."""
    model, ids = loaded(text, count, dtype)
    times, _ = prompts(model, ids[:, :count], [READ, READ_AGAIN], repeats)
    alone = [both / first - 1 for first, both in zip(times[READ], times[READ_AGAIN], strict=True)]
    row = {"part": "second reading", "n": count, "model": "smollm2", "dtype": dtype, "text": Path(text).name}
    row |= {"seconds": median(times[READ]), "times_first": median(alone), "range": [min(alone), max(alone)]}
    write_row("real-speed", row | {"turns": repeats})


@torch.inference_mode()
def main(text: str, count: int, dtype: str, index: str | None, repeats: int, decoded: int) -> None:
    model, ids = loaded(text, count + decoded + 2, dtype)
    ways = ["stock", *METHODS] + ([f"saap(index={index!r}, estimate=True, prefer='density')"] if index else [])
    times, caches = prompts(model, ids[:, :count], ways, repeats)
    about = {"n": count, "model": "smollm2", "dtype": dtype, "text": Path(text).name}
    rows = said("prompt", times, count)
    rows += said("step", steps(model, ids[0, count : count + decoded + 2], caches), 1)
    for row in rows:
        cache = caches[row["method"]]
        stock = sum(layer.keys.nbytes + layer.values.nbytes for layer in caches["stock"].layers)
        nbytes = stock if row["method"] == "stock" else cache.nbytes
        row["method"] = row["method"].replace(f"index={index!r}, ", "")
        write_row("real-speed", about | row | {"cache_bytes": nbytes, "of_full": nbytes / stock})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--index", help="a fitted index of smollm2, for saap")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--reread", action="store_true", help="time the second reading instead")
    given = parser.parse_args()
    for dtype in given.dtype:
        if given.reread:
            reread(given.text, given.tokens, dtype, given.repeats)
        else:
            main(given.text, given.tokens, dtype, given.index, given.repeats, given.steps)
