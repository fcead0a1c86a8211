"""`kvsketch bench speed`: how long a step takes beside exact and stock, and when a method is faster than exact."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import MofNCompleteColumn

from kvsketch.cli.app import (
    MOST,
    check_folder,
    numbers,
    output,
    progress_bar,
    reported,
    say_no_pictures,
    some_numbers,
    specs,
)
from kvsketch.cli.bench import about_run
from kvsketch.cli.bench_speed_tables import NOTE, tables
from kvsketch.cli.notes import say
from kvsketch.cli.options import RowsFolder
from kvsketch.evaluation.results.names import SPEED
from kvsketch.evaluation.speed.usual import END_TO_END, EVERY, LENGTHS, METHODS, PROMPTS

if TYPE_CHECKING:
    from kvsketch.evaluation.results.rows import Row, RowsFile
    from kvsketch.evaluation.speed.plan import Plan

USUAL_LENGTHS, USUAL_CONTEXTS = (",".join(map(str, some)) for some in (LENGTHS, END_TO_END))
USUAL_METHODS = "; ".join(METHODS)
Lengths = Annotated[str, typer.Option(help="Numbers of tokens that one layer holds, with commas between them.")]
Methods = Annotated[
    str,
    typer.Option(
        "--methods",
        "-m",
        help="Specs, with ; between them, or all (but expected_attention). The index that saap needs and the "
        "profile that heads='profile' needs are made up.",
    ),
]
Heads = Annotated[int, typer.Option(min=1, max=MOST, help="KV heads of a layer.")]
Group = Annotated[int, typer.Option(min=1, max=MOST, help="Query heads of each KV head.")]
Width = Annotated[int, typer.Option(min=2, max=MOST, help="Width of a head: numbers in a key.")]
Dtype = Annotated[str, typer.Option(help="Precision: float32, bfloat16 or float16.")]
Threads = Annotated[int | None, typer.Option(min=1, max=4096, help="CPU threads; if left out, as many as torch uses.")]
Rounds = Annotated[int, typer.Option(min=2, max=MOST, help="Steps that are timed of each method and kernel.")]
Between = Annotated[
    str,
    typer.Option(help="Memory that is read before each step to empty the processor's caches: more than they hold."),
]
EndToEnd = Annotated[
    str,
    typer.Option(help='Context lengths, with commas, at which a whole Llama with random weights is timed; "": none.'),
]
Prompts = Annotated[
    int,
    typer.Option(
        min=0,
        max=MOST,
        help="Longest prompt, in tokens, that this Llama reads: longer ones take hours, so caches are filled with "
        "random numbers instead.",
    ),
]
Layers = Annotated[int, typer.Option(min=1, max=1000, help="Layers of this Llama.")]
Real = Annotated[bool, typer.Option("--real/--no-real", help="Also time smollm2 at 8,192 tokens.")]
Buckets = Annotated[int, typer.Option(min=1, max=1 << 20, help="Buckets of the index in which saap looks tokens up.")]
Hidden = Annotated[int, typer.Option(min=0, max=1 << 20, help="Hidden units of that index's router; 0: a linear one.")]


def bench_speed(
    out: RowsFolder,
    lengths: Lengths = USUAL_LENGTHS,
    methods: Methods = USUAL_METHODS,
    kv_heads: Heads = 8,
    group: Group = 4,
    width: Width = 128,
    dtype: Dtype = "bfloat16",
    threads: Threads = None,
    rounds: Rounds = 40,
    between: Between = "640MB",
    end_to_end: EndToEnd = USUAL_CONTEXTS,
    prompts: Prompts = PROMPTS,
    layers: Layers = 8,
    real: Real = True,
    buckets: Buckets = 1024,
    hidden: Hidden = 1024,
) -> None:
    """Time a step of each method beside exact and stock, on this CPU. Run it again to go on after an interruption.

    Timed are one layer, with every method and kernel, and whole models; then comes the context from which on each
    method is faster than exact. Answers are checked first: a wrong one is not timed. Run nothing else meanwhile.
    """
    check_folder("--out", out)

    import torch

    from kvsketch.evaluation.speed.plan import Plan, every_method

    run(
        Plan(
            lengths=some_numbers("--lengths", lengths, int), kv_heads=kv_heads, group=group, width=width, dtype=dtype,
            threads=threads or torch.get_num_threads(), rounds=rounds, between=size(between),
            methods=every_method() if methods == EVERY else specs(methods), index=(buckets, hidden), prompts=prompts,
            layers=layers, end_to_end=numbers("--end-to-end", end_to_end, int), real=real,
        ),
        out,
    )  # fmt: skip


def size(text: str) -> int:
    """The bytes that `--between` names."""
    from kvsketch.caches.core.budget import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"--between must be an amount of memory such as 640MB, got {text!r:.60}") from error


def run(plan: "Plan", out: Path) -> None:
    """Measure what is missing, with a progress bar; then show tables and picture of all that was asked for."""
    from kvsketch.evaluation.results.rows import RowsFile
    from kvsketch.evaluation.speed.clock import threads
    from kvsketch.evaluation.speed.plan import KEY

    with threads(plan.threads):
        about = about_run(plan.shape, plan.fingerprint, plan.dtype, "cpu")
        rows = RowsFile(out / SPEED, about, KEY)
        with reported(lambda: show(plan, out)), progress_bar(MofNCompleteColumn()) as bar:
            task = bar.add_task("compiling", total=plan.count)
            for label, settled in _measured(plan, rows):
                bar.update(task, advance=settled, description=label)


def _measured(plan: "Plan", rows: "RowsFile") -> Iterator[tuple[str, int]]:
    from kvsketch.evaluation.speed import layer, subjects
    from kvsketch.evaluation.speed.clock import Memory
    from kvsketch.kernels import native

    if native.library() is None:
        say("there are no kernels in C here: torch's own are timed alone")
    layer.build(plan, rows)
    yield "reading memory", 0
    yield from layer.run(plan, rows, Memory(plan.between), say)
    yield from subjects.run_llama(plan, rows, say)
    if plan.real:
        yield from subjects.run_real(plan, rows, say)


def show(plan: "Plan", out: Path) -> None:
    """Show tables and picture of all rows of the folder that were asked for, whenever they were made."""
    from kvsketch.evaluation.results.rows import read_rows
    from kvsketch.evaluation.speed.plan import KEY

    rows = [row for row in read_rows(out / SPEED, KEY)[1] if plan.asked_for(row)]
    if not rows:
        raise ValueError(f"{out / SPEED} has no rows yet")
    for table in tables(rows, plan):
        output().print(table)
    say(NOTE)
    _draw(plan, rows, out)


def _draw(plan: "Plan", rows: "list[Row]", out: Path) -> None:
    """Save the picture, if matplotlib is installed and a layer was timed."""
    from kvsketch.evaluation.speed.plan import LAYER
    from kvsketch.evaluation.speed.summary import timed

    if not timed(rows, LAYER):
        say(f"no picture, as no layer was timed; the rows are in {out / SPEED}")
        return
    if find_spec("matplotlib") is None:
        say_no_pictures("matplotlib", out / SPEED)
        return
    from kvsketch.evaluation.results.panels import save
    from kvsketch.evaluation.speed.pictures import speed_picture

    title = f"{plan.shape}, {plan.dtype}, threads: {plan.threads}"
    say(f"rows in {out / SPEED}, picture in {save(speed_picture(rows, title), out / 'speed.png')}")
