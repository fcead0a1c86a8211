"""Compare layers that read few tokens with exact attention: `python -m benchmarks.selectivity -o FOLDER`.

All tokens are kept, the first and the latest are read in full, and methods look up some of the tokens between. Run it
again to go on after an interruption.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from benchmarks.selectivity import command

from kvsketch.cli.app import MOST
from kvsketch.cli.bench_error_inputs import (
    Layers,
    ModelName,
    PromptFiles,
    Prompts,
    Task,
    Texts,
    Tokens,
    load_inputs,
    methods_option,
)
from kvsketch.cli.ending import ending
from kvsketch.cli.options import Device, Precision, RowsFolder

MOST_SEEDS = 10_000
Methods = Annotated[str | None, methods_option(command.METHODS)]
Rates = Annotated[str | None, typer.Option(help=f"Shares of the past that methods aim to read ({command.RATES}).")]
Seeds = Annotated[
    int | None, typer.Option(max=MOST_SEEDS, help=f"Seeds for methods that draw at random; {command.SEEDS}.")
]
Indexes = Annotated[
    list[Path] | None,
    typer.Option(help="A folder of kvsketch fit; again for other numbers of buckets, to compare."),
]
Buckets = Annotated[str | None, typer.Option(help=f"Without an index: numbers of buckets to make; {command.BUCKETS}.")]
TrainFiles = Annotated[
    list[Path] | None, typer.Option(help="A .txt or .jsonl file, from whose keys buckets are made; repeat for more.")
]
Tables = Annotated[str | None, typer.Option(help=f"Numbers of MagicPIG's tables; {command.TABLES}.")]
Sinks = Annotated[int | None, typer.Option(help="First tokens that are read in full; 1.")]
Window = Annotated[
    int | None, typer.Option(help="Latest tokens that are read in full; 2047, or an eighth of a short text.")
]
Asking = Annotated[int | None, typer.Option(help="How many of the last tokens are used as queries; 64.")]
Top = Annotated[
    int | None,
    typer.Option(min=1, max=MOST, help="How many keys, those with most attention, have their share shown; 256."),
]
Heads = Annotated[
    str | None,
    typer.Option(help="LAYER:HEAD, with commas: heads whose keys and queries are shown; one if left out."),
]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def selectivity(
    out: RowsFolder,
    model: ModelName = None,
    methods: Methods = None,
    rates: Rates = None,
    seeds: Seeds = None,
    layers: Layers = None,
    prompt_file: PromptFiles = None,
    task: Task = None,
    prompts: Prompts = None,
    tokens: Tokens = None,
    index: Indexes = None,
    buckets: Buckets = None,
    train_file: TrainFiles = None,
    tables: Tables = None,
    sinks: Sinks = None,
    window: Window = None,
    asking: Asking = None,
    top: Top = None,
    heads: Heads = None,
    dtype: Precision = "auto",
    device: Device = None,
) -> None:
    options = command.read_options(
        methods, rates, seeds, index=index, buckets=buckets, train_file=train_file, tables=tables, sinks=sinks,
        window=window, asking=asking, top=top, heads=heads,
    )  # fmt: skip
    texts = Texts(files=tuple(prompt_file or ()), task=task, prompts=prompts, tokens=tokens)
    command.run(options, load_inputs(out, model, layers, texts, dtype, device))


def main() -> None:
    """Run the command; it ends as `kvsketch` does: bad input with one line and exit code 2, Ctrl-C with 130."""
    with ending():
        sys.exit(app(prog_name="python -m benchmarks.selectivity", standalone_mode=False))


if __name__ == "__main__":
    main()
