"""How scripts of this folder run benchmarks of answers and publish their means."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from common import RESULTS, published
from kvsketch.evaluation.answers.summary import Mean, summarise
from kvsketch.evaluation.results.rows import read_rows

FIGURES = RESULTS.parent / "figures"
PLANNED: list[tuple[Path, list[str]]] | None = None  # if a list, benchmarks are only noted in it: see `at_once.py`


def bench(suite: str, out: Path, *options: object) -> None:
    if PLANNED is not None:
        PLANNED.append((Path(out), [suite, *map(str, options)]))
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "rows.jsonl").touch()
        return
    command = [sys.executable, "-m", "kvsketch", "bench", suite, "--out", out, *options]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


def sum_up_into(summary: Path, out: Path) -> list[Mean]:
    """Write the means, together with those of an earlier summary."""
    runs, rows = read_rows(out / "rows.jsonl")
    if not rows:
        raise SystemExit(f"there are no rows in {out / 'rows.jsonl'}: nothing to sum up")
    runs, means = add_to_earlier(summary, runs, summarise(rows))
    write_means(summary, runs, means)
    return means


def write_means(summary: Path, runs: list[dict], means: list[Mean]) -> None:
    """Write one line about the runs that the means come from, and one line for each mean."""
    if PLANNED is not None:
        return
    lines = [{"runs": published(runs)}, *(asdict(mean) for mean in means)]
    summary.write_text("".join(json.dumps(line) + "\n" for line in lines))


def add_to_earlier(summary: Path, runs: list[dict], means: list[Mean]) -> tuple[list[dict], list[Mean]]:
    """The existing summary with its cells replaced by these; a summary of another model is dropped."""
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
