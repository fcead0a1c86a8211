"""What a profile of something else costs: `python benchmarks/other_profiles.py OUT [--books FOLDER --code FOLDER]`.

A method divides its budget by profiles of documents like those that are asked about, of other tasks, of novels and of
programs; by a wrong one, which gives every head what another one needs; and equally. Then, in longer documents, by a
profile of short documents and by one of equally long ones. With books and programs, `smollm2` is asked too, about
needles in novels. Rows go to OUT, where an interrupted run continues; means go to
docs/results/other-profiles-*.jsonl, and tables are printed.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from asking import bench, write_means
from by_head import NEEDLES, RECORDS, measured, profile_of
from common import RESULTS
from kvsketch.caches.core.profile import SHIPPED
from kvsketch.evaluation.answers.summary import Mean, summarise
from kvsketch.evaluation.results.rows import read_rows
from kvsketch.files import read_json, write_json

KEEPS, FORM = (0.25, 0.125), "keydiff(keep={}{})"
TOKENS, LONGER = 2000, (4000, 8000)
SAMPLES, FEW = 40, 20
FIRST, FARTHEST = "embedded-first", 16000  # the first edition still finds lines at this length
REAL, REAL_TOKENS, REAL_LONGER = "smollm2", 2000, 7500
NOVELS = ("frankenstein", "treasure")  # needles are hidden in these; no profile saw them
Profiles = Mapping[str, Path | None]  # by their names in the table


def wrong(path: Path) -> Path:
    """A profile with the same shares given to other heads: layers are reversed, and the heads of each too."""
    found = path.with_name(f"{path.stem}-wrong.json")
    content = read_json(path)
    layers = [heads[::-1] for heads in content["layers"].values()]
    write_json(found, content | {"layers": dict(zip(content["layers"], layers[::-1], strict=True))})
    return found


def specs(profiles: Profiles) -> dict[str, str]:
    """The name of each spec in the table."""
    found = {"exact": "exact"}
    for keep in KEEPS:
        for name, path in profiles.items():
            heads = "" if path is None else f", heads={str(path.absolute())!r}"
            found[FORM.format(keep, heads)] = f"{keep:g}: {name}"
    return found


def asked(out: Path, model: str, suite: str, tasks: str, profiles: Profiles, *options: object) -> Iterator[Mean]:
    """Means of answers with these profiles, the question after compression."""
    names = specs(profiles)
    given = ("--tasks", tasks, "--asked", "after", "--methods", "; ".join(names), *options)
    bench(suite, out, model, *given)
    for mean in summarise(read_rows(out / "rows.jsonl")[1]):
        yield replace(mean, method=names[mean.method])


def embedded(out: Path) -> Iterator[Mean]:
    """Means for records and needles, in documents as long as the profiles' and in longer ones."""
    ways = {"records": list(RECORDS), "needles": list(NEEDLES)}
    profiles = {name: measured(out / f"{name}.json", tasks) for name, tasks in ways.items()}
    for name, tasks in (("records", RECORDS), ("needles", NEEDLES)):
        others = next(other for other in ways if other != name)
        every = {"same": profiles[name], "other tasks": profiles[others], "wrong": wrong(profiles[name]), "equal": None}
        for task, suite in tasks.items():
            given = ("--lengths", TOKENS, "--samples", SAMPLES, "--batch", 10, "--max-new-tokens", 40)
            yield from asked(out / name / task, "embedded", suite, task, every, *given)
    for length in LONGER:
        given = ("--lengths", length, "--samples", FEW, "--batch", 4, "--max-new-tokens", 40)
        long = profile_of(out / f"records-{length}.json", "embedded", "--tasks", ",".join(RECORDS), "--tokens", length)
        every = {f"of {TOKENS}": profiles["records"], f"of {length}": long, "equal": None}
        yield from asked(out / f"longer-{length}", "embedded", "lines", "lines", every, *given)


def first_edition(out: Path) -> Iterator[Mean]:
    """Means of the first edition for lines, up to the length at which it finds them."""
    short = profile_of(out / "first.json", FIRST, "--tasks", ",".join(RECORDS))
    for length in (TOKENS, FARTHEST):
        given = ("--lengths", length, "--samples", FEW, "--batch", 2, "--wording", "compact")
        every = {f"of {TOKENS}": short, "equal": None}
        yield from asked(out / f"first-{length}", FIRST, "lines", "lines", every, *given)


def real(out: Path, books: Path, code: Path) -> Iterator[Mean]:
    """Means for needles in novels, with profiles of other novels and of programs."""
    programs = [part for path in sorted(code.glob("*.txt")) for part in ("--texts", path)]
    by_code = profile_of(out / "code.json", REAL, *programs, "--dtype", "float32")
    copied = out / "novels.json"
    write_json(copied, read_json(SHIPPED / f"{REAL}.json"))
    every = {"novels": copied, "programs": by_code, "wrong": wrong(copied), "equal": None}
    hay = [part for name in NOVELS for part in ("--haystack", books / f"{name}.txt")]
    given = ("--dtype", "float32", *hay, "--max-new-tokens", 16)
    task = (REAL, "ruler", "niah_single")
    samples = ("--samples", 24, "--batch", 4)
    yield from asked(out / "real", *task, every, *given, *samples, "--lengths", REAL_TOKENS)
    few = {f"novels, of {TOKENS}": copied, "equal": None}
    yield from asked(out / "real-longer", *task, few, *given, "--samples", 16, "--batch", 1, "--lengths", REAL_LONGER)


def print_table(name: str, means: list[Mean]) -> None:
    """Print profiles down, tasks and lengths across."""
    columns = list(dict.fromkeys((mean.task, mean.length) for mean in means))
    print(f"\n{name}\n\n| |", " | ".join(f"`{task}`, {length:,}" for task, length in columns))
    print("|---|" + "---|" * len(columns))
    for method in dict.fromkeys(mean.method for mean in means):
        cells = {(mean.task, mean.length): f"{mean} ({mean.count})" for mean in means if mean.method == method}
        print(f"| {method} |", " | ".join(cells.get(column, "") for column in columns), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--books", type=Path)
    parser.add_argument("--code", type=Path)
    given = parser.parse_args()
    parts = {"embedded": list(embedded(given.out / "embedded")), "first": list(first_edition(given.out / "first"))}
    if given.books is not None and given.code is not None:
        parts["real"] = list(real(given.out / "real", given.books, given.code))
    for part, found in parts.items():
        runs = [run for path in sorted((given.out / part).rglob("rows.jsonl")) for run in read_rows(path)[0]]
        write_means(RESULTS / f"other-profiles-{part}.jsonl", runs, found)
        print_table(part, found)
