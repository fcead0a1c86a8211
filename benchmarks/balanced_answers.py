"""Lines and needles with BalanceKV, plain, augmented and faithful: `python benchmarks/balanced_answers.py OUT`.

Runs the benchmarks, with their rows in OUT, where an interrupted run continues. Then writes their means to
docs/results/balanced.jsonl and prints a table.
"""

import argparse
from pathlib import Path

from asking import bench, sum_up_into
from common import RESULTS
from kvsketch.evaluation.answers.summary import Mean

TASKS = {"lines": "lines", "niah_single": "ruler", "niah_multikey": "ruler"}  # tasks and their suites
KEEPS = (0.5, 0.25, 0.125)
FORMS = ("uniform({})", "balancekv({}, sharpness=1, augmented=False)", "balancekv({})", "clustergen({})")
METHODS = [form.format(f"keep={keep}") for keep in KEEPS for form in FORMS]
METHODS += [f"balancekv(keep={keep}, mode='faithful')" for keep in KEEPS[:2]]


def print_table(means: list[Mean]) -> None:
    """Print methods down, tasks and question modes across."""
    columns = [(task, asked) for task in TASKS for asked in ("before", "after")]
    print("| | bytes, of full |", " | ".join(f"{task}, {asked}" for task, asked in columns), "|")
    print("|---|---|" + "---|" * len(columns))
    for method in METHODS:
        found = {(mean.task, mean.asked): mean for mean in means if mean.method == method}
        share = next(iter(found.values())).share
        print(f"| `{method}` | {share:.3f} |", " | ".join(str(found.get(column, "")) for column in columns), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    for suite in dict.fromkeys(TASKS.values()):
        tasks = ",".join(task for task in TASKS if TASKS[task] == suite)
        options = ("--lengths", 2000, "--samples", 100, "--batch", 20, "--max-new-tokens", 32)
        bench(suite, out, "--tasks", tasks, "--methods", "; ".join(METHODS), *options)
    print_table(sum_up_into(RESULTS / "balanced.jsonl", out))
