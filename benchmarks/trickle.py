"""Texts fed a few tokens at a time: each method's error beside that of `uniform` with the same budget.

`python benchmarks/trickle.py [--calls 32] [--keeps 0.25,0.125,512] [--texts lines/0,niah_single/0] [--methods ...]`.
Keys, values and queries of the embedded model; at some places of a text the next 64 tokens ask. Errors are those of
all heads of a layer over the seeds; ratios are geometric means over texts, places and heads. One thread.
"""

import argparse
import math
import time
from collections.abc import Sequence
from statistics import fmean

import torch

from kvsketch.attention import WeightedTokens, merge
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens
from kvsketch.caches.registry import parse_spec
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.evaluation.tasks import TASKS, Setting
from kvsketch.evaluation.tasks.length import Fitter
from kvsketch.huggingface.capture import Captured, capture
from kvsketch.kernels.weighted_attention import causal_attention, weighted_attention

QUERIES = 64
SEEDED = ("uniform", "balancekv", "subgen")
NOTHING = 1e-6  # squared relative error below which there is nothing to compare


def texts(names: Sequence[str], length: int) -> dict[str, list[Captured]]:
    """What the layers see of each text, in float32."""
    model, tokenizer = load_embedded(torch.float32)
    found = {}
    for name in names:
        task, seed = name.split("/")

        def count(made) -> int:
            return len(tokenizer(made.context + made.questions[0].prompt)["input_ids"])

        sample = Fitter(TASKS[task], Setting(size=1, wording="compact"), count).sample(length, f"trickle/{seed}")
        ids = tokenizer(sample.context + sample.questions[0].prompt, return_tensors="pt")["input_ids"]
        found[name] = capture(model, ids)
    return found


def places(seen: Captured, length: int) -> list[int]:
    """Numbers of tokens that are held when the next ones ask: halfway, at three quarters and near the end."""
    last = seen.keys.shape[1] - QUERIES
    return [length // 2 // 32 * 32, length * 3 // 4 // 32 * 32, last]


def wrong(cache: LayerCache, seen: Captured, held: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared errors and squared norms of the answers of the next tokens, for each query head."""
    part = slice(held, held + QUERIES)
    query, keys, values = (x[None, :, part] for x in (seen.queries, seen.keys, seen.values))
    among = causal_attention(query, keys, values, seen.scale, valid=None, softcap=None, lse=True)
    before = WeightedTokens(seen.keys[None, :, :held], seen.values[None, :, :held], None)
    exact = merge(weighted_attention(query, before, seen.scale, softcap=None), among).out[0]
    got = merge(cache.attend(query, seen.scale), among).out[0]
    return (got - exact).square().sum((1, 2)), exact.square().sum((1, 2))


def measure(spec: str, seen: Captured, call: int | None, asked: Sequence[int]):
    """Errors at each place, bytes at the last one, seconds to write."""
    errors, nbytes, seconds = [], 0, 0.0
    cache, start = LayerCache(parse_spec(spec), seen.layer), 0
    for held in asked:
        if call is None:
            cache, start = LayerCache(parse_spec(spec), seen.layer), 0
        began = time.perf_counter()
        while start < held:
            stop = min(start + (call or held), held)
            cache.hold(NewTokens(seen.keys[None, :, start:stop], seen.values[None, :, start:stop]))
            start = stop
        seconds += time.perf_counter() - began
        errors.append(wrong(cache, seen, held))
        nbytes = cache.nbytes
    return errors, nbytes, seconds


def errors_of(method: str, keep: str, seen: Captured, call: int | None, asked: Sequence[int], seeds: int):
    """Mean squared relative errors [places, heads] over seeds; of all heads [places]; bytes; seconds."""
    seeded = method.split("(")[0] in SEEDED
    heads, whole, size, seconds = [], [], 0, 0.0
    for seed in range(seeds if seeded else 1):
        options = [f"keep={keep}"] + ([f"seed={seed}"] if seeded else [])
        name, _, more = method.rstrip(")").partition("(")
        options += [more] if more else []
        found, size, took = measure(f"{name}({', '.join(options)})", seen, call, asked)
        heads.append(torch.stack([bad / norm + NOTHING for bad, norm in found]))
        whole.append(torch.stack([bad.sum() / norm.sum() + NOTHING for bad, norm in found]))
        seconds += took
    return torch.stack(heads).mean(0), torch.stack(whole).mean(0), size, seconds / len(heads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", default="32")
    parser.add_argument("--keeps", default="0.25,0.125,512")
    parser.add_argument("--texts", default="lines/0,niah_single/0")
    parser.add_argument("--methods", default="clustergen;balancekv;subgen")
    parser.add_argument("--length", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    calls = [None if call == "all" else int(call) for call in given.calls.split(",")]
    read = texts(given.texts.split(","), given.length)
    print(
        "| method | keep | call | bytes | heads | all heads | layer 0 | 1 | 2 | 3 | worst text | s | uniform's error |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for keep in given.keeps.split(","):
        for call in calls:
            plain = {}
            for method in ("uniform", *given.methods.split(";")):
                ratios, whole, sizes, seconds, by_text = {}, {}, [], 0.0, {}
                for text, layers in read.items():
                    for seen in layers:
                        asked = places(seen, given.length)
                        # what a uniform sample holds does not depend on the calls
                        one = call if method != "uniform" else None
                        heads, together, size, took = errors_of(method, keep, seen, one, asked, given.seeds)
                        at = text, seen.layer
                        if method == "uniform":
                            plain[at] = heads, together, size
                            continue
                        known, of_all, its = plain[at]
                        ratio = 0.5 * (heads.log() - known.log())
                        ratios.setdefault(seen.layer, []).append(float(ratio.mean()))
                        by_text.setdefault(text, []).append(float(ratio.mean()))
                        whole.setdefault(seen.layer, []).append(float(0.5 * (together / of_all).log().mean()))
                        sizes.append(size / its)
                        seconds += took
                if method == "uniform":
                    continue
                of_layers = " | ".join(f"{math.exp(fmean(found)):.3f}" for found in ratios.values())
                mean = math.exp(fmean(x for found in ratios.values() for x in found))
                both = math.exp(fmean(x for found in whole.values() for x in found))
                worst = max(math.exp(fmean(found)) for found in by_text.values())
                error = fmean(float(one.sqrt().mean()) for _, one, _ in plain.values())
                print(
                    f"| {method} | {keep} | {call or 'one'} | {fmean(sizes):.2f} | {mean:.3f} | {both:.3f} "
                    f"| {of_layers} | {worst:.3f} | {seconds:.1f} | {error:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
