"""The plan of a benchmark of answers: tasks, lengths and methods, checked before any work is done."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvsketch.evaluation.tasks import TASKS, Sample, Task, Wording
from kvsketch.evaluation.tasks.haystack import Grammar, Haystack

Asked = Literal["before", "after"]  # the question is known before the cache is compressed, or only afterwards
Place = tuple[str, int, Asked]  # a task, tokens of its prompts, and when the question is known


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Prompts of one kind."""

    task: Task
    length: int
    depth: float | None = None
    cases: str | None = None  # the name of a file of ready prompts


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be run: all prompts, and the methods that answer them."""

    tasks: Sequence[str]
    methods: Sequence[str]
    lengths: Sequence[int]
    asked: Sequence[Asked] = ("before", "after")
    samples: int = 200
    depths: Sequence[float] = ()  # of the needle; anywhere if there are none
    wording: Wording = "official"
    haystack: Haystack = field(default_factory=Grammar)
    seed: int = 0
    batch: int = 8
    max_new_tokens: int | None = None  # None: the task's own limit
    cases: tuple[str, Sequence[Sample]] | None = None  # a file's name and its ready prompts, instead of made-up ones
    raw: bool = False  # without the model's chat template
    left_out: Collection[Place] = ()

    def __post_init__(self) -> None:
        for name in self.tasks:
            if name not in TASKS:
                raise ValueError(f"unknown task {name!r}; there are {', '.join(TASKS)}")
        for name in ("samples", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.methods:
            raise ValueError("name at least one method, such as exact")
        for length in self.lengths:
            if length < 1:
                raise ValueError(f"lengths must be positive, got {length}")
        if not (self.tasks and self.asked and (self.lengths or self.cases)):
            raise ValueError("name at least one task, one length and one mode")
        if not isinstance(self.haystack, Grammar) and not any(TASKS[name].hides for name in self.tasks):
            raise ValueError(f"none of {', '.join(self.tasks)} hides anything in a text: leave out --haystack")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"a depth is a share of the document from 0 to 1, got {depth}")
        fixed = [name for name in self.tasks if not TASKS[name].takes_depth]
        if self.depths and fixed:
            raise ValueError(f"{', '.join(fixed)} cannot be told where answers lie: leave out the task, or the depths")
        if self.cases is not None and (self.seed or self.depths):
            raise ValueError("ready prompts are what they are: leave out seed and depths")
        if self.cases is not None and not self.cases[1]:
            raise ValueError(f"{self.cases[0]} has no cases")

    def cells(self) -> Iterator[Cell]:
        """All cells to run, short prompts first."""
        if self.cases is not None:  # the length of ready prompts is not chosen
            yield from (Cell(task=TASKS[name], length=0, cases=self.cases[0]) for name in self.tasks)
            return
        for length in sorted(self.lengths):
            for name in self.tasks:
                for depth in self.depths or (None,):
                    yield Cell(task=TASKS[name], length=length, depth=depth)

    def question_modes(self, cell: Cell) -> Sequence[Asked]:
        """When a cell's questions are known; where the document begins with the question, only before."""
        known = cell.task.asks_first and self.wording == "official"
        modes = [asked for asked in self.asked if asked == "before" or not known]
        return [asked for asked in modes if (cell.task.name, cell.length, asked) not in self.left_out]

    @property
    def prompts(self) -> int:
        """How many prompts a cell has."""
        return self.samples if self.cases is None else min(self.samples, len(self.cases[1]))

    @property
    def answers(self) -> int:
        """How many rows the plan makes, one for each answer."""
        return self.prompts * sum(len(self.question_modes(cell)) for cell in self.cells()) * len(self.methods)
