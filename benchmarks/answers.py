"""What methods do to the embedded model's answers: `python benchmarks/answers.py OUT [--longeval FOLDER]`.

Runs the benchmarks below into OUT, where an interrupted run goes on; then puts their means into
docs/results/answers.jsonl, draws docs/figures/answers-*.png and prints the tables. LongEval's own files are run too if
their folder is named.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from common import RESULTS, published
from kvsketch.cli.options import REPLY
from kvsketch.evaluation.answers.pictures import draw_needles, draw_scores
from kvsketch.evaluation.answers.summary import Mean, summarise
from kvsketch.evaluation.results.rows import read_rows

FIGURES = RESULTS.parent / "figures"
SUMMARY = RESULTS / "answers.jsonl"
KEEPS = (0.5, 0.25, 0.125)
METHODS = ["exact", *(f"{name}(keep={keep})" for name in ("streaming_llm", "uniform") for keep in KEEPS)]
LOOKED_UP = {
    "lines": ["lines"],
    "infinite": ["passkey", "kv"],
    "ruler": ["niah_single", "niah_multikey", "niah_multiquery"],
}
OTHERS = {
    "infinite": ["number_string", "math_find"],
    "ruler": ["niah_multikey_dense", "niah_multivalue", "vt", "cwe", "fwe"],
}
LENGTHS = (1000, 2000, 4000)
PLANNED: list[tuple[Path, list[str]]] | None = None  # where benchmarks are only to be noted: see `at_once.py`


def bench(suite: str, out: Path, *options: object) -> None:
    if PLANNED is not None:
        PLANNED.append((Path(out), [suite, *map(str, options)]))
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "rows.jsonl").touch()
        return
    command = [sys.executable, "-m", "kvsketch", "bench", suite, "--out", out, *options]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


def run(out: Path, longeval: Path | None) -> None:
    every = ("--methods", "; ".join(METHODS), "--batch", 25)
    short = ("--max-new-tokens", REPLY)  # a model that found nothing would go on to 128
    exact = ("--methods", "exact", "--asked", "before")
    for file in [] if longeval is None else sorted(longeval.glob("*_lines.jsonl*")):
        bench("lines", out, "--cases", file, *every)
    for length in LENGTHS:
        for suite, tasks in LOOKED_UP.items():
            options = (*every, *short) if suite == "ruler" else every
            bench(suite, out, "--tasks", ",".join(tasks), "--lengths", length, *options)
    depths = ",".join(f"{i / 8}" for i in range(9))
    few = ("--methods", "exact; streaming_llm(keep=0.25); uniform(keep=0.25)", "--asked", "after", "--samples", 8)
    bench("needle", out, *few, "--depths", depths, "--lengths", "500,1000,2000,4000")
    for suite, tasks in OTHERS.items():
        bench(suite, out, "--tasks", ",".join(tasks), *exact, "--samples", 100, "--lengths", "1000,2000,4000")
    for suite, tasks in LOOKED_UP.items():
        options = (*exact, *(short if suite == "ruler" else ()), "--samples", 50, "--lengths", 8000, "--batch", 5)
        bench(suite, out, "--tasks", ",".join(tasks), *options)


def sum_up(out: Path) -> None:
    means = sum_up_into(SUMMARY, out, "answers", [name for tasks in LOOKED_UP.values() for name in tasks])
    print_exact([mean for mean in means if mean.method == "exact" and mean.asked == "before" and mean.task != "needle"])
    methods = list(dict.fromkeys(mean.method for mean in means))
    for asked in ("before", "after"):
        tasks = {mean.task for mean in means if mean.method != "exact"} - {"needle"}
        print_table([mean for mean in means if mean.asked == asked and mean.task in tasks], methods)


def sum_up_into(summary: Path, out: Path, name: str, compared: list[str]) -> list[Mean]:
    """Write the means, and what an earlier summary has beside them; draw those of the tasks that are compared."""
    runs, rows = read_rows(out / "rows.jsonl")
    if not rows:
        raise SystemExit(f"there are no rows in {out / 'rows.jsonl'}: nothing to sum up")
    runs, means = add_to_earlier(summary, runs, summarise(rows))
    write_means(summary, runs, means)
    shown = [mean for mean in means if mean.task in compared and mean.length <= max(LENGTHS)]
    for picture in [*draw_scores(shown, out), *draw_needles(rows, out)]:
        picture.path.rename(FIGURES / f"{name}-{picture.path.name}")
    return means


def write_means(summary: Path, runs: list[dict], means: list[Mean]) -> None:
    """A line on the runs that they come from, and a line for each."""
    if PLANNED is not None:
        return
    lines = [{"runs": published(runs)}, *(asdict(mean) for mean in means)]
    summary.write_text("".join(json.dumps(line) + "\n" for line in lines))


def add_to_earlier(summary: Path, runs: list[dict], means: list[Mean]) -> tuple[list[dict], list[Mean]]:
    """The summary there is, with these cells in place of its own; that of another model is dropped."""
    if not summary.exists():
        return runs, means
    head, *lines = summary.read_text().splitlines()
    earlier = json.loads(head)["runs"]
    if {run["fingerprint"] for run in earlier} != {run["fingerprint"] for run in runs}:
        return runs, means
    cells = {_cell(mean): mean for mean in [*(Mean(**json.loads(line)) for line in lines), *means]}
    return [*earlier, *(run for run in runs if run not in earlier)], list(cells.values())


def _cell(mean: Mean) -> tuple[str, str, int, str]:
    return mean.task, mean.asked, mean.length, mean.method


def print_exact(means: list[Mean]) -> None:
    """The model's own accuracy: tasks down, lengths across."""
    ready = [mean for mean in means if ":" in mean.task]
    made = [mean for mean in means if ":" not in mean.task]
    lengths = sorted({mean.length for mean in made})
    print("| task |", " | ".join(f"{length:,} tokens" for length in lengths), "|")
    print("|---|" + "---|" * len(lengths))
    for task in dict.fromkeys(mean.task for mean in made):
        by_length = {mean.length: mean for mean in made if mean.task == task}
        cells = [f"{by_length[n]} ({by_length[n].count})" if n in by_length else "" for n in lengths]
        print(f"| {task} |", " | ".join(cells), "|")
    for mean in ready:
        print(f"\n{mean.task}: {mean} ({mean.count} cases, up to {mean.length:,} tokens)")


def print_table(means: list[Mean], methods: list[str]) -> None:
    """Methods compared: tasks and lengths down, methods across."""
    print("\n| task | tokens | n |", " | ".join(f"`{method}`" for method in methods), "|")
    print("|---|---|---|" + "---|" * len(methods))
    order = list(dict.fromkeys(mean.task for mean in means))
    by_cell = {(mean.task, mean.length, mean.method): mean for mean in means}
    for task, length in sorted({cell[:2] for cell in by_cell}, key=lambda cell: (order.index(cell[0]), cell[1])):
        cells = [by_cell.get((task, length, method)) for method in methods]
        if sum(cell is not None for cell in cells) > 1:
            first = next(cell for cell in cells if cell)
            print(
                f"| {task} | {first.tokens:,.0f} | {first.count} |", " | ".join(str(cell or "") for cell in cells), "|"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--longeval", type=Path)
    parser.add_argument("--only-sum-up", action="store_true")
    given = parser.parse_args()
    if not given.only_sum_up:
        run(given.out, given.longeval)
    sum_up(given.out)
