"""What a real language model can do, and what methods cost it: `python benchmarks/real_answers.py OUT BOOK [BOOK ...]`.

Asks `smollm2` the tasks in their official wording, with everything held; longer prompts come where it can do shorter
ones. Then measures methods on single needles in the books, with the question asked after compression: some methods with
three budgets, every method with a quarter in shorter prompts, and on some tasks with four budgets. An interrupted run
continues in OUT. Means join those in docs/results/answers-smollm2.jsonl, pictures go to docs/figures, and tables are
printed.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from asking import FIGURES, bench
from common import RESULTS, published
from kvsketch.caches.registry import parse_spec
from kvsketch.evaluation.answers.pictures import draw_scores
from kvsketch.evaluation.answers.summary import Mean, summarise
from kvsketch.evaluation.results.names import ANSWERS
from kvsketch.evaluation.results.rows import Row, read_rows
from kvsketch.evaluation.tasks import TASKS

SUMMARY = RESULTS / "answers-smollm2.jsonl"
MODEL, ABLE = "smollm2", 0.8
LENGTHS, FEW = (1000, 2000, 4000, 7500), 10  # lengths and number of prompts that show what the model can do
TOKENS, KEEPS = 2000, (0.5, 0.25, 0.125)
FORMS = (
    "uniform({})",
    "balancekv(sharpness=1, augmented=False, {})",
    "balancekv(sharpness=1, {})",
    "clustergen(entries='centre', apart=0, {})",
    "streaming_llm({})",
)
SHORT, QUARTER = 1000, "keep=0.25"  # for every method, in shorter prompts
BY_HEAD = ("kvzip({})", "kvzip({}, window=0.25)", "streaming_heads({})")
BY_PROFILE = ("keydiff", "clustergen", "balancekv", "uniform")
EQUAL = ("keydiff", "snapkv", "pyramidkv", "h2o", "tova", "clustergen", "balancekv", "uniform", "streaming_llm")
USUAL = (
    *BY_HEAD,
    *(f"{name}({{}}, heads='profile', window=16)" for name in BY_PROFILE),
    *(f"{name}({{}})" for name in EQUAL),
)
EVERY = [
    "exact",
    *(form.format(QUARTER) for form in USUAL),
    "kvzip(keep=0.125)",
    "keydiff(keep=0.125, heads='profile')",
]
ALL_KEEPS = (0.5, 0.25, 0.125, 0.0625)  # for every method, on the tasks of these tables
OF_KEEPS = (("niah_single",), ("needle", "number_string"), ("niah_single_uuid", "passkey"), ("niah_multivalue",))
ALL_FORMS = (*USUAL, "subgen({})", "expected_attention({})")
CELL, Cell = ("task", "asked", "length", "method"), tuple[str, str, int, str]
COMPARED = {  # tasks with limits: a right number has 9 tokens, a UUID 37, a list of four numbers 46
    "niah_single": ("--max-new-tokens", 16),
    "needle": (),
    "niah_single_uuid": ("--max-new-tokens", 56),
    "number_string": (),
    "passkey": (),
    "niah_multivalue": ("--max-new-tokens", 48),
}
ONLY_SHORT = ("needle", "niah_single_uuid", "passkey", "niah_multivalue")


def spec_of(form: str, keep: float) -> str:
    """A method's spec with this budget."""
    return str(parse_spec(form.format(f"keep={keep}")))


METHODS = ["exact", *(spec_of(form, keep) for keep in KEEPS for form in FORMS)]


def able_tasks(out: Path, books: list[Path]) -> list[Mean]:
    """Mean scores with everything held, for every task at growing lengths until the model can no longer do it."""
    names, held = list(TASKS), list[Mean]()
    for length in LENGTHS:
        for (suite, asked), tasks in _by_command(names).items():
            options = ("--lengths", length, "--samples", FEW, "--batch", 5, "--asked", asked, "--methods", "exact")
            _bench(suite, out, books, tasks, *options)
        held = summarise(read_rows(out / "rows.jsonl")[1])
        names = [mean.task for mean in held if mean.length == length and mean.score >= ABLE]
    return held


def _by_command(names: list[str]) -> dict[tuple[str, str], list[str]]:
    """Tasks by suite and mode: the question is asked after, unless the official prompt begins with it."""
    found = defaultdict[tuple[str, str], list[str]](list)
    for name in names:
        found[TASKS[name].suite, "before" if TASKS[name].asks_first else "after"].append(name)
    return found


def methods(
    out: Path, books: list[Path], samples: int, length: int, specs: Sequence[str], tasks: Iterable[str] = COMPARED
) -> None:
    """Ask questions with methods, task by task."""
    for name in tasks:
        if name in ONLY_SHORT and length > SHORT:
            continue
        options = ("--lengths", length, "--samples", samples, "--batch", 8, "--asked", "after")
        _bench(TASKS[name].suite, out, books, [name], *options, *COMPARED[name], "--methods", "; ".join(specs))


def _bench(suite: str, out: Path, books: list[Path], tasks: list[str], *options: object) -> None:
    haystack = [part for book in books for part in ("--haystack", book)]
    bench(suite, out, MODEL, "--dtype", "float32", "--tasks", ",".join(tasks), *haystack, *options)


def known() -> tuple[list[Row], dict[Cell, Row]]:
    """The published runs, and a line for each published cell."""
    first, *lines = (json.loads(line) for line in SUMMARY.read_text(encoding="utf-8").splitlines())
    return first["runs"], {cell_of(line): line for line in lines}


def cell_of(line: Row) -> Cell:
    return tuple(line[name] for name in CELL)


def sum_up(out: Path) -> None:
    """Join means of OUT to the published ones, except where those are of more prompts; draw pictures, print tables."""
    runs, lines = known()
    for part in ("held", "methods", "every"):
        if (out / part / ANSWERS).is_file():
            made, rows = read_rows(out / part / ANSWERS)
            runs += [run for run in published(made) if run not in runs]
            for mean in summarise(rows):
                line = asdict(mean) | {"quarters": quarters(rows, mean)}
                if mean.count >= lines.get(cell_of(line), {"count": 0})["count"]:
                    lines[cell_of(line)] = line
    found = sorted(lines.values(), key=lambda line: (list(TASKS).index(line["task"]), line["length"]))
    text = [{"runs": runs}, *found]
    SUMMARY.write_text("".join(json.dumps(line) + "\n" for line in text), encoding="utf-8")
    means = [Mean(**{name: value for name, value in line.items() if name != "quarters"}) for line in found]
    compared = [mean for mean in means if mean.task in COMPARED and mean.length == TOKENS]
    for picture in draw_scores([mean for mean in compared if mean.method in METHODS], out):
        picture.path.rename(FIGURES / f"answers-{MODEL}-{picture.path.name}")
    print_held([mean for mean in means if mean.method == "exact"])
    print_methods([mean for mean in means if mean.length == TOKENS], METHODS)
    print_methods([mean for mean in means if mean.length == SHORT], [str(parse_spec(spec)) for spec in EVERY])
    for tasks in OF_KEEPS:
        print_keeps(tasks, [mean for mean in means if mean.length == SHORT])
    print_depths([line for line in found if line["length"] == TOKENS])


def print_held(means: list[Mean]) -> None:
    """Print tasks down, lengths across: score, interval and number of prompts."""
    print("| task |", " | ".join(f"{length:,} tokens" for length in LENGTHS), "|\n|---|" + "---|" * len(LENGTHS))
    for task in dict.fromkeys(mean.task for mean in means):
        by_length = {mean.length: f"{mean} ({mean.count})" for mean in means if mean.task == task}
        print(f"| `{task}` |", " | ".join(by_length.get(length, "") for length in LENGTHS), "|")


def print_methods(means: list[Mean], specs: Sequence[str]) -> None:
    """Print methods down, tasks across."""
    means = [mean for mean in means if mean.method in specs]
    tasks = [task for task in COMPARED if any(mean.task == task and mean.method != "exact" for mean in means)]
    counts = {task: sorted({mean.count for mean in means if mean.task == task}) for task in tasks}
    heads = [f"`{task}`, n = {' to '.join(map(str, {counts[task][0]: 0, counts[task][-1]: 0}))}" for task in tasks]
    print("\n| | bytes, of full |", " | ".join(heads), "|\n|---|---|" + "---|" * len(tasks))
    for spec in specs:
        found = {mean.task: mean for mean in means if mean.method == spec}
        if found:
            share = next(iter(found.values())).share
            print(f"| `{spec}` | {share:.3f} |", " | ".join(f"{found.get(task, '')}" for task in tasks), "|")


def print_keeps(tasks: Sequence[str], means: list[Mean]) -> None:
    """Print methods down, budgets across: percent answered; for a single task also percent of the full bytes held."""
    found = {(mean.task, mean.method): mean for mean in means}
    print(f"\n| {', '.join(f'`{task}`' for task in tasks)} |", end=" ")
    print(" | ".join(f"{keep:g}" for keep in ALL_KEEPS), "|\n|---|" + "---|" * len(ALL_KEEPS))
    for form in ALL_FORMS:
        of_keep = [[found.get((task, spec_of(form, keep))) for task in tasks] for keep in ALL_KEEPS]
        cells = [", ".join(answered(mean, beside_bytes=len(tasks) == 1) for mean in cell) for cell in of_keep]
        name = f"`{form.replace('{}, ', '').replace('({})', '')}`".replace(
            "(heads='profile', window=16)`", "` by profile"
        )
        print(f"| {name} |", " | ".join(cells), "|")


def answered(mean: Mean | None, *, beside_bytes: bool) -> str:
    """The percentage answered; a dash where nothing was asked."""
    if mean is None:
        return "–"
    return f"{100 * mean.score:.0f}" + (f" ({100 * mean.share:.0f} %)" if beside_bytes else "")


def quarters(rows: list[Row], mean: Mean) -> list[tuple[float, int]]:
    """For each quarter of the texts, how many needles were found and how many there were."""
    about = ("task", "length", "method")
    here = [row for row in rows if all(row[name] == getattr(mean, name) for name in about) and row["at"] is not None]
    parts = [[row["score"] for row in here if min(3, int(4 * row["at"])) == part] for part in range(4)]
    return [(sum(part), len(part)) for part in parts]


def print_depths(lines: list[Row]) -> None:
    """Print methods down, quarters of the text across."""
    for task in COMPARED:
        here = {line["method"]: line["quarters"] for line in lines if line["task"] == task}
        if here.keys() <= {"exact"}:
            continue
        print(f"\n| `{task}`, found in the | first quarter | second | third | last |\n|---|---|---|---|---|")
        for spec in (spec for spec in METHODS if spec in here):
            print(f"| `{spec}` |", " | ".join(f"{found:.0f} of {count}" for found, count in here[spec]), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("books", type=Path, nargs="*")
    parser.add_argument("--samples", type=int, default=100)
    given = parser.parse_args()
    if given.books:
        able_tasks(given.out / "held", given.books)
        methods(given.out / "methods", given.books, given.samples, TOKENS, METHODS)
        methods(given.out / "every", given.books, given.samples, SHORT, EVERY)
        more = [spec_of(form, keep) for keep in ALL_KEEPS for form in ALL_FORMS]
        for tasks in OF_KEEPS:
            methods(given.out / "every", given.books, given.samples, SHORT, more, tasks)
    sum_up(given.out)
