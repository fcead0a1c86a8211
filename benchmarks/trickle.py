"""Texts fed a few tokens at a time: each method's error beside that of `uniform` with the same budget.

`python benchmarks/trickle.py [--calls 32] [--keeps 0.25,0.125,512] [--texts lines/0,niah_single/0] [--methods ...]`.
Keys, values and queries are the embedded model's; at some places of a text the next 64 tokens ask. Errors are those of
all heads of a layer over the seeds; ratios are geometric means over texts, places and heads. One thread.
"""

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """How many tokens have been read when the next ones ask: halfway, at three quarters and near the end."""
    last = seen.keys.shape[1] - QUERIES
    return [length // 2 // 32 * 32, length * 3 // 4 // 32 * 32, last]


def wrong(cache: LayerCache, seen: Captured, held: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared errors and squared norms of the answers to the next tokens' queries, for each query head."""
    part = slice(held, held + QUERIES)
    query, keys, values = (x[None, :, part] for x in (seen.queries, seen.keys, seen.values))
    among = causal_attention(query, keys, values, seen.scale, valid=None, softcap=None, lse=True)
    before = WeightedTokens(seen.keys[None, :, :held], seen.values[None, :, :held], None)
    exact = merge(weighted_attention(query, before, seen.scale, softcap=None), among).out[0]
    got = merge(cache.attend(query, seen.scale), among).out[0]
    return (got - exact).square().sum((1, 2)), exact.square().sum((1, 2))


def measure(spec: str, seen: Captured, call: int | None, asked: Sequence[int]):
    """Errors at each place, bytes at the last one, and seconds to write."""
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


@dataclass
class Found:
    """Results for one layer: means over seeds."""

    heads: torch.Tensor  # squared relative errors [places, heads]
    whole: torch.Tensor  # the same of all heads together [places]
    nbytes: int
    seconds: float


def errors_of(method: str, keep: str, seen: Captured, call: int | None, asked: Sequence[int], seeds: int) -> Found:
    """Errors of a method at each place, with bytes and seconds."""
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
    return Found(torch.stack(heads).mean(0), torch.stack(whole).mean(0), size, seconds / len(heads))


@dataclass
class Beside:
    """One method beside `uniform`: logs of ratios of errors, ratios of bytes, and seconds."""

    by_layer: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    by_text: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    of_all_heads: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, text: str, layer: int, found: Found, plain: Found) -> None:
        """Add the results for a layer and a text."""
        ratio = float(0.5 * (found.heads.log() - plain.heads.log()).mean())
        self.by_layer[layer].append(ratio)
        self.by_text[text].append(ratio)
        self.of_all_heads.append(float(0.5 * (found.whole / plain.whole).log().mean()))
        self.sizes.append(found.nbytes / plain.nbytes)
        self.seconds += found.seconds

    def line(self) -> str:
        """Cells of the table: bytes, heads, all heads, each layer, the worst text, seconds."""
        layers = [geometric(found) for found in self.by_layer.values()]
        mean = geometric([x for found in self.by_layer.values() for x in found])
        worst = max(geometric(found) for found in self.by_text.values())
        figures = [mean, geometric(self.of_all_heads), *layers, worst]
        return " | ".join([f"{fmean(self.sizes):.2f}", *(f"{x:.3f}" for x in figures), f"{self.seconds:.1f}"])


def geometric(logs: Sequence[float]) -> float:
    return math.exp(fmean(logs))


def compare(read: dict[str, list[Captured]], methods: Sequence[str], keep: str, call: int | None, given) -> None:
    """Print a line of the table for each method."""
    every = [(text, seen, places(seen, given.length)) for text, layers in read.items() for seen in layers]
    if given.same_bytes:
        every = [(text, seen, asked[-1:]) for text, seen, asked in every]
    # a uniform sample is the same however many tokens come at a time
    plain = [errors_of("uniform", keep, seen, None, asked, given.seeds) for _, seen, asked in every]
    error = fmean(float(known.whole.sqrt().mean()) for known in plain)
    for method in methods:
        beside = Beside()
        for (text, seen, asked), known in zip(every, plain, strict=True):
            found = errors_of(method, keep, seen, call, asked, given.seeds)
            if given.same_bytes and "." in keep:
                share = f"{float(keep) * found.nbytes / known.nbytes:.5f}"
                known = errors_of("uniform", share, seen, None, asked, given.seeds)  # noqa: PLW2901
            beside.add(text, seen.layer, found, known)
        print(f"| {method} | {keep} | {call or 'one'} | {beside.line()} | {error:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", default="32")
    parser.add_argument("--keeps", default="0.25,0.125,512")
    parser.add_argument("--texts", default="lines/0,niah_single/0")
    parser.add_argument("--methods", default="clustergen;balancekv;subgen")
    parser.add_argument("--length", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--same-bytes", action="store_true", help="compare equal bytes, at the end of each text")
    given = parser.parse_args()
    torch.set_num_threads(1)
    read = texts(given.texts.split(","), given.length)
    layers = " | ".join(str(seen.layer) for seen in next(iter(read.values())))
    print(f"| method | keep | call | bytes | heads | all heads | {layers} | worst text | s | uniform's error |")
    print("|---" * (9 + len(layers.split(" | "))) + "|")
    for keep in given.keeps.split(","):
        for call in given.calls.split(","):
            compare(read, given.methods.split(";"), keep, None if call == "all" else int(call), given)


if __name__ == "__main__":
    main()
