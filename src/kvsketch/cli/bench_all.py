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
    """What is used where an option is left out."""

    lengths: str
    samples: int
    keep: str
    windows: int
    turns: int
    steps: int


USUAL = Sizes(lengths="2000", samples=40, keep="0.5,0.25,0.125,0.0625", windows=10, turns=7, steps=32)
QUICK = Sizes(lengths="1000", samples=4, keep="0.25", windows=2, turns=2, steps=8)

Out = Annotated[Path, typer.Option("--out", "-o", help="Rows and the page go to this folder.")]
Methods = Annotated[
    str | None,
    typer.Option(
        "--methods", "-m", help="Specs, with ; between; all that forget, and the recommended ones, if left out."
    ),
]
Heads = Annotated[str, typer.Option(help="How heads share a budget, with commas; for specs that do not say.")]
Keeps = Annotated[str | None, typer.Option("--keep", help=f"Fractions of a full cache; {USUAL.keep} if left out.")]
TaskNames = Annotated[str, typer.Option("--tasks", help="Tasks, with commas.")]
Lengths = Annotated[str | None, typer.Option(help=f"Tokens in a prompt, with commas; {USUAL.lengths} if left out.")]
Samples = Annotated[
    int | None, typer.Option(min=1, max=MOST, help=f"Prompts for each task; {USUAL.samples} if left out.")
]
Files = Annotated[list[Path] | None, typer.Option(help="A text whose predictions are measured (KL); again for more.")]
Windows = Annotated[
    int | None, typer.Option(min=1, max=MOST, help=f"Windows of each text; {USUAL.windows} if left out.")
]
Turns = Annotated[
    int | None, typer.Option(min=0, max=MOST, help=f"Times that all is timed, 0: not; {USUAL.turns} if left out.")
]
Index = Annotated[Path | None, typer.Option(help="What kvsketch fit has written: look tokens up too.")]
Beside = Annotated[
    list[Path] | None, typer.Option(help="Rows of another package (see benchmarks/kvpress_board.py); again for more.")
]
Fit = Annotated[
    bool, typer.Option("--fit", help="Give each method less, so that with all its spare room it holds its budget.")
]
Quick = Annotated[bool, typer.Option("--quick", help="A handful of documents, a quarter kept: to see that it works.")]
Seed = Annotated[int, typer.Option(help="Number of the first sample.")]
Batch = Annotated[int, typer.Option(min=1, max=MOST, help="Prompts read together.")]
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
