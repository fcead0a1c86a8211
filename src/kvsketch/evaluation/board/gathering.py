"""The rows of a folder that a board asks for, whenever they were made and by whichever package."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsketch.evaluation.answers.plan import Plan
from kvsketch.evaluation.board import timed
from kvsketch.evaluation.board.lines import OWN, Line, line_of
from kvsketch.evaluation.board.names import SPEED_KEY
from kvsketch.evaluation.results.names import ANSWERS, SPEED, TEXTS
from kvsketch.evaluation.results.rows import KEY, Row, key_of, read_rows
from kvsketch.evaluation.tasks import TASKS
from kvsketch.evaluation.texts.plan import KEY as TEXT_KEY

KEYS: dict[str, Sequence[str]] = {ANSWERS: KEY, TEXTS: TEXT_KEY, SPEED: SPEED_KEY}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a board asks for. `methods`: each with the budget of its line; `texts`: keys of rows."""

    methods: Mapping[str, float | None]
    keeps: Collection[float]
    answers: Sequence[Plan]
    texts: Collection[tuple[Any, ...]]
    speed: timed.Plan

    def has(self, name: str, row: Row, package: str) -> bool:
        """Whether a row of the file `name` is asked for; other packages have methods of their own."""
        if package == OWN and row["method"] not in self.methods:
            return False
        if package != OWN and line_of(row["method"], package).keep not in (None, *self.keeps):
            return False
        if name == TEXTS:
            return key_of(row, TEXT_KEY) in self.texts
        if name == SPEED:
            return key_of(row, SPEED_KEY) == key_of(self.speed.labels(row["method"]), SPEED_KEY)
        return any(asked_by(plan, row) for plan in self.answers)


@dataclass(frozen=True)
class Rows:
    """All rows that were measured, by file, each with its line; and the runs that made them."""

    found: dict[str, list[tuple[Line, Row]]] = field(default_factory=lambda: {name: [] for name in KEYS})
    runs: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, folder: Path, wanted: Wanted, fingerprint: str, *, own: bool) -> None:
        """Add the rows of a folder, which must be of the model with this fingerprint."""
        for name, key in KEYS.items():
            if not (folder / name).is_file():
                continue
            runs, rows = read_rows(folder / name, key)
            package = OWN if own else str(runs[-1].get("package", folder.name))
            if any(run.get("fingerprint") != fingerprint for run in runs):
                raise ValueError(
                    f"{folder / name} holds rows of another model, {runs[-1].get('model')!r}: name rows of this one"
                )
            self.runs.extend(run for run in runs if run not in self.runs)
            for row in rows:
                if wanted.has(name, row, package):
                    budget = wanted.methods.get(row["method"]) if own else None
                    self.found[name].append((line_of(row["method"], package, budget), row))

    def beside_exact(self, name: str) -> list[tuple[Line, Row]]:
        """The rows of a file, each with the bytes that exact holds of the same text.

        Rows of predictions have these bytes; where exact was not asked, they are those of all tokens' keys and values.
        """
        exact, found = self._exact(name), list[tuple[Line, Row]]()
        for line, row in self.found[name]:
            own = exact.get(_without_method(name, row), {})
            found.append((line, {"exact_nbytes": own.get("nbytes", row["full_nbytes"])} | row))
        return found

    def _exact(self, name: str) -> dict[tuple[Any, ...], Row]:
        """The rows of our exact, by all labels but the method."""
        found = self.found[name]
        return {_without_method(name, row): row for line, row in found if line.reference and line.package == OWN}

    def agreement(self) -> dict[str, tuple[int, int]]:
        """For each other package, how many of its answers with everything held equal ours, and of how many."""
        ours, found = self._exact(ANSWERS), dict[str, tuple[int, int]]()
        for line, row in self.found[ANSWERS]:
            own = ours.get(_without_method(ANSWERS, row))
            if line.reference and line.package != OWN and own is not None:
                same, count = found.get(line.package, (0, 0))
                found[line.package] = same + (row["output"] == own["output"]), count + 1
        return found


def _without_method(name: str, row: Row) -> tuple[Any, ...]:
    return key_of(row, [part for part in KEYS[name] if part != "method"])


def asked_by(plan: Plan, row: Row) -> bool:
    """Whether this row's prompt belongs to a plan."""
    if row["task"] not in plan.tasks or row["cases"] is not None or row["depth"] is not None:
        return False
    if (row["wording"], row["haystack"]) != (plan.wording, plan.haystack.name) or (plan.raw and row["template"]):
        return False
    if row["new_tokens"] != (plan.max_new_tokens or TASKS[row["task"]].new_tokens):
        return False
    numbers = range(plan.seed, plan.seed + plan.samples)
    return row["sample"] in numbers and row["length"] in plan.lengths and row["asked"] in plan.asked
