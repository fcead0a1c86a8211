"""Equal shares, a pyramid and a profile, on the embedded model: `python benchmarks/by_head.py OUT`.

Questions come after compression. Profiles are measured on other tasks than those that are asked: on needles for
records, and on records for needles. Rows go to OUT, where an interrupted run continues; means go to
docs/results/by-head.jsonl, and a table is printed.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from asking import bench, write_means
from common import RESULTS
from kvsketch.evaluation.answers.summary import Mean, summarise
from kvsketch.evaluation.results.rows import read_rows

RECORDS = {"lines": "lines", "kv": "infinite"}  # tasks and their suites
NEEDLES = {"niah_single": "ruler", "niah_multikey": "ruler"}
KEEPS, TOKENS = (0.25, 0.125, 0.05), 2000
FORMS = ("keydiff({})", "uniform({}, window=16)", "balancekv({}, window=16)", "clustergen({}, window=16)")
WAYS = ("equal", "pyramid", "profile")
Specs = Callable[[str, str], list[str]]  # from a part of the tasks and a profile to its specs


def measured(path: Path, tasks: list[str]) -> Path:
    """A profile of the embedded model, measured on documents of these tasks."""
    return profile_of(path, "embedded", "--tasks", ",".join(tasks))


def profile_of(path: Path, model: str, *options: object) -> Path:
    """A profile, measured with these options unless the file exists."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "kvsketch", "profile", model, "--out", path, *options]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return path


def specs(part: str, profile: str) -> list[str]:
    """The specs of all methods with all ways to share the budget."""
    heads = {"equal": "", "pyramid": ", heads='pyramid'", "profile": f", heads={profile!r}"}
    return [form.format(f"keep={k}{heads[w]}") for k in KEEPS for form in FORMS for w in WAYS]


def run(name: str, out: Path, specs: Specs, samples: int, *more: object) -> list[Mean]:
    """Write rows of all tasks, with full attention too; their means, without the profile's path in method names."""
    found, runs = list[Mean](), list[dict]()
    for part, asked, others in (("records", RECORDS, NEEDLES), ("needles", NEEDLES, RECORDS)):
        profile = str(measured(out / f"for-{part}.json", list(others)).absolute())
        methods = "; ".join(["exact", *specs(part, profile)])
        for task, suite in asked.items():
            given = ("--tasks", task, "--lengths", TOKENS, "--samples", samples, "--batch", 10, "--asked", "after")
            short = ("--max-new-tokens", 32) if suite == "ruler" else ()
            bench(suite, out / part, *given, *short, *more, "--methods", methods)
        first, rows = read_rows(out / part / "rows.jsonl")
        runs += first
        found += [replace(mean, method=mean.method.replace(repr(profile), "'profile'")) for mean in summarise(rows)]
    write_means(RESULTS / f"{name}.jsonl", runs, found)
    return found


def print_table(means: list[Mean]) -> None:
    """Print methods and budgets down, tasks across; bytes in percent of a full cache."""
    tasks = [*RECORDS, *NEEDLES]
    print("| | bytes |", " | ".join(f"`{task}`" for task in tasks), "|\n|---|---|" + "---|" * len(tasks))
    for method in dict.fromkeys(mean.method for mean in means):
        by_task = {mean.task: mean for mean in means if mean.method == method}
        share = max(mean.share for mean in by_task.values())
        print(f"| `{method}` | {100 * share:.1f} % |", " | ".join(str(by_task.get(task, "")) for task in tasks), "|")


def run_and_print(name: str, about: str | None, specs: Specs, samples: int, *more: object) -> None:
    """The main function of such a script."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=samples)
    given = parser.parse_args()
    print_table(run(name, given.out, specs, given.samples, *more))


if __name__ == "__main__":
    run_and_print("by-head", __doc__, specs, 40)
