"""`kvsketch bench`: methods side by side on tasks with right answers; a run that was stopped can be continued."""

import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.progress import MofNCompleteColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from kvsketch.caches.recommended import FOR_BOTH
from kvsketch.cli.app import MOST, check_folder, listed, numbers, output, progress_bar, reported, say_no_pictures, specs
from kvsketch.cli.models import load_model
from kvsketch.cli.notes import say
from kvsketch.cli.options import Device, ModelName, Precision, is_ours
from kvsketch.editions import EMBEDDED
from kvsketch.evaluation.results.names import ANSWERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvsketch.evaluation.answers.plan import Asked, Place, Plan
    from kvsketch.evaluation.answers.runner import Runner
    from kvsketch.evaluation.answers.summary import Mean
    from kvsketch.evaluation.results.rows import RowsFile

WIDEST = 38  # letters of a method in a line of a table; the rest goes to the next line
SUITES = {
    "lines": "Records of lines, one of which is asked for.",
    "needle": "Needles in noise or in a text of yours.",
    "ruler": "RULER's needles, variables and words.",
    "infinite": "InfiniteBench's pass keys, numbers, pairs and sums.",
}
NOTE = "Scores are means over n prompts, with Wilson's 95 % interval; bytes as percentages of a full cache's."
LETTERS = 3  # a token has at least so many
METHODS = f"exact; {FOR_BOTH}; streaming_llm(keep=0.25); uniform(keep=0.25)"
MODES: "dict[str, tuple[Asked, ...]]" = {"before": ("before",), "after": ("after",), "both": ("before", "after")}


class Suites(TyperGroup):
    """The commands below `bench`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Refuse an unknown suite with a message of one line, as for all other mistakes."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            raise ValueError(f"unknown suite {args[0]!r}; there are {', '.join(self.commands)}")
        return super().resolve_command(ctx, args)


bench = typer.Typer(cls=Suites, no_args_is_help=True)
AskedOption = Annotated[
    str, typer.Option(help="When the question is known: before the cache is compressed, after, or both.")
]
WordingOption = Annotated[
    str | None,
    typer.Option(
        help="Wording of the prompts: official (the default), or compact, for the embedded model and its default."
    ),
]
HaystackOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="A text file to hide needles in, instead of noise; repeat for more, which take turns. :sentences is the "
        "noise of version 0.2."
    ),
]
AbleOption = Annotated[
    float | None,
    typer.Option(
        help="Measure only tasks and lengths where exact scores at least this (0 to 1) on 20 prompts asked first."
    ),
]
NewTokensOption = Annotated[
    int | None, typer.Option(min=1, max=MOST, help="Most tokens of an answer, instead of the task's own limit.")
]


def bench_suite(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the result rows, the pictures and the page.")],
    model: ModelName = None,
    methods: Annotated[str, typer.Option("--methods", "-m", help="Methods, as specs with ; between them.")] = METHODS,
    lengths: Annotated[str, typer.Option(help="Lengths of prompts in tokens, with commas.")] = "1000,2000,4000",
    samples: Annotated[int, typer.Option(min=1, max=MOST, help="Prompts for each task, length and depth.")] = 200,
    tasks: Annotated[str | None, typer.Option(help="Tasks of the suite, with commas; all if left out.")] = None,
    asked: AskedOption = "both",
    depths: Annotated[
        str | None,
        typer.Option(help="Depths of the needle from 0 (start) to 1 (end), with commas; anywhere if left out."),
    ] = None,
    wording: WordingOption = None,
    haystack: HaystackOption = None,
    cases: Annotated[Path | None, typer.Option(help="A file of LongEval's lines cases, instead of new ones.")] = None,
    seed: Annotated[int, typer.Option(help="Number of the first sample; the others follow it.")] = 0,
    batch: Annotated[int, typer.Option(min=1, max=MOST, help="Prompts read together, as one batch.")] = 8,
    able: AbleOption = None,
    max_new_tokens: NewTokensOption = None,
    dtype: Precision = "auto",
    device: Device = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not use the model's chat template.")] = False,
) -> None:
    """Measure what methods do to a model's answers. Run it again to go on after an interruption."""
    suite = str(context.command.name)
    check_folder("--out", out)
    check_able(able)
    usual = "compact" if is_ours(model) and not cases else "official"
    plan = _plan(
        suite, tasks, methods, lengths, depths, asked, wording or usual, haystack, cases, samples=samples, seed=seed,
        batch=batch, max_new_tokens=max_new_tokens, raw=raw,
    )  # fmt: skip
    say_if_short(plan)
    language_model, tokenizer = load_model(model, dtype, device)
    with reported(lambda: show(out, plan.tasks, able)):
        measure(plan, language_model, tokenizer, model, out, able)


def _plan(
    suite: str, tasks: str | None, methods: str, lengths: str, depths: str | None, asked: str, wording: str,
    haystack: Sequence[Path] | None, cases: Path | None, **others: Any,
) -> "Plan":  # fmt: skip
    """The plan that the options name."""
    from kvsketch.evaluation.answers.plan import Plan
    from kvsketch.evaluation.tasks import WORDINGS
    from kvsketch.evaluation.tasks.haystack import haystack_of
    from kvsketch.evaluation.tasks.longeval_files import read_cases

    if asked not in MODES:
        raise ValueError(f"--asked must be before, after or both, got {asked!r}")
    if wording not in WORDINGS:
        raise ValueError(f"--wording must be one of {', '.join(WORDINGS)}, got {wording!r}")
    if cases is not None and suite != "lines":
        raise ValueError(f"--cases are LongEval's lines: they need the suite lines, got {suite!r}")
    return Plan(
        tasks=_tasks(suite, tasks),
        methods=specs(methods),
        lengths=numbers("--lengths", lengths, int),
        asked=MODES[asked],
        depths=numbers("--depths", depths or "", float),
        wording=wording,
        haystack=haystack_of(haystack or ()),
        cases=None if cases is None else read_cases(cases),
        **others,
    )


def say_if_short(plan: "Plan") -> None:
    """Warn of a haystack that is shorter than the longest prompt, so that its sentences are repeated."""
    longest = max(plan.lengths)
    if plan.haystack.letters < LETTERS * longest:
        say(
            f"a text of --haystack has only {plan.haystack.letters:,} letters. Prompts of {longest:,} tokens need "
            "more, so its sentences are repeated, and what is hidden in such noise is found too easily"
        )


def report(
    folder: Annotated[Path, typer.Argument(help="The --out folder of a benchmark of answers.")],
    able: Annotated[
        float | None, typer.Option(help="Show only tasks and lengths where exact scores at least this (0 to 1).")
    ] = None,
) -> None:
    """Make table, pictures and page of a benchmark of answers again, also while it runs or after it was stopped."""
    if not (folder / ANSWERS).is_file():
        raise ValueError(
            f"{folder} has no {ANSWERS}: name a folder that was --out of a bench of answers. To see what other "
            "suites have measured repeat their command: nothing is measured twice"
        )
    check_able(able)
    show(folder, able=able)


def check_able(able: float | None) -> None:
    """Refuse a number that is no score."""
    if able is not None and not 0 <= able <= 1:
        raise ValueError(f"--able must be a score from 0 to 1, got {able:g}")


def show(folder: Path, tasks: Sequence[str] | None = None, able: float | None = None) -> None:
    """Print the table of some tasks, or of all; write pictures and the page if matplotlib is installed.

    With `able`, the scores of exact come first, and then only tasks and lengths where they are at least `able`.
    """
    from kvsketch.evaluation.answers.able import able_part
    from kvsketch.evaluation.answers.summary import summarise
    from kvsketch.evaluation.results.rows import read_rows

    rows = read_rows(folder / ANSWERS)[1] if (folder / ANSWERS).is_file() else []
    wanted = [row for row in rows if tasks is None or row["task"] in tasks]
    if not wanted:
        raise ValueError(f"{folder / ANSWERS} has no rows yet")
    if able is not None:
        held, wanted = able_part(wanted, able)
        output().print(able_table(held, able))
    if wanted:
        output().print(tables_of(summarise(wanted)))
    say(NOTE)
    write_report(folder, able)


def measure(
    plan: "Plan", model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", name: str | None, out: Path,
    able: float | None = None, before: "Callable[[Runner], None]" = lambda runner: None,
) -> None:  # fmt: skip
    """Run a plan, or what the model can do of it, and add its rows to a folder; `before` gets the runner first."""
    from kvsketch.evaluation.answers.able import first_prompts, unable
    from kvsketch.evaluation.answers.runner import Runner
    from kvsketch.evaluation.results.rows import LEARNT, RowsFile, read_rows

    runner = Runner(model, tokenizer, plan)
    if not runner.template and not plan.raw:
        say("the tokenizer has no chat template: prompts are given to the model as they are")
    file = RowsFile(out / ANSWERS, describe(model, name, runner.fingerprint) | {LEARNT: runner.learnt})
    if able is not None:
        first = Runner(model, tokenizer, first_prompts(plan))
        _fill(file, first)
        left_out = unable(first, read_rows(file.path)[1], able)
        say_left_out(left_out, able)
        runner = Runner(model, tokenizer, replace(plan, left_out=left_out))
    before(runner)
    _fill(file, runner)


def _fill(file: "RowsFile", runner: "Runner") -> None:
    """Measure the rows that are missing, with a progress bar."""
    from kvsketch.evaluation.results.rows import key_of

    plan = runner.plan
    with progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task("reading", total=plan.answers)
        for step in runner.run(file.done, key_of):
            file.add(step.rows)
            bar.update(task, advance=step.answers, description=step.label)


def say_left_out(left_out: "Mapping[Place, Sequence[float]]", able: float) -> None:
    """Print in one line what the model cannot do; nothing if it can do all."""
    if left_out:
        places = [
            f"{task}{f' at {length:,} tokens' * bool(length)}, {asked} ({fmean(scores):.2f}, n = {len(scores)})"
            for (task, length, asked), scores in left_out.items()
        ]
        say(f"left out, as the model scores less than {able:g} there with everything held: {'; '.join(places)}")


def describe(model: "PreTrainedModel", name: str | None, fingerprint: str) -> dict[str, Any]:
    """What a run's rows were made with: the model, the versions, the machine."""
    return about_run(name or EMBEDDED, fingerprint, str(model.dtype).removeprefix("torch."), model.device.type)


def about_run(name: str, fingerprint: str, dtype: str, device: str, *, program: str = "kvsketch") -> dict[str, Any]:
    """The same from names, for a model or for made-up data."""
    from kvsketch.evaluation.results.provenance import provenance

    about = {"model": name, "fingerprint": fingerprint, "dtype": dtype, "device": device}
    return about | {"command": f"{program} {shlex.join(sys.argv[1:])}"} | provenance()


def _tasks(suite: str, names: str | None) -> list[str]:
    from kvsketch.evaluation.tasks import TASKS

    known = [name for name, task in TASKS.items() if task.suite == suite]
    wanted = known if names is None else listed(names)
    for name in wanted:
        if name not in known:
            raise ValueError(f"the suite {suite} has no task {name!r}; it has {', '.join(known)}")
    return wanted


def tables_of(means: "Sequence[Mean]") -> Group:
    """A table for each task, length and question mode, a line for each method; it fits into 80 columns with names."""
    from kvsketch.evaluation.answers.summary import ASKED

    looking = any(mean.looked_up is not None for mean in means)
    widest = max(len(mean.method) for mean in means)
    groups = defaultdict[str, list["Mean"]](list)
    for mean in means:
        groups[f"{mean.task}, {mean.length:,} tokens, {ASKED[mean.asked]}"].append(mean)
    parts = list[RenderableType]()
    for title, found in groups.items():
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("method", overflow="fold", min_width=min(widest, WIDEST))
        for heading in ("n", "score", "bytes", *(["read"] if looking else [])):
            table.add_column(heading, justify="right", no_wrap=True)
        for mean in found:
            read = "" if mean.looked_up is None else f"{mean.looked_up:.1%}"
            cells = [mean.method, f"{mean.count:,}", str(mean), f"{mean.share:.1%}"]
            table.add_row(*cells, *([read] if looking else []))
        parts += [Text(title, style="bold"), table]
    return Group(*parts)


def able_table(held: "Sequence[Mean]", able: float) -> Group:
    """The scores of exact, and whether each is high enough to count."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("task", overflow="fold")
    for heading in ("tokens", "question", "n", "score", "counts"):
        table.add_column(heading, justify="right", no_wrap=True)
    for mean in held:
        counts = "yes" if mean.score >= able else "no"
        table.add_row(mean.task, f"{mean.length:,}", mean.asked, f"{mean.count:,}", str(mean), counts)
    return Group(Text(f"With everything held: what counts is {able:g} or more", style="bold"), table)


def write_report(folder: Path, able: float | None = None) -> None:
    """Pictures and a page from a folder's rows, if matplotlib is installed."""
    rows_path = folder / ANSWERS
    try:
        from kvsketch.evaluation.answers.page import write_page
    except ImportError as error:
        say_no_pictures(str(error.name), rows_path)
        return
    say(f"rows in {rows_path}, pictures and tables in {write_page(rows_path, folder, able)}")
