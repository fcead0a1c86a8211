"""What clustering keeps of the embedded model's answers: `python benchmarks/clustering.py OUT --longeval FOLDER`.

SubGen's Table 1 on LongEval's own files, at the paper's shares of the cache, and needles in noise. Runs the benchmarks
below into OUT, where an interrupted run goes on; then puts their means into docs/results/clustering.jsonl, draws
docs/figures/clustering-*.png and prints the tables.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from answers import bench, sum_up_into
from common import RESULTS
from kvsketch.evaluation.answers.pictures import family
from kvsketch.evaluation.answers.summary import Mean

SUMMARY = RESULTS / "clustering.jsonl"
# The paper's r + k tokens of n, and the r it tried (notes on its Table 1 in docs/papers.md); n as longchat counts.
PAPER = {"200": (4815, 3072, (2048,)), "300": (7143, 4096, (2048, 3072)), "400": (9447, 4608, (2048, 3072))}
OURS = {"200": 2440, "300": 3630, "400": 4760}  # tokens of a prompt in the embedded model's tokenizer
KEEPS = (0.5, 0.25, 0.125)
NEEDLES = {2000: (("niah_single", "niah_multikey"), 100), 4000: (("niah_single",), 50)}  # tasks and prompts of a length


def methods_of_table(lines: str) -> list[str]:
    theirs, total, recents = PAPER[lines]
    scale = OURS[lines] / theirs
    keep = round(total * scale)
    found = ["exact", f"streaming_llm(keep={keep})"]
    for recent in recents:
        window = round(recent * scale)
        found += [f"uniform(keep={keep}, window={window})", f"clustergen(keep={keep}, window={window})"]
        found.append(f"clustergen(keep={keep}, window={window}, weights='none')")
    return [*found, f"subgen(keep={keep}, window={round(recents[0] * scale)})"]


def methods_of_needles() -> list[str]:
    found = ["exact"]
    for keep in KEEPS:
        found += [f"streaming_llm(keep={keep})", f"uniform(keep={keep})", f"clustergen(keep={keep})"]
        found += [f"clustergen(keep={keep}, weights='none')", f"clustergen(keep={keep}, window=64)"]
        found.append(f"subgen(keep={keep})")
    return found


def run_table(out: Path, folder: Path, lines: str) -> None:
    (file,) = folder.glob(f"{lines}_lines.jsonl*")
    bench("lines", out, "--cases", file, "--methods", "; ".join(methods_of_table(lines)), "--batch", 10)


def run_needles(out: Path, length: int) -> None:
    tasks, samples = NEEDLES[length]
    options = ("--tasks", ",".join(tasks), "--lengths", length, "--samples", samples)
    options += ("--batch", 20, "--max-new-tokens", 32, "--methods", "; ".join(methods_of_needles()))
    bench("ruler", out, *options)


def print_tables(means: list[Mean]) -> None:
    """Methods down. LongEval's files with both question modes across; needles: the question asked afterwards."""
    files = list(dict.fromkeys(mean.task for mean in means if mean.task not in NEEDLES[2000][0]))
    columns = [(task, None, asked) for task in files for asked in ("before", "after")]
    print("\n| | " + " | ".join(f"{task.removeprefix('lines: ')}, {asked}" for task, _, asked in columns) + " |")
    print_cells(means, columns, _role)
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


def _role(method: str) -> str:
    """The method with r of the paper in place of our tokens, and without the total, which is given by the file."""
    r = {round(recent * OURS[lines] / n): recent for lines, (n, _, recents) in PAPER.items() for recent in recents}
    spec = re.sub(r"keep=\d+(, )?", "", method).replace("()", "")
    return re.sub(r"window=(\d+)", lambda found: f"r={r[int(found[1])]}", spec)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--longeval", type=Path)
    parser.add_argument("--only", help="one of 200, 300, 400, needles-2000, needles-4000, none")
    given = parser.parse_args()
    for lines in PAPER if given.longeval is not None else ():
        if given.only in (None, lines):
            run_table(given.out, given.longeval, lines)
    for length in NEEDLES:
        if given.only in (None, f"needles-{length}"):
            run_needles(given.out, length)
    if given.only in (None, "none"):
        print_tables(sum_up_into(SUMMARY, given.out, "clustering", [*NEEDLES[2000][0]]))
