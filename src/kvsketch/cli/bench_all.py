"""`kvsketch bench all`: a leaderboard of all methods, on one page, at equal bytes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvsketch.cli.app import MOST, listed, or_default, reported, some_numbers, specs
from kvsketch.cli.bench import AbleOption, AskedOption, HaystackOption, NewTokensOption
from kvsketch.cli.bench_error_inputs import Texts
from kvsketch.cli.board import Board, Given
from kvsketch.cli.models import load_model
from kvsketch.cli.options import Device, ModelName, Precision

TASKS = "lines,kv,niah_single,niah_multikey,number_string"
HEADS = "equal,profile,threshold"
ABLE = 0.8


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Defaults of the options that are left out."""

    lengths: str
    samples: int
    keep: str
    windows: int
    turns: int
    steps: int


USUAL = Sizes(lengths="2000", samples=40, keep="0.5,0.25,0.125,0.0625", windows=10, turns=7, steps=32)
QUICK = Sizes(lengths="1000", samples=4, keep="0.25", windows=2, turns=2, steps=8)

Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for the result rows and the page.")]
Methods = Annotated[
    str | None,
    typer.Option(
        "--methods",
        "-m",
        help="Methods, as specs with ; between them. Left out: all that drop tokens, and the recommended ones.",
    ),
]
Heads = Annotated[str, typer.Option(help="Ways to share a budget among heads, with commas; for specs that name none.")]
Keeps = Annotated[
    str | None,
    typer.Option("--keep", help=f"Budgets: fractions of a full cache, with commas; {USUAL.keep} if left out."),
]
TaskNames = Annotated[str, typer.Option("--tasks", help="Tasks, with commas between them.")]
Lengths = Annotated[str | None, typer.Option(help=f"Tokens in a prompt, with commas; {USUAL.lengths} if left out.")]
Samples = Annotated[
    int | None, typer.Option(min=1, max=MOST, help=f"Prompts for each task and length; {USUAL.samples} if left out.")
]
Files = Annotated[
    list[Path] | None,
    typer.Option(help="A text file on which predictions are measured (KL divergence); repeat for more."),
]
Windows = Annotated[
    int | None, typer.Option(min=1, max=MOST, help=f"Windows measured in each of --texts; {USUAL.windows} if left out.")
]
Turns = Annotated[
    int | None,
    typer.Option(
        min=0, max=MOST, help=f"Times that compressing is timed; 0: nothing is timed; {USUAL.turns} if left out."
    ),
]
Index = Annotated[
    Path | None,
    typer.Option(help="A folder that kvsketch fit has written: with it, methods that look tokens up are compared too."),
]
Beside = Annotated[
    list[Path] | None,
    typer.Option(help="A folder with rows of another package (see benchmarks/kvpress_board.py); repeat for more."),
]
Fit = Annotated[
    bool,
    typer.Option(
        "--fit", help="Give each method less, so that what it holds, spare room included, is no more than its budget."
    ),
]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Smaller defaults, to see that it works: a handful of documents, a quarter kept."),
]
Seed = Annotated[int, typer.Option(help="Number of the first sample; the others follow it.")]
Batch = Annotated[int, typer.Option(min=1, max=MOST, help="Prompts read together, as one batch.")]
Raw = Annotated[bool, typer.Option("--raw", help="Do not use the model's chat template.")]


def bench_all(
    out: Out,
    model: ModelName = None,
    methods: Methods = None,
    heads: Heads = HEADS,
    keep: Keeps = None,
    tasks: TaskNames = TASKS,
    lengths: Lengths = None,
    samples: Samples = None,
    asked: AskedOption = "both",
    haystack: HaystackOption = None,
    texts: Files = None,
    windows: Windows = None,
    turns: Turns = None,
    index: Index = None,
    beside: Beside = None,
    fit: Fit = False,
    quick: Quick = False,
    seed: Seed = 0,
    batch: Batch = 8,
    able: AbleOption = ABLE,
    max_new_tokens: NewTokensOption = None,
    dtype: Precision = "auto",
    device: Device = None,
    raw: Raw = False,
) -> None:
    """Compare all methods at equal bytes, on one page. Run it again to go on after an interruption."""
    usual = QUICK if quick else USUAL
    given = Given(
        out=out, model=model, able=able, beside=tuple(beside or ()), methods=specs(methods or ""), index=index,
        heads=listed(heads), keeps=some_numbers("--keep", or_default(keep, usual.keep), float), tasks=listed(tasks),
        lengths=some_numbers("--lengths", or_default(lengths, usual.lengths), int),
        samples=or_default(samples, usual.samples),
        asked=asked, haystack=tuple(haystack or ()), texts=Texts(files=tuple(texts or ())),
        windows=or_default(windows, usual.windows), turns=or_default(turns, usual.turns), steps=usual.steps,
        fit=fit, seed=seed, batch=batch, max_new_tokens=max_new_tokens, raw=raw,
    )  # fmt: skip
    board = Board(given, *load_model(model, dtype, device))
    with reported(board.report):
        board.measure()
