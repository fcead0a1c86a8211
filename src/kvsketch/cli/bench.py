"""`kvsketch bench`: tasks with right answers, methods side by side, rows that can be continued."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.table import Table
from typer.core import TyperGroup

from kvsketch.cli.app import load_model, numbers, progress_bar, say, say_no_pictures

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvsketch.evaluation.runner import Asked, Plan
    from kvsketch.evaluation.summary import Mean

ROWS = "rows.jsonl"
SUITES = {
    "lines": "Records of lines, one of which is asked for.",
    "needle": "Needles in noise or in a text of yours.",
    "ruler": "RULER's needles, variables and words.",
    "infinite": "InfiniteBench's pass keys, numbers, pairs and sums.",
}
METHODS = "exact; streaming_llm(keep=0.25); uniform(keep=0.25)"
ASKED: "dict[str, tuple[Asked, ...]]" = {"before": ("before",), "after": ("after",), "both": ("before", "after")}


class Suites(TyperGroup):
    """The commands below `bench`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Refuse an unknown suite in one line, as everything else is refused."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            raise ValueError(f"unknown suite {args[0]!r}; there are {', '.join(self.commands)}")
        return super().resolve_command(ctx, args)


bench = typer.Typer(cls=Suites, no_args_is_help=True)


def bench_suite(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", "-o", help="Rows, pictures and the page go to this folder.")],
    model: Annotated[str | None, typer.Argument(help="A model's folder or name; the embedded one if left out.")] = None,
    methods: Annotated[str, typer.Option("--methods", "-m", help="Specs, with ; between them.")] = METHODS,
    lengths: Annotated[str, typer.Option(help="Tokens in a prompt, with commas between them.")] = "1000,2000,4000",
    samples: Annotated[int, typer.Option(min=1, help="Prompts for each task, length and depth.")] = 200,
    tasks: Annotated[str | None, typer.Option(help="Only these tasks of the suite, with commas.")] = None,
    asked: Annotated[
        str, typer.Option(help="Is the question known before the cache compresses: before, after, or both.")
    ] = "both",
    depths: Annotated[str | None, typer.Option(help="Depths of the needle from 0 to 1, with commas.")] = None,
    wording: Annotated[
        str | None, typer.Option(help="official or compact; compact is for the embedded model, and its default.")
    ] = None,
    haystack: Annotated[Path | None, typer.Option(help="A text to hide needles in, instead of noise.")] = None,
    cases: Annotated[Path | None, typer.Option(help="A file of LongEval's lines cases, instead of new ones.")] = None,
    seed: Annotated[int, typer.Option(help="Number of the first sample.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Prompts read together.")] = 8,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Instead of the task's own limit.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto for the checkpoint's own.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Where to run; the default is the best there is.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not use the model's chat template.")] = False,
) -> None:
    """Measure what methods do to a model's answers. Run it again to go on after an interruption."""
    suite = str(context.command.name)

    from kvsketch.evaluation.haystack import Noise, TextFile
    from kvsketch.evaluation.rows import read_rows
    from kvsketch.evaluation.runner import Plan
    from kvsketch.evaluation.summary import summarise
    from kvsketch.evaluation.tasks import WORDINGS
    from kvsketch.evaluation.tasks.longeval_files import name_of_file, read_cases

    if asked not in ASKED:
        raise ValueError(f"--asked must be before, after or both, got {asked!r}")
    wording = wording or ("official" if model or cases else "compact")
    if wording not in WORDINGS:
        raise ValueError(f"--wording must be one of {', '.join(WORDINGS)}, got {wording!r}")
    if cases is not None and suite != "lines":
        raise ValueError(f"--cases are LongEval's lines, which the suite {suite!r} has none of")
    plan = Plan(
        tasks=_tasks(suite, tasks),
        methods=[spec.strip() for spec in methods.split(";") if spec.strip()],
        lengths=numbers("--lengths", lengths, int),
        asked=ASKED[asked],
        samples=samples,
        depths=numbers("--depths", depths or "", float),
        wording=wording,
        haystack=Noise() if haystack is None else TextFile(haystack),
        seed=seed,
        batch=batch,
        max_new_tokens=max_new_tokens,
        cases=None if cases is None else (name_of_file(cases), read_cases(cases)),
        raw=raw,
    )
    language_model, tokenizer = load_model(model, dtype, device)
    measure(plan, language_model, tokenizer, model, out)
    _, rows = read_rows(out / ROWS)
    _print_table(summarise(row for row in rows if row["task"] in plan.tasks))
    write_report(out)


def measure(
    plan: "Plan", model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", name: str | None, out: Path
) -> None:
    """Run a plan into a folder's rows, with a bar."""
    from kvsketch.evaluation.rows import RowsFile, key_of
    from kvsketch.evaluation.runner import Runner

    runner = Runner(model, tokenizer, plan)
    if not runner.template and not plan.raw:
        say("the tokenizer has no chat template: prompts are given to the model as they are")
    file = RowsFile(out / ROWS, describe(model, name, runner.fingerprint))
    with progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task("reading", total=plan.answers)
        for step in runner.run(file.done, key_of):
            file.add(step.rows)
            bar.update(task, advance=step.answers, description=step.label)


def describe(model: "PreTrainedModel", name: str | None, fingerprint: str) -> dict[str, Any]:
    """What makes the rows of a run: the model, the versions, the machine."""
    from kvsketch.evaluation.embedded import NAME
    from kvsketch.evaluation.provenance import provenance

    about = {
        "model": name or NAME,
        "fingerprint": fingerprint,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
    }
    return about | provenance()


def _tasks(suite: str, names: str | None) -> list[str]:
    from kvsketch.evaluation.tasks import TASKS

    known = [name for name, task in TASKS.items() if task.suite == suite]
    wanted = known if names is None else [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise ValueError(f"the suite {suite} has no task {name!r}; it has {', '.join(known)}")
    return wanted


def _print_table(means: "Sequence[Mean]") -> None:
    """Methods down, everything else in the columns that there is."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading, justify in (("task", "left"), ("asked", "left"), ("tokens", "right"), ("method", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    looking = any(mean.looked_up is not None for mean in means)
    for heading in ("samples", "score", "bytes", *(["looked up"] if looking else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for mean in means:
        cells = [mean.task, mean.asked, f"{mean.length:,}", mean.method, f"{mean.count:,}", str(mean)]
        cells.append(f"{mean.share:.1%}")
        if looking:
            cells.append("" if mean.looked_up is None else f"{mean.looked_up:.1%}")
        table.add_row(*cells)
    Console().print(table)


def write_report(folder: Path) -> None:
    """Pictures and a page from a folder's rows, where matplotlib is."""
    rows_path = folder / ROWS
    try:
        from kvsketch.evaluation.page import write_page
    except ImportError as error:
        say_no_pictures(str(error.name), rows_path)
        return
    say(f"rows in {rows_path}, pictures and tables in {write_page(rows_path, folder)}")
