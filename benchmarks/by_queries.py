"""What a second reading is worth, on the embedded model: `python benchmarks/by_queries.py OUT [--samples N]`.

Questions come after compression. `kvzip` by one threshold over all heads and by a profile, and `keydiff` by a profile;
profiles are measured on other tasks than those that are asked, and documents are none that anything was chosen by. Rows
go to OUT, where an interrupted run goes on; means to docs/results/by-queries.jsonl.
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from answers import bench
from by_head import NEEDLES, RECORDS, measured, print_table
from common import RESULTS
from kvsketch.evaluation.answers.summary import Mean, summarise
from kvsketch.evaluation.results.rows import read_rows

KEEPS = {"records": (0.25, 0.125), "needles": (0.05,)}
TOKENS, SEED = 2000, 1000
FORMS = ("kvzip(keep={0})", "kvzip(keep={0}, heads={1!r})", "keydiff(keep={0}, heads={1!r})")


def run(out: Path, samples: int) -> list[Mean]:
    """Rows of all tasks, then their means; the profile's path is left out of their names."""
    found, runs = list[Mean](), list[object]()
    for part, asked, others in (("records", RECORDS, NEEDLES), ("needles", NEEDLES, RECORDS)):
        profile = str(measured(out / f"for-{part}.json", list(others)).absolute())
        specs = "; ".join(["exact", *(form.format(keep, profile) for keep in KEEPS[part] for form in FORMS)])
        for task, suite in asked.items():
            given = ("--tasks", task, "--lengths", TOKENS, "--samples", samples, "--seed", SEED, "--batch", 10)
            short = ("--max-new-tokens", 32) if suite == "ruler" else ()
            bench(suite, out / part, *given, "--asked", "after", *short, "--methods", specs)
        first, rows = read_rows(out / part / "rows.jsonl")
        runs += first
        found += [replace(mean, method=mean.method.replace(repr(profile), "'profile'")) for mean in summarise(rows)]
    lines = [{"runs": runs}, *(asdict(mean) for mean in found)]
    (RESULTS / "by-queries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=200)
    given = parser.parse_args()
    print_table(run(given.out, given.samples))
