"""`kvsketch bench error`: how far single layers are from exact attention when they keep few tokens."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import MofNCompleteColumn

from kvsketch.cli.app import numbers, or_default, output, progress_bar, reported, say_no_pictures, specs
from kvsketch.cli.bench_error_inputs import (
    Inputs,
    Layers,
    ModelName,
    PromptFiles,
    Prompts,
    Task,
    Texts,
    Tokens,
    load_inputs,
    methods_option,
    shares,
)
from kvsketch.cli.bench_error_tables import NOTE, tables
from kvsketch.cli.notes import say
from kvsketch.cli.options import Device, Precision, RowsFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvsketch.evaluation.layers.plan import Prompt, Study
    from kvsketch.evaluation.results.rows import Row, RowsFile

MOST_SEEDS = 10_000
ROWS, NORMS = "error.jsonl", "norms.jsonl"
METHODS = (
    "balancekv; balancekv(sharpness=1, augmented=False); uniform; uniform(weights='none'); streaming_llm; clustergen; "
    "subgen"
)
RATES, BLOCKS, SEEDS, EXACT = "0.5,0.25,0.125,0.0625", "64,128,256", 10, 256


def bench_error(
    out: RowsFolder,
    model: ModelName = None,
    methods: Annotated[str | None, methods_option(METHODS)] = None,
    rates: Annotated[
        str | None, typer.Option(help=f"Shares of the tokens to keep, with commas; {RATES} if left out.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(max=MOST_SEEDS, help=f"Number of seeds for methods that draw at random; {SEEDS} if left out."),
    ] = None,
    layers: Layers = None,
    prompt_file: PromptFiles = None,
    task: Task = None,
    prompts: Prompts = None,
    tokens: Tokens = None,
    blocks: Annotated[
        str | None,
        typer.Option(help=f"Block sizes in tokens, with commas, for methods that have blocks; {BLOCKS} if left out."),
    ] = None,
    exact: Annotated[
        int | None, typer.Option(help=f"Tokens kept at either end, and last queries asked; {EXACT} if left out.")
    ] = None,
    dtype: Precision = "auto",
    device: Device = None,
) -> None:
    """Compare single layers that keep few tokens with exact attention: BalanceKV's study.

    The first and the last tokens of a text are kept, a method compresses those between, and the last queries ask.
    Run it again to go on after an interruption.
    """
    study = read_study(methods, rates, seeds, blocks, exact)
    texts = Texts(files=tuple(prompt_file or ()), task=task, prompts=prompts, tokens=tokens)
    run(study, load_inputs(out, model, layers, texts, dtype, device))


def read_study(
    methods: str | None, rates: str | None, seeds: int | None, blocks: str | None, exact: int | None
) -> "Study":
    """The study that the options name."""
    from kvsketch.evaluation.layers.plan import Study

    return Study(
        methods=specs(or_default(methods, METHODS)),
        rates=shares(or_default(rates, RATES)),
        blocks=numbers("--blocks", or_default(blocks, BLOCKS), int),
        seeds=or_default(seeds, SEEDS),
        exact=or_default(exact, EXACT),
    )


def run(study: "Study", inputs: Inputs) -> None:
    """Measure what is missing, with a progress bar; then show tables and pictures of all that was asked for."""
    from kvsketch.evaluation.layers.error import NORMS_KEY
    from kvsketch.evaluation.layers.plan import KEY
    from kvsketch.evaluation.results.rows import RowsFile, name_without_digest

    prompts, layers, out = inputs.texts.read(inputs.tokenizer, inputs.model), inputs.layers, inputs.out
    for prompt in prompts:
        study.check_text(name_without_digest(prompt.name), prompt.ids.shape[1])
    errors, norms = RowsFile(out / ROWS, inputs.about, KEY), RowsFile(out / NORMS, inputs.about, NORMS_KEY)

    def report() -> None:
        rows, norms_rows = _asked_for(study, prompts, layers, out)
        if not rows:
            raise ValueError(f"{out / ROWS} has no rows yet")
        for table in tables(rows, norms_rows):
            output().print(table)
        say(NOTE)
        _draw(rows, out)

    with reported(report):
        _measure(study, inputs.model, prompts, layers, errors, norms)


def _measure(
    study: "Study",
    model: "PreTrainedModel",
    prompts: "Sequence[Prompt]",
    layers: Sequence[int],
    errors: "RowsFile",
    norms: "RowsFile",
) -> None:
    """Run the study, with a progress bar."""
    from kvsketch.evaluation.layers.error import run

    with progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task("reading", total=len(prompts) * len(layers) * len(study.trials))
        for label, settled in run(model, prompts, layers, study, errors, norms):
            bar.update(task, advance=settled, description=label)


def _asked_for(
    study: "Study", prompts: "Sequence[Prompt]", layers: Sequence[int], out: Path
) -> "tuple[list[Row], list[Row]]":
    """The folder's rows of errors and of norms that belong to this study, whenever they were made."""
    from kvsketch.evaluation.layers.error import NORMS_KEY
    from kvsketch.evaluation.layers.plan import KEY
    from kvsketch.evaluation.results.rows import key_of, read_rows

    read = [(prompt, layer) for prompt in prompts for layer in layers]
    asked = {key_of(study.labels(prompt, layer, trial), KEY) for prompt, layer in read for trial in study.trials}
    places = {(prompt.name, layer) for prompt, layer in read}
    return (
        [row for row in read_rows(out / ROWS, KEY)[1] if key_of(row, KEY) in asked],
        [row for row in read_rows(out / NORMS, NORMS_KEY)[1] if (row["prompt"], row["layer"]) in places],
    )


def _draw(rows: "Sequence[Row]", out: Path) -> None:
    """Save the pictures, if matplotlib is installed."""
    if find_spec("matplotlib") is None:
        say_no_pictures("matplotlib", out / ROWS)
        return
    from kvsketch.evaluation.layers import pictures
    from kvsketch.evaluation.results.panels import save

    made = [save(pictures.errors_picture(rows), out / "error.png")]
    if any(row["block"] is not None for row in rows):
        made.append(save(pictures.blocks_picture(rows), out / "blocks.png"))
    say(f"rows in {out / ROWS}, pictures in {', '.join(map(str, made))}")
