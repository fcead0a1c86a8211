"""What all benchmarks share: a model, rows with their provenance, and the memory of this process."""

import json
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from kvsketch.evaluation.results.provenance import provenance
from kvsketch.evaluation.results.rows import LEARNT
from kvsketch.evaluation.speed.made import random_llama

__all__ = [
    "RESULTS",
    "PeakMemory",
    "beside_stock",
    "prompt",
    "published",
    "random_llama",
    "resident_bytes",
    "seconds",
    "shape_of",
    "write_row",
]
FOLDERS = re.compile(r"(?<![\w.~-])/(?:[\w.-]+/)*(?=[\w.-])")  # the folders in front of a file's name
RESULTS = Path(__file__).parent.parent / "docs" / "results"


def shape_of(config) -> dict[str, Any]:
    """The part of a row that describes what was run."""
    return {
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "dtype": "bfloat16",
        "device": "cpu",
    }


def published(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs that rows come from, each once, fit to be published: file names without their folders."""
    told = [dict(run) for run in runs]
    for run in told:
        if "command" in run:
            run["command"] = FOLDERS.sub("", run["command"])
        if LEARNT in run:  # specs contain file names too
            run[LEARNT] = {FOLDERS.sub("", spec): learnt for spec, learnt in run[LEARNT].items()}
    return [run for number, run in enumerate(told) if run not in told[:number]]


def prompt(count: int) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(1, 1000, (1, count), generator=torch.Generator().manual_seed(1))


def write_row(name: str, row: dict[str, Any]) -> None:
    """Append a row to docs/results/{name}.jsonl, with its provenance, and print it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    row = row | {"provenance": provenance()}
    with open(RESULTS / f"{name}.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps({key: value for key, value in row.items() if key != "provenance"}))


def resident_bytes() -> int:
    """Bytes of this process that are in RAM now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """The peak of resident memory within a `with` block, beyond the memory before it."""

    def __enter__(self) -> "PeakMemory":
        self.before = self.peak = resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self.peak = max(self.peak, resident_bytes())

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, resident_bytes())

    @property
    def growth(self) -> int:
        return self.peak - self.before


def beside_stock(stock: Sequence[float], own: Sequence[float]) -> dict[str, Any]:
    """The speed in multiples of stock's: the median over turns with its quartiles, and that of all turns together."""
    low, middle, high = quantiles([base / mine for base, mine in zip(stock, own, strict=True)], n=4)
    return {"times_stock": middle, "times_stock_in_all": sum(stock) / sum(own), "quartiles": [low, high]}


def seconds(function) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
