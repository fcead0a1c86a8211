"""Kernels on a GPU, checked and then timed, in one run of less than ten minutes: `python benchmarks/gpu.py OUT`.

First every kernel is compared with its definition in float64; one that fails is not timed, and the run ends with an
error. Then, for a layer of 8 KV heads × 128 in bfloat16 with four query heads each: a decode step that reads all tokens
beside torch's own forms; a step that reads 32 of 1,024 buckets, of equal and of very unequal sizes; BalanceKV's halving
of all blocks; and for prompts, a chunk of queries against weighted tokens, and new tokens among themselves. Each is
timed with launches by Python and as a CUDA graph, beside a copy of memory in the same run; steps run over eight copies
in turn, so that nothing is in a cache. Timed calls are compared with the definition too, once. Last come whole models,
with steps launched by Python and recorded. Rows go to OUT/gpu.jsonl. `--dry` goes through all of it on the CPU with few
tokens, under Triton's interpreter; its times mean nothing.

`--compile` does what can be done without a GPU: it compiles for compute capability 9.0, and prints how many registers
and how much shared memory each kernel needs, and whether anything is spilled.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch

from gpu_choosing import centred, check_walk, choosing, halved
from gpu_compiled import compiled
from gpu_decode import decoding
from gpu_fit import fitting
from gpu_large import large
from gpu_look_up import looked_up
from gpu_machine import Machine
from gpu_prompts import prompts
from gpu_steps import check_attention, dense, unequal
from kvsketch.evaluation.results.provenance import provenance
from kvsketch.kernels.gpu import attention

FULL = {
    "tokens": (32_768, 131_072, 171_000, 500_000),
    "saap": (171_000, 1024, 32),
    "halved": 131_072,
    "centred": (131_072, 1024),
    "prompt": (1024, 131_072, 16_384),
    "model": (32_768, 192),
    "large": (16_384, 131_072, 160),
    "fitted": 16_384,
    "rounds": 100,
}
DRY = {
    "tokens": (130,),
    "saap": (300, 16, 2),
    "halved": 64,
    "centred": (500, 20),
    "prompt": (20, 100, 40),
    "model": (300, 6),
    "large": (60, 90, 8),
    "fitted": 120,
    "rounds": 2,
}


def of_a_copy(on: Machine) -> dict[str, Any]:
    """Time of a copy of memory: other speeds are given as shares of its speed."""
    count = 1 << (28 if on.device.type == "cuda" else 16)
    there = [torch.zeros(count, device=on.device, dtype=torch.bfloat16) for _ in range(2)]
    return {"what": "copy", "bytes": 4 * count, "us": on.times([partial(there[0].copy_, there[1])])}


@torch.no_grad()
def run(out: Path, dry: bool, only: Sequence[str] = ()) -> None:
    sizes = DRY if dry else FULL
    on = Machine(dry, sizes["rounds"])
    assert attention.runs_on(on.device), "kernels in Triton do not run here: the line above says why"
    out.mkdir(parents=True, exist_ok=True)
    copy = of_a_copy(on)
    best = copy["bytes"] / min(one["median"] for one in copy["us"].values())
    about = provenance() | {"device": torch.cuda.get_device_name() if not dry else "interpreter"}
    failed = list[str]()
    with open(out / "gpu.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(copy | {"provenance": about}) + "\n")
        print(line_of(copy, best), flush=True)
        for name, rows in sections(on, sizes).items():
            if only and name not in only:
                continue
            try:
                for row in rows:
                    file.write(json.dumps(row | {"provenance": about}) + "\n")
                    file.flush()
                    print(line_of(row, best), flush=True)
            except Exception as error:  # a section that fails is not timed; those after it are
                traceback.print_exc()
                failed.append(f"{name}: {' '.join(str(error).split())[:200]}")
            torch.cuda.empty_cache()
    if failed:
        sys.exit("\n".join(["not timed to the end:", *failed]))


def sections(on: Machine, sizes: dict[str, Any]) -> dict[str, Iterator[dict[str, Any]]]:
    """Sections by name, each checked and then timed as a whole."""
    steps = (row for count in sizes["tokens"] for row in chain(dense(on, count), unequal(on, count)))
    return {
        "attention": behind(check_attention, on, steps),
        "look-up": looked_up(on, *sizes["saap"]),
        "halving": behind(check_walk, on, halved(on, sizes["halved"])),
        "k-center": centred(on, *sizes["centred"]),
        "choosing": choosing(on, sizes["prompt"][2]),
        "prompts": prompts(on, *sizes["prompt"]),
        "models": decoding(on, *sizes["model"]),
        "large model": large(on, *sizes["large"]),
        "fitting": fitting(on, sizes["fitted"]),
    }


def behind(check: Callable[[Machine], None], on: Machine, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows after a check, if it passes."""
    check(on)
    yield from rows


def line_of(row: dict[str, Any], best: float) -> str:
    """A row for the screen: microseconds, and the speed as a share of a copy's."""
    shown = [f"{row['what']:10} {row.get('form', ''):16} {row.get('tokens', 0):8,}"]
    for name, taken in row["us"].items():
        if isinstance(taken, str):
            shown.append(f"{name}: {taken}")
            continue
        share = f" ({row['bytes'] / taken['median'] / best:.2f} of a copy)" if "bytes" in row else ""
        share += f" ({row['products'] / taken['median'] / 1e6:.0f} TFLOP/s)" if "products" in row else ""
        share += f" (mean {taken['mean']:.1f})" if "mean" in taken else ""
        shown.append(f"{name} {taken['median']:10.1f} µs{share}")
    return "  ".join(shown)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path("gpu-report"))
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", default="", help="sections, separated by commas: attention, look-up, halving, …")
    given = parser.parse_args()
    if given.compile:
        for line in compiled():
            print(line, flush=True)
    else:
        run(given.out, given.dry, tuple(filter(None, given.only.split(","))))
