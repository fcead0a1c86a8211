"""Many benchmarks of answers at once, in processes side by side: `python benchmarks/at_once.py OUT SCRIPT ...`.

For a machine with a GPU and many cores: one benchmark leaves most of both idle. A SCRIPT is a file of this folder, such
as `by_head`, or `longeval:--longeval:FOLDER` with arguments; or a file of docs/results, whose rows name the commands
that they come from. The benchmarks that these would run are noted, divided by task and by method, and run. Their rows
go where the scripts look for them: `python benchmarks/by_head.py OUT/by_head` finds the work done and sums it up, or
first does what there was no time for. The means of a results file's commands go to OUT/NAME.jsonl. Profiles are
measured before anything else.
"""

import argparse
import json
import multiprocessing
import os
import runpy
import shlex
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

import asking
from kvsketch.cli.commands import app
from kvsketch.evaluation.answers.summary import Mean, summarise
from kvsketch.evaluation.embedded.training.ahead import end_with_parent
from kvsketch.evaluation.results.rows import read_rows
from kvsketch.files import digest_of

HERE = Path(__file__).parent
ROWS = "rows.jsonl"
DEAR = {"kvzip": 2.5, "clustergen": 2.5, "subgen": 2.5, "balancekv": 1.6, "saap": 1.6, "kmeans": 1.6}  # others: 1
PIECE = 40.0  # work of a job, in batches of 2,000 tokens


@dataclass(frozen=True)
class Job:
    """Some methods on one task, whose rows belong to a folder."""

    folder: Path
    given: list[str]
    work: float

    def own(self, out: Path) -> Path:
        """The folder where its rows are written first: an interrupted job continues there."""
        return out / digest_of({"given": self.given})[:16]


def planned(out: Path, sources: list[str]) -> list[Job]:
    """The jobs that all sources would run, the longest first."""
    found = list[Job]()
    for source in sources:
        name, *told = source.split(":")
        if name.endswith(".jsonl"):
            found += [job for folder, given in commands(Path(name), out) for job in divided(folder, given)]
            continue
        asking.PLANNED = []
        sys.argv = [name, str(out / name), *told]
        try:
            runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
        except SystemExit as end:
            if not asking.PLANNED:
                raise
            print(f"{name}: {len(asking.PLANNED)} benchmarks are noted ({end})")
        found += [job for folder, given in asking.PLANNED for job in divided(folder, given)]
        asking.PLANNED = None
    return sorted(found, key=lambda job: -job.work)


def commands(path: Path, out: Path) -> list[tuple[Path, list[str]]]:
    """The benchmarks that the means of a summary come from, each with its own folder."""
    runs = [run for line in path.read_text().splitlines() for run in json.loads(line).get("runs", ())]
    every = dict.fromkeys(run["command"].split(" --out ")[0] for run in runs)
    return [(out / path.stem / str(number), shlex.split(command)[2:]) for number, command in enumerate(every)]


def divided(folder: Path, given: list[str]) -> list[Job]:
    """A benchmark divided into jobs: by task, and into groups of methods of about `PIECE` work."""
    first = 1 if given[1].startswith("--") else 2  # a model may be named
    told = dict(zip(given[first::2], given[first + 1 :: 2], strict=True))  # the last of repeated options counts
    length, samples = max(map(int, told.get("--lengths", "4000").split(","))), int(told.get("--samples", 50))
    told["--batch"] = "20" if length <= 2000 else "10"  # answers do not depend on it
    batches = -(-samples // int(told["--batch"])) * (1 if "--asked" in told else 2) * (0.5 + length / 4000)
    jobs = list[Job]()
    for task in told.get("--tasks", "").split(","):
        some, work = list[str](), 0.0
        methods = [method.strip() for method in told["--methods"].split(";") if method.strip()]
        for number, method in enumerate(methods, 1):
            some.append(method)
            work += batches * DEAR.get(method.split("(")[0], 1.0)
            if work > PIECE or number == len(methods):
                own = told | {"--methods": "; ".join(some)} | ({"--tasks": task} if task else {})
                jobs.append(Job(folder, [*given[:first], *(part for pair in own.items() for part in pair)], work))
                some, work = [], 0.0
    return jobs


def work_on(jobs: list[Job], counter, failed, out: Path, device: str, number: int) -> None:
    """Work of one process: takes the next free job until none is left."""
    torch.set_num_threads(1)
    end_with_parent()
    with open(out / f"worker-{number}.log", "w") as said:
        for place in (1, 2):
            os.dup2(said.fileno(), place)
    while True:
        with counter.get_lock():
            at = counter.value
            counter.value += 1
        if at >= len(jobs):
            return
        sys.argv = ["kvsketch", "bench", *jobs[at].given]  # rows name this command
        try:
            app(["bench", *jobs[at].given, "--out", str(jobs[at].own(out)), "--device", device], standalone_mode=False)
        except Exception:
            traceback.print_exc()
            with counter.get_lock():
                failed.value += 1


def run(jobs: list[Job], out: Path, device: str, workers: int, seconds: float) -> None:
    """Run as many jobs as there is time for, and put their rows into the folders they belong to."""
    out.mkdir(parents=True, exist_ok=True)
    began, spawn = time.monotonic(), multiprocessing.get_context("spawn")  # a forked process cannot use the GPU
    counter, failed = spawn.Value("i", 0), spawn.Value("i", 0)
    given = (jobs, counter, failed, out, device)
    each = [spawn.Process(target=work_on, args=(*given, number)) for number in range(workers)]
    for process in each:
        process.start()
    while any(process.is_alive() for process in each) and time.monotonic() - began < seconds:
        time.sleep(0.2)
    late = [process for process in each if process.is_alive()]
    for process in late:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    done = min(counter.value, len(jobs)) - len(late) - failed.value
    print(
        f"{done} of {len(jobs)} jobs done in {time.monotonic() - began:.0f} s; {failed.value} failed, see {out}/*.log"
    )
    for job in jobs:
        rows, brought = job.own(out) / ROWS, job.folder / ROWS
        if rows.exists():
            *found, _ = rows.read_bytes().split(b"\n")  # after the last newline: a cut-off row, or nothing
            job.folder.mkdir(parents=True, exist_ok=True)
            there = set(brought.read_bytes().split(b"\n")) if brought.exists() else set[bytes]()
            with open(brought, "ab") as file:
                file.writelines(line + b"\n" for line in found if line not in there)


def sum_up(path: Path, out: Path) -> None:
    """Write the means of the commands that a results file names."""
    runs, means = list[dict](), list[Mean]()
    for rows in sorted((out / path.stem).glob(f"*/{ROWS}"), key=lambda rows: int(rows.parent.name)):
        own, found = read_rows(rows)
        runs += own
        means += summarise(found)
    asking.write_means(out / f"{path.stem}.jsonl", runs, means)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this many seconds")
    given = parser.parse_args()
    out = given.out.absolute()
    jobs = planned(out, given.sources)
    print(f"{len(jobs)} jobs", flush=True)
    run(jobs, out / "jobs", given.device, given.workers, given.seconds)
    for source in given.sources:
        if source.endswith(".jsonl"):
            sum_up(Path(source), out)
