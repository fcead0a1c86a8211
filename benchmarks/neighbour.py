"""Decode steps while other processes compute too: `python benchmarks/neighbour.py`.

One layer of 8 KV heads × 128 in bfloat16, four query heads each, after 171,000 tokens: steps of `exact` and of `saap`
with all threads and with one, and the same while `--busy` other processes compute. A row for each goes to
docs/results/neighbour.jsonl; `--label` names the version, so that it can be compared with another one.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from common import seconds, write_row
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.exact import Exact
from kvsketch.caches.lookup.saap import Saap
from kvsketch.evaluation.speed.layer import filled
from kvsketch.evaluation.speed.made import NUMBER, keys_and_values, made_up, new_token

WIDTH, HEADS, GROUP, INDEX = 128, 8, 4, (1024, 1024)
WARM = 20


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Let so many other processes compute meanwhile."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@torch.no_grad()
def times(cache: LayerCache, steps: int, threads: int) -> list[float]:
    """Seconds of steps that follow one another."""
    torch.set_num_threads(threads)
    taken = []
    for step in range(WARM + steps):
        query, new = new_token(HEADS, GROUP, WIDTH, torch.bfloat16, step)
        taken.append(seconds(partial(cache.read, query, new, WIDTH**-0.5, lse=False)))
    return taken[WARM:]


def measure(tokens: int, steps: int, threads: int, others: int, label: str) -> None:
    torch.set_num_threads(threads)
    keys, values = keys_and_values(HEADS, tokens, WIDTH, torch.bfloat16, seed=2)
    with made_up(HEADS, WIDTH, [NUMBER], INDEX) as ready:
        caches = {config.name: filled(ready(config), keys, values) for config in (Saap(), Exact())}
    for beside in (0, others):
        for used in (threads, 1):
            for name, cache in caches.items():
                with busy(beside):
                    found = times(cache, steps, used)
                hundredths = statistics.quantiles(found, n=100)
                row = {"kind": "beside busy processes", "version": label, "method": name, "tokens": tokens}
                row |= {"threads": used, "busy": beside, "steps": steps, "seconds": statistics.median(found)}
                row |= {"mean": statistics.fmean(found), "p98": hundredths[97], "p99": hundredths[98]}
                write_row("neighbour", row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=171_000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", type=int, default=1)
    parser.add_argument("--label", default="now")
    given = parser.parse_args()
    measure(given.tokens, given.steps, given.threads, given.busy, given.label)
