"""Rows of a folder that a board asks for: whenever they were made, and by whichever package."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsketch.evaluation.answers.plan import Plan
from kvsketch.evaluation.board import timed
from kvsketch.evaluation.board.lines import OWN, line_of
from kvsketch.evaluation.board.names import EXACT, SAME_PROMPT, SPEED_KEY
from kvsketch.evaluation.results.names import ANSWERS, SPEED, TEXTS
from kvsketch.evaluation.results.rows import KEY, Row, key_of, read_rows
from kvsketch.evaluation.tasks import TASKS
from kvsketch.evaluation.texts.plan import KEY as TEXT_KEY

KEYS: dict[str, Sequence[str]] = {ANSWERS: KEY, TEXTS: TEXT_KEY, SPEED: SPEED_KEY}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a board asks for; `texts` are keys of rows."""

    methods: Collection[str]
    keeps: Collection[float]
    answers: Sequence[Plan]
    texts: Collection[tuple[Any, ...]]
    speed: timed.Plan

    def has(self, name: str, row: Row, package: str) -> bool:
        """Whether a row of a file is one of these; other packages have methods of their own."""
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
    """Everything that was measured, each row with its package, by file; and what made it."""

    found: dict[str, list[tuple[str, Row]]] = field(default_factory=lambda: {name: [] for name in KEYS})
    runs: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, folder: Path, wanted: Wanted, fingerprint: str, *, own: bool) -> None:
        """The rows of a folder, which must be of the model with this fingerprint."""
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
            self.found[name].extend((package, row) for row in rows if wanted.has(name, row, package))

    def agreement(self) -> dict[str, tuple[int, int]]:
        """Of other packages: how many answers with everything held are as ours, and of how many."""
        held = [(package, row) for package, row in self.found[ANSWERS] if line_of(row["method"], package).name == EXACT]
        ours = {key_of(row, SAME_PROMPT): row["output"] for package, row in held if package == OWN}
        found = dict[str, tuple[int, int]]()
        for package, row in held:
            if package != OWN and key_of(row, SAME_PROMPT) in ours:
                same, count = found.get(package, (0, 0))
                found[package] = same + (row["output"] == ours[key_of(row, SAME_PROMPT)]), count + 1
        return found


def asked_by(plan: Plan, row: Row) -> bool:
    """Whether a plan has the prompt of this row."""
    if row["task"] not in plan.tasks or row["cases"] is not None or row["depth"] is not None:
        return False
    if (row["wording"], row["haystack"]) != (plan.wording, plan.haystack.name) or (plan.raw and row["template"]):
        return False
    if row["new_tokens"] != (plan.max_new_tokens or TASKS[row["task"]].new_tokens):
        return False
    numbers = range(plan.seed, plan.seed + plan.samples)
    return row["sample"] in numbers and row["length"] in plan.lengths and row["asked"] in plan.asked
