"""`kvsketch bench error`: how far single layers are from exact attention, methods side by side."""

import json
from collections.abc import Sequence
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn

from kvsketch.cli.app import load_model, made_text, numbers, progress_bar, read_text, say, some_numbers
from kvsketch.cli.bench import describe
from kvsketch.cli.bench_error_tables import NOTE, tables

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvsketch.evaluation.layer_error_plan import Prompt, Study
    from kvsketch.evaluation.rows import Row, RowsFile

ROWS, NORMS = "error.jsonl", "norms.jsonl"
METHODS = "balancekv; uniform; uniform(weights='none'); streaming_llm; clustergen; subgen"
TASK, PROMPTS, TOKENS = "lines", 3, 4000  # the texts that are made


def bench_error(
    out: Annotated[Path, typer.Option("--out", "-o", help="Rows and pictures go to this folder.")],
    model: Annotated[str | None, typer.Argument(help="A model's folder or name; the embedded one if left out.")] = None,
    methods: Annotated[str, typer.Option("--methods", "-m", help="Specs without budgets, with ; between.")] = METHODS,
    rates: Annotated[
        str, typer.Option(help="Shares of the middle that are kept, such as 1/4 or 0.3.")
    ] = "0.5,0.25,0.125,0.0625",
    blocks: Annotated[str, typer.Option(help="Sizes of block, for methods that have such.")] = "64,128,256",
    seeds: Annotated[int, typer.Option(help="So many seeds, for methods that draw at random.")] = 10,
    layers: Annotated[str | None, typer.Option(help="These layers, with commas; all if left out.")] = None,
    exact: Annotated[int, typer.Option(help="Tokens kept at either end; so many queries are asked.")] = 256,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="A text to read; once for each. Left out: documents of a task.")
    ] = None,
    task: Annotated[str | None, typer.Option(help=f"Documents of this task, {TASK} if left out.")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help=f"So many documents, {PROMPTS} if left out.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens of a document, {TOKENS:,} if left out; and the most of a file.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto for the checkpoint's own.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Where to run; the default is the best there is.")] = None,
) -> None:
    """Compare single layers with exact attention: BalanceKV's study.

    The first and the last tokens of a text are kept and methods compress those between; the last ones ask.
    Run it again to go on after an interruption.
    """
    from kvsketch.evaluation.capture import choose_layers
    from kvsketch.evaluation.layer_error import NORMS_KEY
    from kvsketch.evaluation.layer_error_plan import KEY, Study
    from kvsketch.evaluation.rows import RowsFile, name_alone
    from kvsketch.huggingface import make_cache

    study = Study(
        methods=[spec.strip() for spec in methods.split(";") if spec.strip()],
        rates=some_numbers("--rates", rates, _rate),
        blocks=numbers("--blocks", blocks, int),
        seeds=seeds,
        exact=exact,
    )
    if prompt_file and (task or prompts):
        raise ValueError("--task and --prompts make documents, and --prompt-file names texts: give one or the other")
    wanted = None if layers is None else some_numbers("--layers", layers, int)
    texts = [(path.name, read_text(path)) for path in prompt_file or ()]
    language_model, tokenizer = load_model(model, dtype, device)
    if not texts:
        length = tokens or TOKENS
        made = [made_text(task or TASK, length, f"error/{number}", tokenizer) for number in range(prompts or PROMPTS)]
        texts = [(f"{task or TASK}/{length}/{number}", text) for number, text in enumerate(made)]
    read = [_prompt(name, text, tokens, tokenizer, language_model) for name, text in texts]
    for prompt in read:
        study.check_text(name_alone(prompt.name), prompt.ids.shape[1])
    cache = make_cache(language_model, "exact")
    chosen = choose_layers(cache, wanted)
    run = describe(language_model, model, cache.model.fingerprint)
    errors, norms = RowsFile(out / ROWS, run, KEY), RowsFile(out / NORMS, run, NORMS_KEY)
    _measure(study, language_model, read, chosen, errors, norms)
    rows, norms_rows = _asked_for(study, read, chosen, out)
    for table in tables(rows, norms_rows):
        Console().print(table)
    say(NOTE)
    _draw(rows, out)


def _rate(text: str) -> float:
    """A number, or a fraction as the tables have it."""
    try:
        return float(Fraction(text.strip()))
    except ZeroDivisionError as error:
        raise ValueError(f"{text} is no number") from error


def _prompt(
    name: str, text: str, most: int | None, tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel"
) -> "Prompt":
    from kvsketch.evaluation.layer_error_plan import Prompt
    from kvsketch.evaluation.rows import name_with_content

    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :most]
    return Prompt(name_with_content(name, json.dumps(ids.tolist()).encode()), ids.to(model.device))


def _measure(
    study: "Study",
    model: "PreTrainedModel",
    prompts: "Sequence[Prompt]",
    layers: Sequence[int],
    errors: "RowsFile",
    norms: "RowsFile",
) -> None:
    """Run the study, with a bar."""
    from kvsketch.evaluation.layer_error import run

    with progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task("reading", total=len(prompts) * len(layers) * len(study.trials))
        for label, settled in run(model, prompts, layers, study, errors, norms):
            bar.update(task, advance=settled, description=label)


def _asked_for(
    study: "Study", prompts: "Sequence[Prompt]", layers: Sequence[int], out: Path
) -> "tuple[list[Row], list[Row]]":
    """The folder's rows of errors and of norms that belong to this study, whenever they were made."""
    from kvsketch.evaluation.layer_error import NORMS_KEY
    from kvsketch.evaluation.layer_error_plan import KEY
    from kvsketch.evaluation.rows import key_of, read_rows

    read = [(prompt, layer) for prompt in prompts for layer in layers]
    asked = {key_of(study.labels(prompt, layer, trial), KEY) for prompt, layer in read for trial in study.trials}
    places = {(prompt.name, layer) for prompt, layer in read}
    return (
        [row for row in read_rows(out / ROWS, KEY)[1] if key_of(row, KEY) in asked],
        [row for row in read_rows(out / NORMS, NORMS_KEY)[1] if (row["prompt"], row["layer"]) in places],
    )


def _draw(rows: "Sequence[Row]", out: Path) -> None:
    """Pictures, where matplotlib is."""
    if find_spec("matplotlib") is None:
        say(f"no pictures: matplotlib is not installed (pip install 'kvsketch[plots]'); the rows are in {out / ROWS}")
        return
    from kvsketch.evaluation import layer_error_pictures as pictures
    from kvsketch.evaluation.pictures import save

    made = [save(pictures.errors_picture(rows), out / "error.png")]
    if any(row["block"] is not None for row in rows):
        made.append(save(pictures.blocks_picture(rows), out / "blocks.png"))
    say(f"rows in {out / ROWS}, pictures in {', '.join(map(str, made))}")
