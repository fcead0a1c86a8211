"""Would the tests notice? Puts small faults into the code, one at a time, and sees whether a test fails.

    python benchmarks/power.py --out docs/results/power.jsonl

A fault is a line of the core with an inverted comparison, a constant off by one, or two swapped arguments, or a missing
line. Faults are drawn from the syntax trees by a seed. For each one, the tests that execute its line are run, quick
ones first, until one fails. An existing list is used again; faults that the code can no longer have are drawn anew.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

from coverage import CoverageData

from faults import Fault, draw

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Suite:
    """The tests, how long each takes, and which lines it executes."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, set[str]]]  # tests by file and line

    def tests_of(self, fault: Fault) -> list[str]:
        """The tests that execute a fault's line, quick first; those of its file if it runs on import."""
        here = self.lines.get(fault.path, {})
        found = here.get(fault.line, set())
        if not found:
            found = set().union(*here.values()) if here else set()
        return sorted(found & self.seconds.keys(), key=self.seconds.__getitem__)


def environment(root: Path) -> dict[str, str]:
    """The environment in which tests and the processes they start find the code under `root`."""
    return os.environ | {"PYTHONPATH": str(root / "src"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def watch(root: Path) -> Suite:
    """Run all tests once, to see which lines each one executes."""
    report = root / "times.xml"
    command = [
        sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider",
        "--cov=kvsketch", "--cov-context=test", "--cov-report=", f"--junitxml={report}", "-o", "junit_family=xunit1",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=root, env=environment(root), check=False)
    if done.returncode:
        raise SystemExit("tests fail without any fault: mend them first")
    return read_suite(root)


def read_suite(root: Path) -> Suite:
    """The suite from the files that a run with coverage has left."""
    seconds = dict[str, float]()
    for case in ElementTree.parse(root / "times.xml").iter("testcase"):
        module = case.attrib["file"].removesuffix(".py").replace("/", ".")
        classes = case.attrib["classname"].removeprefix(module).strip(".").split(".")
        name = "::".join([case.attrib["file"], *filter(None, classes), case.attrib["name"]])
        seconds[name] = float(case.attrib["time"])
    data = CoverageData(str(root / ".coverage"))
    data.read()
    package, lines = root / "src" / "kvsketch", dict[str, dict[int, set[str]]]()
    for path in data.measured_files():
        found = data.contexts_by_lineno(path)
        lines[str(Path(path).relative_to(package))] = {
            line: {context.rsplit("|", 1)[0] for context in contexts if context} for line, contexts in found.items()
        }
    return Suite(seconds, lines)


def copied(folder: Path) -> Path:
    """Copy what the tests need into `folder`."""
    for name in ("src", "tests", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "figures"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def run_with(fault: Fault, text: str, suite: Suite, patience: float) -> dict[str, object]:
    """Put the fault into a copy, and run the tests that execute its line until one fails."""
    began, tests = time.monotonic(), suite.tests_of(fault)
    found: dict[str, object] = {**asdict(fault), "tests": len(tests), "caught_by": None}
    if not tests:
        return found
    with tempfile.TemporaryDirectory() as name:
        root = copied(Path(name))
        (root / "src" / "kvsketch" / fault.path).write_text(text, encoding="utf-8")
        (root / "chosen").write_text("\n".join(tests))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, "@chosen"], cwd=root, env=environment(root), capture_output=True, text=True,
                timeout=patience + 3 * sum(suite.seconds[test] for test in tests), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            found["caught_by"] = "no end in sight"
        else:
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
            if done.returncode:
                found["caught_by"] = failed[0].split(" - ")[0].split(" ", 1)[1] if failed else "nothing runs"
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the faults with results; used again if it exists")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="faults tried side by side")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds beyond three times what the tests take")
    parser.add_argument("--watched", type=Path, help="folder of the copy with watched tests; kept and used again")
    given = parser.parse_args()
    known = [json.loads(line) for line in given.out.read_text().splitlines()[1:]] if given.out.exists() else []
    fields = Fault.__dataclass_fields__
    faults = draw(ROOT, given.faults, given.seed, [Fault(**{name: row[name] for name in fields}) for row in known])
    with tempfile.TemporaryDirectory() as name:
        root = given.watched or Path(name)
        if not (root / ".coverage").exists():
            watch(copied(root))
        suite = read_suite(root)
    rows, lock = dict[int, dict[str, object]](), Lock()

    def one(number: int) -> None:
        row = run_with(*faults[number], suite, given.patience)
        with lock:
            rows[number] = row
            caught = row["caught_by"] or f"NOT CAUGHT by {row['tests']} tests"
            print(f"{len(rows)}/{len(faults)} {row['path']}:{row['line']} {row['kind']}: {caught}", flush=True)

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(one, range(len(faults))))
    caught = sum(row["caught_by"] is not None for row in rows.values())
    about = {"caught": caught, "faults": len(faults), "seed": given.seed, "tests": len(suite.seconds)}
    ordered = [about, *(rows[number] for number in sorted(rows))]
    given.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ordered), encoding="utf-8")
    print(f"{caught} of {len(faults)} faults were caught; the list is in {given.out}")


if __name__ == "__main__":
    main()
