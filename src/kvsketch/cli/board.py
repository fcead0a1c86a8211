"""The work of `kvsketch bench all`: its plans, their runs, and a page of the rows that are there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.progress import MofNCompleteColumn
from rich.table import Table

from kvsketch.cli.app import check_folder, output, progress_bar, say_no_pictures
from kvsketch.cli.bench import MODES, check_able, describe, measure
from kvsketch.cli.bench_error_inputs import Texts
from kvsketch.cli.notes import say
from kvsketch.cli.options import REPLY, is_ours
from kvsketch.evaluation.results.names import ANSWERS, FITTED, PROMPTS, SPEED, TEXTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvsketch.evaluation.answers.plan import Plan as AnswerPlan
    from kvsketch.evaluation.board.content import Content
    from kvsketch.evaluation.board.gathering import Rows
    from kvsketch.evaluation.board.plan import Choice
    from kvsketch.evaluation.board.timed import Plan as TimedPlan
    from kvsketch.evaluation.layers.plan import Prompt
    from kvsketch.evaluation.texts.plan import Plan as TextPlan

PAGE = "board.html"
NEXT = 128  # tokens that are predicted after a window


@dataclass(frozen=True, kw_only=True)
class Given:
    """The options, all of which are checked before a model is loaded."""

    out: Path
    model: str | None
    able: float | None
    beside: Sequence[Path]
    methods: Sequence[str]
    index: Path | None
    heads: Sequence[str]
    keeps: Sequence[float]
    tasks: Sequence[str]
    lengths: Sequence[int]
    samples: int
    asked: str
    haystack: Sequence[Path]
    texts: Texts
    windows: int
    turns: int
    steps: int
    fit: bool
    seed: int
    batch: int
    max_new_tokens: int | None
    raw: bool

    def __post_init__(self) -> None:
        check_folder("--out", self.out)
        check_able(self.able)
        assert all((self.choice, self.answers, self.predictions)), "read before a model is loaded"
        for folder in self.beside:
            if not (folder / ANSWERS).is_file():
                raise ValueError(f"--beside must name a folder with {ANSWERS} of another package, got {folder}")

    @cached_property
    def choice(self) -> "Choice":
        """The methods that are compared."""
        from kvsketch.evaluation.board.plan import Choice

        index = None if self.index is None else str(self.index)
        return Choice(methods=self.methods, heads=self.heads, keeps=self.keeps, index=index)

    @cached_property
    def answers(self) -> "list[AnswerPlan]":
        """Plans of what is asked, but for the methods: in noise, and in texts if some are given."""
        from kvsketch.evaluation.answers.plan import Plan
        from kvsketch.evaluation.tasks import TASKS
        from kvsketch.evaluation.tasks.haystack import haystack_of

        if self.asked not in MODES:
            raise ValueError(f"--asked must be before, after or both, got {self.asked!r}")
        own = is_ours(self.model)
        made = Plan(
            tasks=self.tasks, methods=("exact",), lengths=self.lengths, asked=MODES[self.asked], samples=self.samples,
            wording="compact" if own else "official", seed=self.seed, batch=self.batch, raw=self.raw,
            max_new_tokens=REPLY if own and self.max_new_tokens is None else self.max_new_tokens,
        )  # fmt: skip
        hiding = [name for name in self.tasks if TASKS[name].hides]
        if not self.haystack:
            return [made]
        hidden = replace(made, haystack=haystack_of(self.haystack))  # refuses texts where no task hides anything
        return [made, replace(hidden, tasks=hiding)]

    @cached_property
    def predictions(self) -> "TextPlan":
        """Windows of texts, as long as the longest prompts."""
        from kvsketch.evaluation.texts.plan import Plan

        return Plan(methods=("uniform",), tokens=max(self.lengths), next=NEXT, windows=self.windows)

    @cached_property
    def timed(self) -> "TimedPlan":
        """A document as long as the longest prompts."""
        from kvsketch.evaluation.board.timed import Plan

        return Plan(methods=(), tokens=max(self.lengths), turns=self.turns, steps=self.steps)


class Board:
    """A model, and all that is measured on it."""

    def __init__(self, given: Given, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
        import torch

        from kvsketch.evaluation.board.plan import chosen
        from kvsketch.huggingface import make_cache
        from kvsketch.huggingface.identity import describe_model

        self.given, self.model, self.tokenizer = given, model, tokenizer
        self.chosen = chosen(given.choice, lambda: describe_model(model))
        self._check_lengths()
        self.fingerprint = str(make_cache(model).model.fingerprint())
        self.about = describe(model, given.model, self.fingerprint)
        document = given.timed.document(lambda text: tokenizer(text)["input_ids"])
        self.document = torch.tensor([document], device=model.device)
        self.methods = self._fitted() if given.fit else dict.fromkeys(["exact", *self.chosen.specs])
        every = list(self.methods)
        self.timed = replace(given.timed, methods=every)
        self.answers = [replace(plan, methods=every) for plan in given.answers]
        self.predictions = replace(given.predictions, methods=every[1:])
        self.texts: list[Prompt] = given.texts.read(tokenizer, model) if given.texts.files else []
        for text in self.texts:
            self.predictions.starts(text)  # refuses a text that is too short now, not after hours

    def _check_lengths(self) -> None:
        """Refuse prompts that are longer than the model's context."""
        from kvsketch.caches.registry import parse_spec
        from kvsketch.huggingface.rereading import check_room_behind
        from kvsketch.huggingface.supported import check_context

        longest = max(self.given.lengths)
        check_context(self.model, longest + NEXT, "a prompt and what follows it have")
        if any(config.askings.behind for config in map(parse_spec, self.chosen.specs)):
            check_room_behind(self.model, longest, "a prompt")

    def _fitted(self) -> dict[str, float | None]:
        """Specs that hold what their budget says, each with that budget; known ones are read from the folder."""
        from kvsketch.evaluation.answers.runner import read_together
        from kvsketch.evaluation.board.equal import Fitter
        from kvsketch.evaluation.board.lines import line_of
        from kvsketch.evaluation.board.names import FITTED_KEY
        from kvsketch.evaluation.results.rows import RowsFile
        from kvsketch.huggingface import make_cache

        together = min(read_together(make_cache(self.model), self.given.batch), self.given.samples)
        fitter = Fitter(self.model, self.document[:, : self.given.timed.tokens], together)
        rows = RowsFile(self.given.out / FITTED, self._about(self.chosen.specs), FITTED_KEY)
        _show_progress(fitter.run(self.chosen.specs, rows), len(self.chosen.specs))
        found = fitter.found(rows)
        return {"exact": None} | {found[spec]: line_of(spec).keep for spec in self.chosen.specs}

    # -- measuring

    def _about(self, methods: "Sequence[str]") -> dict[str, object]:
        """What rows of these methods are made with."""
        from kvsketch.caches.registry import parse_spec
        from kvsketch.evaluation.results.rows import LEARNT
        from kvsketch.huggingface.identity import Identity

        return self.about | {LEARNT: Identity(self.model).learnt(map(parse_spec, methods))}

    def measure(self) -> None:
        """Measure the rows that are missing."""
        from kvsketch.evaluation.board.prompts import write_prompts

        given = self.given
        note = partial(
            write_prompts, given.out / PROMPTS, self.about
        )  # before measuring: other packages may answer them meanwhile
        for plan in self.answers:
            measure(plan, self.model, self.tokenizer, given.model, given.out, given.able, before=note)
        if self.texts:
            self._predict()
        if given.turns:
            self._time()

    def _predict(self) -> None:
        from kvsketch.evaluation.results.rows import RowsFile
        from kvsketch.evaluation.texts import measure as texts
        from kvsketch.evaluation.texts.plan import KEY

        rows = RowsFile(self.given.out / TEXTS, self._about(self.predictions.methods), KEY)
        total = len(self.texts) * self.predictions.windows * len(self.predictions.configs)
        _show_progress(texts.run(self.model, self.texts, self.predictions, rows), total)

    def _time(self) -> None:
        from kvsketch.evaluation.board import speed
        from kvsketch.evaluation.board.names import SPEED_KEY
        from kvsketch.evaluation.results.rows import RowsFile

        rows = RowsFile(self.given.out / SPEED, self._about(self.timed.methods), SPEED_KEY)
        steps = speed.run(self.model, self.document, self.timed, rows)
        _show_progress(steps, len(self.timed.methods))

    # -- what is there

    def report(self) -> None:
        """Print the winners and write the page, from the rows that are there."""
        from kvsketch.evaluation.board.content import content

        rows = self._rows()
        if not any(rows.found.values()):
            raise ValueError(f"{self.given.out} has no rows yet")
        found = content(rows)
        output().print(winners_table(found))
        try:
            from kvsketch.evaluation.board.page import About, write_board
        except ImportError as error:
            say_no_pictures(str(error.name), self.given.out / ANSWERS)
            return
        about = About(
            model=str(self.about["model"]), command=str(self.about["command"]), runs=rows.runs, able=self.given.able,
            left_out=self.chosen.left_out, agreement=rows.agreement(),
        )  # fmt: skip
        say(f"rows in {self.given.out}, the board in {write_board(self.given.out / PAGE, found, about)}")

    def _rows(self) -> "Rows":
        """All rows that were asked for, also those of other packages."""
        from kvsketch.evaluation.board.gathering import Rows, Wanted
        from kvsketch.evaluation.results.rows import key_of
        from kvsketch.evaluation.texts.plan import KEY

        plan, given, rows = self.predictions, self.given, Rows()
        labels = [
            (text, start, method) for text in self.texts for start in plan.starts(text) for method in plan.configs
        ]
        wanted = Wanted(
            methods=self.methods, keeps=set(given.keeps), answers=self.answers,
            texts={key_of(plan.labels(*each), KEY) for each in labels}, speed=self.timed,
        )  # fmt: skip
        rows.add(given.out, wanted, self.fingerprint, own=True)
        for folder in given.beside:
            rows.add(folder, wanted, self.fingerprint, own=False)
        return rows


def winners_table(board: "Content") -> Table:
    """A table of the best of each column and budget, and how many are level with it."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, right in (("kept", True), ("", False), ("best", False), ("", True), ("level", True)):
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for section in board.sections:
        for number, column in enumerate(board.columns):
            best, level = section.winners(number)
            title = f"{column.title}, {column.where}" if column.where else column.title
            if best is None:
                table.add_row(f"{section.keep:g}", title, "nobody within the budget", "", "")
                continue
            line, cell = best.line, best.cells[number]
            name = f"{line.name} {line.heads}{f' [{line.package}]' * bool(line.package)}"
            table.add_row(f"{section.keep:g}", title, name, "" if cell is None else cell.figure.text, str(len(level)))
    return table


def _show_progress(steps: Iterator[tuple[str, int]], total: int) -> None:
    with progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task("reading", total=total)
        for label, settled in steps:
            bar.update(task, advance=settled, description=label)
