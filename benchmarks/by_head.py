"""Equal shares, a pyramid and a profile, on the embedded model: `python benchmarks/by_head.py OUT`.

Questions come after compression. Profiles are measured on other tasks than those that are asked: on needles for
records, on records for needles. Rows go to OUT, where an interrupted run goes on; means to docs/results/by-head.jsonl,
and a table is printed.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from answers import bench
from common import RESULTS
from kvsketch.evaluation.answers.summary import Mean, summarise
from kvsketch.evaluation.results.rows import read_rows

RECORDS = {"lines": "lines", "kv": "infinite"}  # tasks and their suites
NEEDLES = {"niah_single": "ruler", "niah_multikey": "ruler"}
KEEPS, TOKENS = (0.25, 0.125, 0.05), 2000
FORMS = ("keydiff({})", "uniform({}, window=16)", "balancekv({}, window=16)", "clustergen({}, window=16)")
WAYS = ("equal", "pyramid", "profile")


def measured(path: Path, tasks: list[str]) -> Path:
    """A profile from documents of these tasks; one that is there is used."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        options = ("profile", "--tasks", ",".join(tasks), "--out", path)
        subprocess.run([sys.executable, "-m", "kvsketch", *map(str, options)], check=True, stdout=subprocess.DEVNULL)
    return path


def specs(profile: Path) -> str:
    """All methods and ways, and full attention."""
    heads = {"equal": "", "pyramid": ", heads='pyramid'", "profile": f", heads={str(profile)!r}"}
    return "; ".join(["exact", *(form.format(f"keep={k}{heads[w]}") for k in KEEPS for form in FORMS for w in WAYS)])


def run(out: Path, samples: int) -> list[Mean]:
    """Rows of all tasks, then their means; the profile's path is left out of their names."""
    found = list[Mean]()
    for part, asked, others in (("records", RECORDS, NEEDLES), ("needles", NEEDLES, RECORDS)):
        profile = measured(out / f"for-{part}.json", list(others)).absolute()
        for task, suite in asked.items():
            options = ("--tasks", task, "--lengths", TOKENS, "--samples", samples, "--batch", 10, "--asked", "after")
            short = ("--max-new-tokens", 32) if suite == "ruler" else ()
            bench(suite, out / part, *options, *short, "--methods", specs(profile))
        means = summarise(read_rows(out / part / "rows.jsonl")[1])
        found += [replace(mean, method=mean.method.replace(repr(str(profile)), "'profile'")) for mean in means]
    runs = [line for part in ("records", "needles") for line in read_rows(out / part / "rows.jsonl")[0]]
    lines = [{"runs": runs}, *(asdict(mean) for mean in found)]
    (RESULTS / "by-head.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


def print_table(means: list[Mean]) -> None:
    """Methods and budgets down, tasks across; bytes in percent of a full cache."""
    tasks = [*RECORDS, *NEEDLES]
    print("| | bytes |", " | ".join(f"`{task}`" for task in tasks), "|\n|---|---|" + "---|" * len(tasks))
    for method in dict.fromkeys(mean.method for mean in means):
        by_task = {mean.task: mean for mean in means if mean.method == method}
        share = max(mean.share for mean in by_task.values())
        print(f"| `{method}` | {100 * share:.1f} % |", " | ".join(str(by_task.get(task, "")) for task in tasks), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=40)
    given = parser.parse_args()
    print_table(run(given.out, given.samples))
