"""`kvsketch inspect`: whether a model's keys and values form clusters."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvsketch.caches.recommended import FOR_BOTH
from kvsketch.cli.app import (
    MOST,
    check_folder,
    made_text,
    numbers,
    or_default,
    output,
    progress_bar,
    read_text,
    some_numbers,
)
from kvsketch.cli.inspect_heads import show_heads
from kvsketch.cli.models import load_model
from kvsketch.cli.notes import say
from kvsketch.cli.options import Device, ModelName, Precision, RowsFolder

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvsketch.evaluation.inspection.spread import Row
    from kvsketch.huggingface.capture import Captured

LEAST_TOKENS = 16
NOTE = (
    "δ in shares of the median distance between keys, or between values. In brackets 2δr: the samples that SubGen's "
    "theorem asks for grow as its exponential. Radius of k centres: over that of one. "
    "Attention to a quarter: what a quarter of the tokens gets of all that goes to the middle of the text, if they are "
    "those that get most, those whose keys point away from the mean of all, those with short keys or short values, or "
    "k-center's; .25 by chance. Cosine: of the mean query and the mean key."
)
PromptFile = Annotated[
    Path | None, typer.Option(help="A text file to read; - is standard input. Left out: a made-up record of lines.")
]
Layers = Annotated[
    str | None, typer.Option(help="Layers to show, with commas; left out, five, evenly from the first to the last.")
]
SHARES = "0.25,0.5,0.75,1"
Shares = Annotated[
    str | None,
    typer.Option(
        help=f"Radii δ of clusters, as shares of the median distance between keys, or values; {SHARES} if left out."
    ),
]
Maps = Annotated[str | None, typer.Option(help="KV heads to draw maps of, with commas; 0 if left out.")]


def inspect(
    out: RowsFolder,
    model: ModelName = None,
    prompt_file: PromptFile = None,
    tokens: Annotated[int, typer.Option(min=64, max=MOST, help="Most tokens of the text that are read.")] = 4000,
    layers: Layers = None,
    maps: Maps = None,
    shares: Shares = None,
    heads: Annotated[
        bool, typer.Option("--heads", help="Instead, write a page that shows which tokens each head keeps.")
    ] = False,
    method: Annotated[
        str | None,
        typer.Option("--method", "-m", help=f"For --heads: the method, as a spec; {FOR_BOTH} if left out."),
    ] = None,
    dtype: Precision = "auto",
    device: Device = None,
) -> None:
    """Show how a model's keys, values and queries are spread, with maps; or, with --heads, what each head keeps."""
    check_folder("--out", out)
    text = None if prompt_file is None else read_text(prompt_file)
    if heads:
        for name, value in (("--layers", layers), ("--maps", maps), ("--shares", shares)):
            if value is not None:
                raise ValueError(
                    f"{name} says how keys are spread, and does not go with --heads, which shows every layer"
                )
        show_heads(model, method, prompt_file, text, tokens, dtype, device, out)
        return
    if method is not None:
        raise ValueError("--method needs --heads: how keys are spread does not depend on a method")
    wanted = None if layers is None else some_numbers("--layers", layers, int)
    drawn, radii = some_numbers("--maps", or_default(maps, "0"), int), _positive("--shares", or_default(shares, SHARES))
    about = {"model": model or "embedded", "text": str(prompt_file or "a record of lines")}
    _show_spread(about, wanted, drawn, radii, (lambda: load_model(model, dtype, device)), text, tokens, out)


def _show_spread(
    about: Mapping[str, object],
    layers: Sequence[int] | None,
    maps: Sequence[int],
    shares: Sequence[float],
    load: "Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]",
    text: str | None,
    tokens: int,
    out: Path,
) -> None:
    """Write the rows and pictures, and print the tables."""
    if find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install matplotlib")

    from kvsketch.evaluation.inspection.spread import save_rows
    from kvsketch.evaluation.results.provenance import provenance
    from kvsketch.huggingface.capture import capture

    language_model, tokenizer = load()
    ids = _read(language_model, tokenizer, text, tokens)
    seen = capture(language_model, ids, layers, at_most=5)
    available = seen[0].keys.shape[0]
    if not all(0 <= head < available for head in maps):
        raise ValueError(f"--maps must be from 0 to {available - 1} for this model, got {list(maps)}")
    rows = _measure(seen, shares)
    save_rows(rows, out / "inspect.jsonl", {**about, "tokens": ids.shape[1]} | provenance())
    for table in _tables(rows):
        output().print(table)
    say(f"{NOTE} Rows: {out}")
    _draw(rows, seen, maps, out)


def _positive(option: str, text: str) -> list[float]:
    found = numbers(option, text, float)
    if not found or not all(0 < number < math.inf for number in found):
        raise ValueError(f"{option} must be positive numbers with commas between them, got {text!r}")
    return found


def _read(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", text: str | None, tokens: int) -> "Tensor":
    """The first tokens of the text, or of a made-up record of lines without one, on the model's device."""
    read = made_text("lines", tokens, "inspect", tokenizer) if text is None else text
    ids = tokenizer(read, return_tensors="pt")["input_ids"][:, :tokens]
    if ids.shape[1] < LEAST_TOKENS:
        raise ValueError(f"the text has {ids.shape[1]} tokens; at least {LEAST_TOKENS} are needed to see a spread")
    return ids.to(model.device)


def _measure(seen: "Sequence[Captured]", shares: Sequence[float]) -> "list[Row]":
    """Rows of all layers and heads, with a progress bar."""
    from kvsketch.evaluation.inspection.spread import inspect_layer

    rows = list["Row"]()
    with progress_bar() as bar:
        task = bar.add_task("clustering", total=len(seen) * seen[0].keys.shape[0])
        for layer in seen:
            for row in inspect_layer(layer, shares):
                rows.append(row)
                bar.advance(task)
    return rows


def _draw(rows: "list[Row]", seen: "Sequence[Captured]", heads: Sequence[int], out: Path) -> None:
    """Save the pictures; maps only if scikit-learn is installed."""
    from kvsketch.evaluation.inspection import pictures
    from kvsketch.evaluation.results.panels import save

    save(pictures.clusters_picture(rows), out / "clusters.png")
    save(pictures.norms_picture(rows), out / "norms.png")
    if find_spec("sklearn") is None:
        say("no maps: they need scikit-learn (pip install scikit-learn)")
    else:
        save(pictures.maps_picture(seen, heads), out / "maps.png")
    say("pictures: " + ", ".join(sorted(path.name for path in out.glob("*.png"))))


def _tables(rows: "list[Row]") -> Iterator[Table]:
    """Tables of means over heads: norms, clusters of keys and of values after the whole text, radii of k-center."""
    by_layer = {layer: [row for row in rows if row["layer"] == layer] for layer in sorted({r["layer"] for r in rows})}
    norms = Table("norms, layer", "queries", "keys", "keys - mean", "values", "distance", box=None, pad_edge=False)
    for layer, heads in by_layer.items():
        means = [fmean(head[name]["mean"] for head in heads) for name in ("queries", "keys", "centred_keys", "values")]
        means.append(fmean(head["median_distance"] for head in heads))
        norms.add_row(str(layer), *(f"{value:.2f}" for value in means))
    yield norms
    yield _clusters("keys", "clusters", by_layer)
    yield _clusters("values", "value_clusters", by_layer)
    yield _radii(by_layer)
    if all(row["attended"] for row in rows):
        yield _attended(by_layer)


def _clusters(what: str, name: str, by_layer: "Mapping[int, Sequence[Row]]") -> Table:
    """Numbers of clusters at the end of the text, for each δ; for keys also 2δr."""
    shares = sorted({cell["share"] for heads in by_layer.values() for cell in heads[0][name]})
    table = Table(f"clusters of {what}, layer", *(f"δ = {share:g}" for share in shares), box=None, pad_edge=False)
    for layer, heads in by_layer.items():
        cells = []
        for share in shares:
            last = [[cell for cell in head[name] if cell["share"] == share][-1] for head in heads]
            spread = f" ({fmean(cell['log_spread'] for cell in last):.0f})" if "log_spread" in last[0] else ""
            cells.append(f"{fmean(cell['count'] for cell in last):,.0f}{spread}")
        table.add_row(str(layer), *cells)
    return table


def _attended(by_layer: "Mapping[int, Sequence[Row]]") -> Table:
    """Shares of attention that a quarter of the tokens gets, and the cosine of mean query and mean key."""
    from kvsketch.evaluation.inspection.attended import CHOICES

    names = (*CHOICES, "cosine")
    table = Table("attention to a quarter, layer", *names, box=None, pad_edge=False)
    for layer, heads in by_layer.items():
        table.add_row(str(layer), *(f"{fmean(head['attended'][name] for head in heads):.2f}" for name in names))
    return table


def _radii(by_layer: "Mapping[int, Sequence[Row]]") -> Table:
    """Radii around k centres, of keys and of values, relative to the radius around one."""
    counts = [cell["centres"] for cell in next(iter(by_layer.values()))[0]["radii"]]
    headings = (f"k = {count}" for count in counts)
    table = Table("radius, keys / values, layer", *headings, box=None, pad_edge=False)
    for layer, heads in by_layer.items():
        means = [
            [fmean(head[name][place]["share"] for head in heads) for name in ("radii", "value_radii")]
            for place in range(len(counts))
        ]
        table.add_row(str(layer), *(f"{keys:.2f} / {values:.2f}" for keys, values in means))
    return table
