"""What a real language model can do, and what methods cost it: `python benchmarks/real_answers.py OUT BOOK [BOOK ...]`.

Asks `smollm2` the tasks in their official wording, with everything held: longer prompts where it could do shorter ones.
Then measures methods on single needles in the books, with the question asked after compression. An interrupted run goes
on in OUT. Means go into docs/results/answers-smollm2.jsonl, pictures into docs/figures; both tables are printed.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from answers import FIGURES, bench
from common import RESULTS, published
from kvsketch.caches.registry import parse_spec
from kvsketch.evaluation.answers.pictures import draw_scores
from kvsketch.evaluation.answers.summary import Mean, summarise
from kvsketch.evaluation.results.rows import read_rows
from kvsketch.evaluation.tasks import TASKS

SUMMARY = RESULTS / "answers-smollm2.jsonl"
MODEL, ABLE = "smollm2", 0.8
LENGTHS, FEW = (1000, 2000, 4000, 7500), 10  # prompts that say what the model can do
TOKENS, KEEPS = 2000, (0.5, 0.25, 0.125)
FORMS = (
    "uniform({})",
    "balancekv(sharpness=1, augmented=False, {})",
    "balancekv({})",
    "clustergen({})",
    "streaming_llm({})",
)
METHODS = ["exact", *(str(parse_spec(form.format(f"keep={keep}"))) for keep in KEEPS for form in FORMS)]
COMPARED = {"niah_single": ("--max-new-tokens", 16), "number_string": ()}  # a right reply has 9 tokens


def able_tasks(out: Path, books: list[Path]) -> list[Mean]:
    """The scores with everything held, of every task at the shortest length and on until it can no more."""
    names, held = list(TASKS), list[Mean]()
    for length in LENGTHS:
        for (suite, asked), tasks in _by_command(names).items():
            options = ("--lengths", length, "--samples", FEW, "--batch", 5, "--asked", asked, "--methods", "exact")
            _bench(suite, out, books, tasks, *options)
        held = summarise(read_rows(out / "rows.jsonl")[1])
        names = [mean.task for mean in held if mean.length == length and mean.score >= ABLE]
    return held


def _by_command(names: list[str]) -> dict[tuple[str, str], list[str]]:
    """Tasks by suite and mode: afterwards, but where the official prompt begins with the question."""
    found = defaultdict[tuple[str, str], list[str]](list)
    for name in names:
        found[TASKS[name].suite, "before" if TASKS[name].asks_first else "after"].append(name)
    return found


def methods(out: Path, books: list[Path], samples: int) -> list[Mean]:
    """The scores of methods, task by task."""
    for name, limit in COMPARED.items():
        options = ("--lengths", TOKENS, "--samples", samples, "--batch", 8, "--asked", "after")
        _bench(TASKS[name].suite, out, books, [name], *options, *limit, "--methods", "; ".join(METHODS))
    return summarise(read_rows(out / "rows.jsonl")[1])


def _bench(suite: str, out: Path, books: list[Path], tasks: list[str], *options: object) -> None:
    haystack = [part for book in books for part in ("--haystack", book)]
    bench(suite, out, MODEL, "--dtype", "float32", "--tasks", ",".join(tasks), *haystack, *options)


def sum_up(out: Path) -> None:
    """Means of both parts, those of more prompts where both have a cell; pictures of the methods."""
    (held_runs, held_rows), (runs, rows) = (read_rows(out / part / "rows.jsonl") for part in ("held", "methods"))
    means = sorted([*summarise(held_rows), *summarise(rows)], key=lambda mean: mean.count)
    by_cell = {(mean.task, mean.asked, mean.length, mean.method): mean for mean in means}
    found = sorted(by_cell.values(), key=lambda mean: (list(TASKS).index(mean.task), mean.length))
    lines: list[dict] = [{"runs": published([*held_runs, *runs])}]
    lines += [asdict(mean) | {"quarters": quarters(rows, mean.task, mean.method)} for mean in found]
    SUMMARY.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for picture in draw_scores([mean for mean in found if mean.task in COMPARED and mean.length == TOKENS], out):
        picture.path.rename(FIGURES / f"answers-{MODEL}-{picture.path.name}")
    print_held([mean for mean in found if mean.method == "exact"])
    print_methods([mean for mean in found if mean.length == TOKENS])
    print_depths(rows)


def print_held(means: list[Mean]) -> None:
    """Tasks down, lengths across: score, interval and prompts."""
    print("| task |", " | ".join(f"{length:,} tokens" for length in LENGTHS), "|\n|---|" + "---|" * len(LENGTHS))
    for task in dict.fromkeys(mean.task for mean in means):
        by_length = {mean.length: f"{mean} ({mean.count})" for mean in means if mean.task == task}
        print(f"| `{task}` |", " | ".join(by_length.get(length, "") for length in LENGTHS), "|")


def print_methods(means: list[Mean]) -> None:
    """Methods down, tasks across."""
    tasks = [task for task in COMPARED if any(mean.task == task and mean.method != "exact" for mean in means)]
    counts = {task: sorted({mean.count for mean in means if mean.task == task}) for task in tasks}
    heads = [f"`{task}`, n = {' to '.join(map(str, {counts[task][0]: 0, counts[task][-1]: 0}))}" for task in tasks]
    print("\n| | bytes, of full |", " | ".join(heads), "|\n|---|---|" + "---|" * len(tasks))
    for spec in METHODS:
        found = {mean.task: mean for mean in means if mean.method == spec}
        if found:
            share = next(iter(found.values())).share
            print(f"| `{spec}` | {share:.3f} |", " | ".join(f"{found.get(task, '')}" for task in tasks), "|")


def quarters(rows: list[dict], task: str, method: str) -> list[tuple[float, int]]:
    """How many needles were found in each quarter of the texts, and how many there were."""
    here = [row for row in rows if row["task"] == task and row["method"] == method and row["at"] is not None]
    parts = [[row["score"] for row in here if min(3, int(4 * row["at"])) == part] for part in range(4)]
    return [(sum(part), len(part)) for part in parts]


def print_depths(rows: list[dict]) -> None:
    """Methods down, quarters of the text across."""
    names = {row["method"] for row in rows}
    for task in dict.fromkeys(row["task"] for row in rows):
        print(f"\n| `{task}`, found in the | first quarter | second | third | last |\n|---|---|---|---|---|")
        for spec in (spec for spec in METHODS if spec in names):
            cells = [f"{found:.0f} of {count}" for found, count in quarters(rows, task, spec)]
            print(f"| `{spec}` |", " | ".join(cells), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("books", type=Path, nargs="*")
    parser.add_argument("--samples", type=int, default=100)
    given = parser.parse_args()
    if given.books:
        able_tasks(given.out / "held", given.books)
        methods(given.out / "methods", given.books, given.samples)
    sum_up(given.out)
