"""Answers of the embedded model where tokens are looked up: `python benchmarks/looked_up_answers.py OUT`.

Makes a corpus of the model's own tasks, 3,000 tokens a text, and fits an index to it; then asks about texts of 4,000
and 8,000 tokens that nothing was fitted to. With `--fitted-to needles` the corpus has needles alone, and the questions
are about other tasks. An interrupted run continues. Means go to docs/results/looked_up.jsonl.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from asking import bench
from common import write_row
from kvsketch.caches.registry import parse_spec
from kvsketch.evaluation.answers.summary import standard_error
from kvsketch.evaluation.results.rows import Row, read_rows

TASKS = {"lines": "lines", "passkey": "infinite", "kv": "infinite", "niah_single": "ruler", "niah_multikey": "ruler"}
OUTSIDE = {"math_find": "infinite", "kv": "infinite", "lines": "lines"}  # unlike the needles of the index
WINDOW = 255
FIT = ("--tokens", 4096, "--apart", WINDOW, "--away", 128, "--queries", 256, "--hidden", 256)
EXACT_PARTS = f"window={WINDOW}, staging=64"
BESIDE = ("exact", f"streaming_llm(keep={1 + WINDOW + 32}, sinks=1)")
FORMS = {  # specs by name; the index and other options replace the braces
    "published": "saap(index={i!r}, probes={p}, {e})",
    "with an estimate": "saap(index={i!r}, probes={p}, estimate=True, {e})",
    "by density": "saap(index={i!r}, probes={p}, estimate=True, prefer='density', {e})",
    "a tenth at most": "saap(index={i!r}, probes=128, visit=0.1, estimate=True, prefer='density', {e})",
    "k-means": "kmeans(index={i!r}, probes={p}, {e})",
    "k-means, rotated": "kmeans(index={i!r}, probes={p}, rope=True, {e})",
    "k-means with an estimate": "kmeans(index={i!r}, probes={p}, estimate=True, {e})",
    "random": "random_buckets(probes={p}, {e})",
    "exact top 5 %": "retrieval(top=0.05, window=255)",
}


def run(*command: object, **options) -> None:
    subprocess.run([sys.executable, "-m", "kvsketch", *map(str, command)], check=True, **options)


def corpus(out: Path, task: str, count: int) -> Path:
    """A file with texts of a task, each ending with many questions and their answers."""
    path = out / f"{task}.jsonl"
    if not path.exists():
        with open(path.with_suffix(".part"), "w") as file:
            options = ("--tokens", 3000, "--jsonl", "--count", count, "--wording", "compact", "--seed", 100)
            run("sample", task, *options, stdout=file, stderr=subprocess.DEVNULL)
        path.with_suffix(".part").rename(path)
    return path


def fitted(out: Path, name: str, tasks: list[str], buckets: int) -> str:
    """The folder of an index fitted to these tasks; it is made once."""
    folder = out / name
    if not (folder / "index.json").exists():
        texts = [part for task in tasks for part in ("--corpus", corpus(out, task, 80 // len(tasks)))]
        run("fit", *texts, "-o", folder, "--buckets", buckets, "--shards", out / "shards", *FIT)
    return str(folder)


def ask(out: Path, tasks: dict[str, str], methods: list[str], *options: object) -> None:
    for suite in dict.fromkeys(tasks.values()):
        wanted = ",".join(task for task in tasks if tasks[task] == suite)
        bench(suite, out, "--tasks", wanted, "--methods", "; ".join(methods), "--max-new-tokens", 32, *options)


def named(index: str, probes: int, wanted: Collection[str]) -> dict[str, str]:
    """The names of methods by their specs in the form that rows have."""
    specs = {name: FORMS[name].format(i=index, p=probes, e=EXACT_PARTS) for name in wanted}
    return {str(parse_spec(spec)): name for name, spec in specs.items()}


def sum_up(out: Path, fitted_to: str, names: dict[str, str], tasks: Collection[str]) -> None:
    """Write a row for every task, length and method."""
    groups: dict[tuple, list[Row]] = {}
    for row in read_rows(out / "rows.jsonl")[1]:
        if row["task"] in tasks:
            groups.setdefault((row["task"], row["length"], row["asked"], row["method"]), []).append(row)
    for (task, length, asked, method), rows in groups.items():
        scores, read = [row["score"] for row in rows], [row["looked_up"] for row in rows]
        write_row("looked_up", {
            "fitted_to": fitted_to, "task": task, "length": length, "asked": asked, "method": names.get(method, method),
            "count": len(rows), "score": round(statistics.fmean(scores), 4), "error": round(standard_error(scores), 4),
            "read": None if None in read else round(statistics.fmean(read), 4),
        })  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lengths", default="4000,8000")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--buckets", type=int, default=1024)
    parser.add_argument("--probes", type=int, default=32)
    parser.add_argument(
        "--methods", default="; ".join(FORMS), help="names from the table in this file, separated by semicolons"
    )
    parser.add_argument("--fitted-to", choices=["own", "needles"], default="own")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    own = given.fitted_to == "own"
    index = fitted(given.out, given.fitted_to, list(TASKS) if own else ["niah_single"], given.buckets)
    names, tasks = named(index, given.probes, given.methods.split("; ")), TASKS if own else OUTSIDE
    options = ("--lengths", given.lengths, "--samples", given.samples, "--batch", 8, "--asked", "before")
    ask(given.out, tasks, [*BESIDE, *names], *options)
    sum_up(given.out, given.fitted_to, names, tasks)
