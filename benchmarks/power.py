"""Would the tests notice? Puts small faults into the code, one at a time, and sees whether a test fails.

    python benchmarks/power.py --out docs/results/power.jsonl

A fault is a line of the core with a comparison turned round, a constant off by one, two arguments swapped, or nothing
in its place. Faults are drawn from the syntax trees by a seed. For each one, the tests that execute its line are run,
quick ones first, until one fails. A list that is there already is used again; what is not to be found in the code any
more is drawn anew.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

from coverage import CoverageData

ROOT = Path(__file__).parent.parent
PARTS = ("caches", "kernels", "huggingface", "algorithms")
KINDS = ("comparison", "constant", "arguments", "line")
TURNED = {
    ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Delete, ast.Break, ast.Continue)
SYMMETRIC = {"max", "min", "maximum", "minimum", "transpose", "logaddexp", "equal"}  # swapped arguments are no fault


@dataclass(frozen=True)
class Fault:
    """One small fault: in this file, this statement would read otherwise."""

    path: str  # below src/kvsketch
    line: int
    kind: str
    before: str  # the statement, or its head
    after: str


class Source:
    """A file of the code, and the faults it could have."""

    def __init__(self, path: Path, name: str) -> None:
        self.name, self.text = name, path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.lines = self.text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line.encode()))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node's text begins and ends, in bytes."""
        return (
            self.starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            self.starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def head(self, statement: ast.stmt) -> tuple[int, int]:
        """The same of a statement without the statements inside it."""
        start, end = self.span(statement)
        body = getattr(statement, "body", None)
        return (start, self.starts[body[0].lineno - 1]) if body else (start, end)

    def with_changed(self, start: int, end: int, new: str) -> str:
        """The whole text with other text there."""
        whole = self.text.encode()
        return (whole[:start] + new.encode() + whole[end:]).decode()

    def faults(self) -> Iterator[tuple[Fault, str]]:
        """Every fault, with the text of the file that has it."""
        for statement in _statements(self.tree):
            start, end = self.head(statement)
            for kind, where, new in self._changes(statement):
                text = self.with_changed(*where, new)
                try:
                    changed = ast.parse(text)
                except SyntaxError:
                    continue
                if ast.dump(changed) == ast.dump(self.tree):
                    continue
                before = self.text.encode()[start:end].decode()
                moved = len(new.encode()) - (where[1] - where[0])
                after = text.encode()[start : end + moved].decode()
                yield Fault(self.name, statement.lineno, kind, _plain(before), _plain(after)), text

    def _changes(self, statement: ast.stmt) -> Iterator[tuple[str, tuple[int, int], str]]:
        if isinstance(statement, SIMPLE) and not self._binds_first(statement):
            yield "line", self.span(statement), "pass"
        if isinstance(statement, ast.Raise | ast.Assert):
            return  # what a message says, and what can never be, is no matter here
        for node in _expressions(statement):
            if isinstance(node, ast.Compare) and type(node.ops[0]) in TURNED:
                between = self.span(node.left)[1], self.span(node.comparators[0])[0]
                gap = self.text.encode()[slice(*between)].decode()
                if not gap.strip("( )") or "\n" in gap or "(" in gap or ")" in gap:
                    continue
                yield "comparison", between, f" {TURNED[type(node.ops[0])]} "
            if isinstance(node, ast.Constant) and type(node.value) is int:
                yield "constant", self.span(node), repr(node.value + 1)
            if isinstance(node, ast.Call) and len(node.args) > 1:
                first, second = node.args[:2]
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if isinstance(first, ast.Starred) or isinstance(second, ast.Starred) or called in SYMMETRIC:
                    continue
                one, other = self.span(first), self.span(second)
                whole = self.text.encode()
                swapped = whole[slice(*other)] + whole[one[1] : other[0]] + whole[slice(*one)]
                yield "arguments", (one[0], other[1]), swapped.decode()

    def _binds_first(self, statement: ast.stmt) -> bool:
        """Whether a name would be unknown without this statement: that shows wherever the name is used."""
        names = {
            node.id
            for target in getattr(statement, "targets", ())
            for node in ast.walk(target)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        around = self.tree
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef) and node.lineno < statement.lineno <= (node.end_lineno or 0):
                around = node  # the innermost comes last
        known = {argument.arg for argument in ast.walk(around) if isinstance(argument, ast.arg)}
        for node in ast.walk(around):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.lineno < statement.lineno:
                known.add(node.id)
        return not names <= known


def _plain(text: str) -> str:
    return " ".join(text.split())


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """All that do something: no imports, no docstrings, nothing that only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Pass):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring, or the dots of an empty body
        if isinstance(node, ast.stmt):
            yield node
        yield from _statements(node)


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement's head that are computed: no annotations, no decorators, no text."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        parts: list[ast.AST] = []
        if isinstance(statement, ast.FunctionDef):
            parts = [d for d in (*statement.args.defaults, *statement.args.kw_defaults) if d is not None]
    elif isinstance(statement, ast.AnnAssign):
        parts = [statement.value] if statement.value else []
    else:
        parts = [part for part in ast.iter_child_nodes(statement) if not isinstance(part, ast.stmt)]
    while parts:
        node = parts.pop(0)
        if isinstance(node, ast.JoinedStr | ast.ExceptHandler | ast.match_case):
            continue
        if isinstance(node, ast.expr):
            yield node
        parts.extend(ast.iter_child_nodes(node))


def sources(root: Path) -> list[Source]:
    """The files of the core."""
    package = root / "src" / "kvsketch"
    paths = [package / "attention.py", *(path for part in PARTS for path in sorted((package / part).rglob("*.py")))]
    return [Source(path, str(path.relative_to(package))) for path in paths if path.exists()]


def draw(root: Path, count: int, seed: int, known: list[Fault]) -> list[tuple[Fault, str]]:
    """So many faults: those known that are still possible, and others in the place of those that are not."""
    every = [found for source in sources(root) for found in source.faults()]
    by_text = {(f.path, f.kind, f.before, f.after): (f, text) for f, text in every}
    chosen = [by_text[key] for f in known if (key := (f.path, f.kind, f.before, f.after)) in by_text]
    taken = {id(found) for found in chosen}
    generator = random.Random(f"{seed}/{len(known)}")
    generator.shuffle(every)
    while len(chosen) < count:
        fewest = min(KINDS, key=lambda kind: sum(fault.kind == kind for fault, _ in chosen))
        used = {(fault.path, fault.line) for fault, _ in chosen}
        found = next(
            f for f in every if f[0].kind == fewest and id(f) not in taken and (f[0].path, f[0].line) not in used
        )
        taken.add(id(found))
        chosen.append(found)
    return chosen[:count]


@dataclass(frozen=True)
class Suite:
    """The tests, how long each takes, and which lines it executes."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, set[str]]]  # by file and line

    def tests_of(self, fault: Fault) -> list[str]:
        """The tests that execute a fault's line, quick ones first; of a line that runs on import, those of its file."""
        here = self.lines.get(fault.path, {})
        found = here.get(fault.line, set())
        if not found:
            found = set().union(*here.values()) if here else set()
        return sorted(found & self.seconds.keys(), key=self.seconds.__getitem__)


def environment(root: Path) -> dict[str, str]:
    """Where tests find the code under test, in this process and in those that they start."""
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
    """What a run with coverage has left."""
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
    """A copy of what the tests need."""
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
    parser.add_argument("--out", type=Path, required=True, help="the list with its results; used again if it is there")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="faults tried side by side")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds beyond three times what tests take")
    parser.add_argument("--watched", type=Path, help="keep the copy that tests were watched in here, and use it again")
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
