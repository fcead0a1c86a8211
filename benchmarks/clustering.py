"""What clustering keeps of the embedded model's answers: `python benchmarks/clustering.py OUT`.

Needles in noise. Runs the benchmarks below, with their rows in OUT, where an interrupted run continues. Then writes
their means to docs/results/clustering.jsonl and prints the tables.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from asking import bench, sum_up_into
from common import RESULTS
from kvsketch.evaluation.answers.pictures import family
from kvsketch.evaluation.answers.summary import Mean

SUMMARY = RESULTS / "clustering.jsonl"
KEEPS = (0.5, 0.25, 0.125)
NEEDLES = {2000: (("niah_single", "niah_multikey"), 100), 4000: (("niah_single",), 50)}  # tasks and prompts per length


def methods_of_needles() -> list[str]:
    found = ["exact"]
    for keep in KEEPS:
        found += [f"streaming_llm(keep={keep})", f"uniform(keep={keep})", f"clustergen(keep={keep})"]
        found += [f"clustergen(keep={keep}, weights='none')", f"clustergen(keep={keep}, window=64)"]
        found.append(f"subgen(keep={keep})")
    return found


def run_needles(out: Path, length: int) -> None:
    tasks, samples = NEEDLES[length]
    options = ("--tasks", ",".join(tasks), "--lengths", length, "--samples", samples)
    options += ("--batch", 20, "--max-new-tokens", 32, "--methods", "; ".join(methods_of_needles()))
    bench("ruler", out, *options)


def print_tables(means: list[Mean]) -> None:
    """Print a table for each budget, methods down, for questions asked after compression."""
    needles = [(task, length, "after") for length, (tasks, _) in NEEDLES.items() for task in tasks]
    for keep in KEEPS:
        here = [mean for mean in means if f"keep={keep}" in mean.method or mean.method == "exact"]
        print(f"\n| keep={keep} | " + " | ".join(f"{task}, {length:,}" for task, length, _ in needles) + " |")
        print_cells(here, needles, family)


def print_cells(means: list[Mean], columns: list[tuple], name: Callable[[str], str]) -> None:
    print("|---|" + "---|" * len(columns))
    means = [mean for mean in means if mean.task in {task for task, _, _ in columns}]
    for row in dict.fromkeys(name(mean.method) for mean in means):
        found = {(m.task, m.length, m.asked): m for m in means if name(m.method) == row}
        found |= {(m.task, None, m.asked): m for m in means if name(m.method) == row}
        cells = [found.get(column) for column in columns]
        if any(cells):
            print(f"| `{row}` | " + " | ".join(str(cell or "") for cell in cells) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", help="needles-2000 or needles-4000: run this benchmark alone; none: print tables")
    given = parser.parse_args()
    for length in NEEDLES:
        if given.only in (None, f"needles-{length}"):
            run_needles(given.out, length)
    if given.only in (None, "none"):
        print_tables(sum_up_into(SUMMARY, given.out))
