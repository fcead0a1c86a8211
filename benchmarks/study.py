"""BalanceKV's study of single layers, on the embedded model: `python benchmarks/study.py OUT`.

Runs `kvsketch bench error` on two tasks, with rows in OUT, where an interrupted run continues. Then writes means,
deviations, times and ratios to a weighted uniform sample to docs/results/error.jsonl, draws docs/figures/error-*.png
and prints tables. `--real TEXT ...` does the same for these texts and smollm2, with docs/results/error-smollm2.jsonl
and error-smollm2.png.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from asking import bench
from common import RESULTS, write_row
from figures import FIGURES
from kvsketch.evaluation.layers import pictures
from kvsketch.evaluation.layers.plan import KEY
from kvsketch.evaluation.layers.summary import compare, name_of, place_of, pool_norms, rate_name, summarise
from kvsketch.evaluation.results.panels import save
from kvsketch.evaluation.results.rows import Row, name_without_digest, read_rows

TASKS = ("lines", "niah_single")
PLAIN = "balancekv(sharpness=1, augmented=False)"  # as in the paper's experiments
METHODS = (
    PLAIN, "balancekv(augmented=False)", "balancekv(walk='fair', sharpness=1, augmented=False)", "balancekv",
    "balancekv(mode='faithful', block=256)", "uniform", "uniform(weights='none')", "streaming_llm", "clustergen",
    "subgen",
)  # fmt: skip
REAL, REAL_LAYERS, REAL_SEEDS = "smollm2", "0,3,8,14,20,25,29", 3
REAL_METHODS = (
    PLAIN, "balancekv(augmented=False, block=256)", "balancekv(block=256)",
    "balancekv(walk='fair', sharpness=1, augmented=False, block=256)", "uniform", "streaming_llm", "clustergen",
)  # fmt: skip
SHOWN = (
    PLAIN, "balancekv", "uniform", "uniform(weights='none')", "streaming_llm", "clustergen",
)  # fmt: skip


def sum_up(task: str, rows: Sequence[Row], norms: Sequence[Row], name: str = "error") -> None:
    """Write docs/results/NAME.jsonl: a row for each layer, method, block and rate, and one for each prompt's norms."""
    found = summarise(rows)
    ratios = {method: compare(rows, method, "uniform") for method in {row["method"] for row in rows}}
    for (layer, (method, block), rate), errors in found.items():
        here = [row for row in rows if place_of(row) == (layer, (method, block), rate)]
        row = {"task": task, "layer": layer, "method": method, "block": block, "rate": rate, "error": errors.mean}
        row |= {
            "deviation": errors.deviation,
            "seconds": errors.seconds,
            "entries": max(one["entries"] for one in here),
        }
        ratio = ratios[method].get((layer, (method, block), rate))
        write_row(name, row | ({} if ratio is None else {"over_uniform": vars(ratio)}))
    for prompt in dict.fromkeys(row["prompt"] for row in norms):
        of_prompt = [row for row in norms if row["prompt"] == prompt]
        pooled = {vectors: vars(norm) for vectors, norm in pool_norms(of_prompt).items()}
        row = {"task": task, "norms": pooled, "prompt": name_without_digest(prompt), "tokens": of_prompt[0]["tokens"]}
        write_row(name, row)


def print_tables(task: str, rows: Sequence[Row]) -> None:
    """Print errors and ratios in a table of methods and rates for every layer."""
    found = summarise(rows)
    rates = sorted({rate for _, _, rate in found}, reverse=True)
    for layer in sorted({layer for layer, _, _ in found}):
        print(f"\n{task}, layer {layer}\n\n| | {' | '.join(map(rate_name, rates))} |\n|---|{'---|' * len(rates)}")
        for curve in dict.fromkeys(curve for _, curve, _ in found):
            ratios = compare(rows, curve[0], "uniform")
            cells = []
            for rate in rates:
                ratio = ratios.get((layer, curve, rate))
                cells.append(f"{found[layer, curve, rate]}{'' if ratio is None else f' ({ratio})'}")
            print(f"| `{name_of(curve)}` | {' | '.join(cells)} |")


def read(folder: Path) -> tuple[list[Row], list[Row]]:
    """The rows of errors and those of norms."""
    norms = [json.loads(line) for line in (folder / "norms.jsonl").read_text().splitlines()]
    return read_rows(folder / "error.jsonl", KEY)[1], [row for row in norms if "run" not in row]


def main(out: Path) -> None:
    (RESULTS / "error.jsonl").unlink(missing_ok=True)
    for task in TASKS:
        folder = out / task
        bench("error", folder, "--task", task, "--tokens", 4000, "--methods", "; ".join(METHODS))
        rows, norms = read(folder)
        sum_up(task, rows, norms)
        save(pictures.errors_picture([row for row in rows if row["method"] in SHOWN]), FIGURES / f"error-{task}.png")
        balanced = [row for row in rows if row["method"] == PLAIN]
        save(pictures.blocks_picture(balanced), FIGURES / f"error-blocks-{task}.png")
        print_tables(task, rows)


def real(out: Path, texts: Sequence[Path]) -> None:
    (RESULTS / f"error-{REAL}.jsonl").unlink(missing_ok=True)
    files = [part for text in texts for part in ("--prompt-file", text)]
    options = ("--layers", REAL_LAYERS, "--seeds", REAL_SEEDS, "--methods", "; ".join(REAL_METHODS))
    bench("error", out / "error", REAL, *options, *files)
    rows, norms = read(out / "error")
    sum_up("texts", rows, norms, f"error-{REAL}")
    save(pictures.errors_picture([row for row in rows if row["method"] in SHOWN]), FIGURES / f"error-{REAL}.png")
    print_tables(REAL, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--real", type=Path, nargs="+", metavar="TEXT")
    given = parser.parse_args()
    main(given.out) if given.real is None else real(given.out, given.real)
