"""Small faults that code could have: an inverted comparison, a constant off by one, two swapped arguments, or a missing
statement. `power.py` asks whether the tests would notice."""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    """One small fault: a statement of a file in another form."""

    path: str  # relative to src/kvsketch
    line: int
    kind: str
    before: str  # the statement, or its head if it contains others
    after: str


class Source:
    """A source file, and the faults that it could have."""

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
        """Where a statement's text begins and ends, without the statements inside it, in bytes."""
        start, end = self.span(statement)
        body = getattr(statement, "body", None)
        return (start, self.starts[body[0].lineno - 1]) if body else (start, end)

    def with_changed(self, start: int, end: int, new: str) -> str:
        """The whole text with these bytes replaced by `new`."""
        whole = self.text.encode()
        return (whole[:start] + new.encode() + whole[end:]).decode()

    def faults(self) -> Iterator[tuple[Fault, str]]:
        """Every fault, with the text of the file that contains it."""
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
            return  # texts of messages and conditions that can never occur do not matter here
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
        """Whether a name would be unknown without this statement: any use of the name would show that."""
        names = {
            node.id
            for target in getattr(statement, "targets", ())
            for node in ast.walk(target)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        around = self.tree
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef) and node.lineno < statement.lineno <= (node.end_lineno or 0):
                around = node  # the innermost function comes last
        known = {argument.arg for argument in ast.walk(around) if isinstance(argument, ast.arg)}
        for node in ast.walk(around):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.lineno < statement.lineno:
                known.add(node.id)
        return not names <= known


def _plain(text: str) -> str:
    return " ".join(text.split())


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """All statements that do something: no imports, no docstrings, nothing that only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Pass):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring, or the `...` of an empty body
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
    """The source files of the core."""
    package = root / "src" / "kvsketch"
    paths = [package / "attention.py", *(path for part in PARTS for path in sorted((package / part).rglob("*.py")))]
    return [Source(path, str(path.relative_to(package))) for path in paths if path.exists()]


def draw(root: Path, count: int, seed: int, known: list[Fault]) -> list[tuple[Fault, str]]:
    """`count` faults: the known ones that are still possible, and newly drawn ones in place of the others."""
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
