"""`kvsketch bench text`: how much the predictions of a text change when the cache is compressed."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.progress import MofNCompleteColumn
from rich.table import Table
from rich.text import Text as Line

from kvsketch.cli.app import MOST, listed, output, progress_bar, reported, say_no_pictures, specs
from kvsketch.cli.bench_error_inputs import Inputs, Texts, load_inputs
from kvsketch.cli.notes import say
from kvsketch.cli.options import Device, ModelName, Precision, RowsFolder
from kvsketch.evaluation.results.names import TEXTS

if TYPE_CHECKING:
    from kvsketch.caches.core.budget import Keep
    from kvsketch.evaluation.layers.plan import Prompt
    from kvsketch.evaluation.results.rows import Row
    from kvsketch.evaluation.texts.plan import Plan

METHODS = "uniform; streaming_llm; clustergen; balancekv; kvzip; kvzip(window=0.25)"
KEEPS, TOKENS, NEXT, CALL, WINDOWS = "0.5,0.25,0.125,0.0625", 2048, 128, 16, 20
WIDEST = 22  # letters of a method in a line of the table; the rest goes to the next line
BASELINE = "uniform"  # the others' divergence is divided by this one's at the same budget
NOTE = (
    "KL: divergence of the predictions from those of the full cache, nats a token, mean over n windows with its 95 % "
    "interval. Of uniform: over that of uniform with the same budget, window by window; geometric mean and interval. "
    "Agree: the likeliest token is the same. ppl: perplexity of the text. Bytes as percentages of a full cache's, "
    "after the window was read."
)

Files = Annotated[list[Path], typer.Option(help="A text file to read; repeat for more.")]
Methods = Annotated[
    str, typer.Option("--methods", "-m", help="Specs, with ; between them; those without a budget get every --keep.")
]
Budgets = Annotated[str, typer.Option(help="Budgets, with commas: fractions, numbers of entries, or bytes.")]
Tokens = Annotated[int, typer.Option(min=2, max=MOST, help="Tokens of a window that are read and compressed.")]
Next = Annotated[int, typer.Option("--next", min=2, max=MOST, help="Tokens after the window that are predicted.")]
Call = Annotated[
    int,
    typer.Option(min=1, max=MOST, help="Tokens fed at a time while predicting; one for methods that look tokens up."),
]
Windows = Annotated[int, typer.Option(min=1, max=MOST, help="Windows of each text.")]
Batch = Annotated[int, typer.Option(min=1, max=MOST, help="Windows that are read and measured together.")]


def bench_text(
    out: RowsFolder,
    texts: Files,
    model: ModelName = None,
    methods: Methods = METHODS,
    keep: Budgets = KEEPS,
    tokens: Tokens = TOKENS,
    next_tokens: Next = NEXT,
    call: Call = CALL,
    windows: Windows = WINDOWS,
    batch: Batch = 1,
    dtype: Precision = "auto",
    device: Device = None,
) -> None:
    """Measure what methods do to a model's predictions of texts. Run it again to go on after an interruption.

    A window of a text is read and compressed; then the predictions of the next tokens are compared with those of the
    full cache.
    """
    from kvsketch.evaluation.texts.plan import Plan
    from kvsketch.huggingface.rereading import check_room_behind
    from kvsketch.huggingface.supported import check_context

    plan = Plan(
        methods=specs(methods),
        keeps=budgets(keep),
        tokens=tokens,
        next=next_tokens,
        call=call,
        windows=windows,
        batch=batch,
    )
    inputs = load_inputs(out, model, None, Texts(files=tuple(texts)), dtype, device)
    check_context(inputs.model, plan.tokens + plan.next, "a window and what follows it have")
    if any(config.askings.behind for config in plan.configs.values()):
        check_room_behind(inputs.model, plan.tokens, "a window")
    run(plan, inputs)


def run(plan: "Plan", inputs: Inputs) -> None:
    """Measure what is missing, with a progress bar; then show table and picture of all that was asked for."""
    from kvsketch.evaluation.results.rows import LEARNT, RowsFile
    from kvsketch.evaluation.texts import measure
    from kvsketch.evaluation.texts.plan import KEY
    from kvsketch.huggingface.identity import Identity

    texts = inputs.texts.read(inputs.tokenizer, inputs.model)
    for text in texts:
        plan.starts(text)  # refuses a text that is too short now, not after hours
    learnt = Identity(inputs.model).learnt(plan.configs.values())
    rows = RowsFile(inputs.out / TEXTS, inputs.about | {LEARNT: learnt}, KEY)
    with reported(lambda: show(plan, texts, inputs.out)), progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task("reading", total=len(texts) * plan.windows * len(plan.configs))
        for label, settled in measure.run(inputs.model, texts, plan, rows):
            bar.update(task, advance=settled, description=label)


def budgets(text: str) -> "list[Keep]":
    """The budgets that `--keep` lists: 0.25 is a fraction, 512 a number of entries, 64MB bytes."""
    found: list[Keep] = []
    for part in listed(text):
        for kind in (int, float, str):
            try:
                found.append(kind(part))
            except ValueError:
                continue
            break
    return found


def show(plan: "Plan", texts: "Sequence[Prompt]", out: Path) -> None:
    """Show table and picture of all rows of the folder that were asked for, whenever they were made."""
    from kvsketch.evaluation.results.rows import key_of, read_rows
    from kvsketch.evaluation.texts.plan import KEY

    wanted = {
        key_of(plan.labels(text, start, name), KEY)
        for text in texts
        for start in plan.starts(text)
        for name in plan.configs
    }
    rows = [row for row in read_rows(out / TEXTS, KEY)[1] if key_of(row, KEY) in wanted]
    if not rows:
        raise ValueError(f"{out / TEXTS} has no rows yet")
    output().print(table_of(rows, plan))
    say(NOTE)
    if find_spec("matplotlib") is None:
        say_no_pictures("matplotlib", out / TEXTS)
        return
    from kvsketch.evaluation.results.panels import save
    from kvsketch.evaluation.texts.pictures import divergence_picture
    from kvsketch.evaluation.texts.summary import summarise

    title = f"{plan.next} tokens after {plan.tokens:,}, {len(texts)} texts"
    say(f"rows in {out / TEXTS}, picture in {save(divergence_picture(summarise(rows), title), out / 'text.png')}")


def table_of(rows: "Sequence[Row]", plan: "Plan") -> Group:
    """A line for each method and budget."""
    from kvsketch.evaluation.texts.summary import compare, summarise

    means = {mean.method: mean for mean in summarise(rows)}
    looking = any(mean.looked_up is not None for mean in means.values())
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold", min_width=min(max(map(len, means)), WIDEST - 6 * looking))
    for heading in ("bytes", *(["read"] if looking else []), "KL", "of uniform", "agree", "ppl"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in plan.configs:
        if (mean := means.get(name)) is None:
            continue
        baseline = f"{BASELINE}(keep={getattr(plan.configs[name], 'keep', None)!r})"
        ratio = None if name == baseline else compare(rows, name, baseline)
        low, high = mean.interval
        paired = "" if ratio is None else _three_digits(ratio.mean)
        if ratio is not None and ratio.pairs > 1:
            paired += f" [{_three_digits(ratio.low)}, {_three_digits(ratio.high)}]"
        read = "" if mean.looked_up is None else f"{mean.looked_up:.1%}"
        cells = [name, f"{mean.share:.1%}", *([read] if looking else [])]
        cells += [f"{mean.kl:.3f}" + (f" [{low:.3f}, {high:.3f}]" if mean.windows > 1 else ""), paired]
        table.add_row(*cells, f"{mean.agree:.1%}", _three_digits(mean.perplexity))
    exact = next(iter(means.values())).exact_perplexity
    counts = sorted({mean.windows for mean in means.values()})
    title = f"{plan.next} tokens after {plan.tokens:,}, n = {' to '.join(map(str, {counts[0]: 0, counts[-1]: 0}))}; "
    title += f"the full cache has a perplexity of {exact:.2f}"
    return Group(Line(f"\n{title}", style="bold"), table)


def _three_digits(number: float) -> str:
    """A number with three digits, or with all digits before the point if these are more."""
    return f"{number:,.{2 if number < 10 else 1 if number < 100 else 0}f}"
