"""`kvsketch bench error`: how far single layers are from exact attention, methods side by side."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsketch.cli import bench_error_rate as rate
from kvsketch.cli import bench_selectivity as selectivity
from kvsketch.cli.app import MOST, check_folder, load_model, some_numbers
from kvsketch.cli.bench import describe
from kvsketch.cli.bench_error_inputs import PROMPTS, TASK, TOKENS, Inputs, Texts

MOST_SEEDS = 10_000
RATE: dict[str, Any] = {"rich_help_panel": "Options of --against rate"}
SELECTIVITY: dict[str, Any] = {"rich_help_panel": "Options of --against selectivity"}


def bench_error(
    out: Annotated[Path, typer.Option("--out", "-o", help="Rows and pictures go to this folder.")],
    model: Annotated[str | None, typer.Argument(help="A model's folder or name; the embedded one if left out.")] = None,
    against: Annotated[
        str, typer.Option(help="rate: of tokens that are kept; selectivity: the share of the past that is read.")
    ] = "rate",
    methods: Annotated[
        str | None, typer.Option("--methods", "-m", help="Specs without budgets, with ; between; all if left out.")
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(help=f"Shares to keep ({rate.RATES}), or those that methods aim to read ({selectivity.RATES})."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            max=MOST_SEEDS,
            help=f"So many seeds, for methods that draw at random ({rate.SEEDS}, or {selectivity.SEEDS}).",
        ),
    ] = None,
    layers: Annotated[str | None, typer.Option(help="These layers, with commas; all if left out.")] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="A text to read; once for each. Left out: documents of a task.")
    ] = None,
    task: Annotated[str | None, typer.Option(help=f"Documents of this task, {TASK} if left out.")] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, max=MOST, help=f"So many documents, {PROMPTS} if left out.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help=f"Tokens of a document, {TOKENS:,} if left out; and the most of a file."),
    ] = None,
    blocks: Annotated[
        str | None, typer.Option(help=f"Sizes of block, for methods that have such; {rate.BLOCKS}.", **RATE)
    ] = None,
    exact: Annotated[
        int | None, typer.Option(help=f"Tokens kept at either end; so many queries are asked; {rate.EXACT}.", **RATE)
    ] = None,
    index: Annotated[
        list[Path] | None,
        typer.Option(help="A folder of kvsketch fit; again for other numbers of buckets, to compare.", **SELECTIVITY),
    ] = None,
    buckets: Annotated[
        str | None,
        typer.Option(help=f"Without an index: numbers of buckets to make; {selectivity.BUCKETS}.", **SELECTIVITY),
    ] = None,
    train_file: Annotated[
        list[Path] | None,
        typer.Option(help="A .txt or .jsonl file whose keys buckets are made of; once for each.", **SELECTIVITY),
    ] = None,
    tables: Annotated[
        str | None, typer.Option(help=f"Numbers of MagicPIG's tables; {selectivity.TABLES}.", **SELECTIVITY)
    ] = None,
    sinks: Annotated[int | None, typer.Option(help="First tokens that are read in full; 1.", **SELECTIVITY)] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Latest tokens that are read in full; 2047, or an eighth of a short text.", **SELECTIVITY),
    ] = None,
    asking: Annotated[int | None, typer.Option(help="So many last tokens ask; 64.", **SELECTIVITY)] = None,
    top: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="Keys whose share of the attention is shown; 256.", **SELECTIVITY),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(help="LAYER:HEAD, with commas: whose keys and queries are shown; one if left out.", **SELECTIVITY),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto for the checkpoint's own.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Where to run; the default is the best there is.")] = None,
) -> None:
    """Compare single layers with exact attention.

    BalanceKV's study of rates (how many tokens are kept), or Saap's of selectivity (how many of them are read).

    Rate: the first and the last tokens of a text are kept, methods compress those between, and the last ones ask.
    Selectivity: all are kept, first and latest ones are read in full, and methods look up some of those between.
    Run it again to go on after an interruption.
    """
    own: dict[str, dict[str, Any]] = {
        "rate": {"blocks": blocks, "exact": exact},
        "selectivity": {
            "index": index, "buckets": buckets, "train_file": train_file, "tables": tables, "sinks": sinks,
            "window": window, "asking": asking, "top": top, "heads": heads,
        },
    }  # fmt: skip
    check_folder("--out", out)
    _check_options(against, own)
    texts = Texts(files=tuple(prompt_file or ()), task=task, prompts=prompts, tokens=tokens)
    wanted = None if layers is None else some_numbers("--layers", layers, int)
    if against == "rate":
        measure = partial(rate.run, rate.read_study(methods, rates, seeds, **own["rate"]))
    else:
        measure = partial(selectivity.run, selectivity.read_options(methods, rates, seeds, **own["selectivity"]))

    from kvsketch.huggingface import make_cache
    from kvsketch.huggingface.capture import choose_layers

    language_model, tokenizer = load_model(model, dtype, device)
    cache = make_cache(language_model, "exact")
    about = describe(language_model, model, str(cache.model.fingerprint()))
    measure(Inputs(language_model, tokenizer, texts, choose_layers(cache, wanted), out, about))


def _check_options(against: str, own: dict[str, dict[str, Any]]) -> None:
    """Refuse an unknown study, and options of the other one."""
    if against not in own:
        raise ValueError(f"--against must be one of {', '.join(own)}, got {against!r}")
    for study, options in own.items():
        said = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
        if said and study != against:
            raise ValueError(f"{', '.join(said)}: only for --against {study}, and this is --against {against}")
