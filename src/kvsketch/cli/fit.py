"""`kvsketch fit`: learn once which keys a model's queries look for; `saap` and `kmeans` look keys up by that."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvsketch.cli.app import check_folder, output, progress_bar, some_numbers
from kvsketch.cli.models import check_device, load_model
from kvsketch.cli.notes import say
from kvsketch.cli.options import Device, ModelName, Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvsketch.caches.lookup.key_index import KeyIndex
    from kvsketch.fitting.fit import Progress
    from kvsketch.fitting.settings import FitSettings

SHOWN_PROBES = 32


Files = Annotated[
    list[Path] | None,
    typer.Option(
        help='A .txt file (one text) or a .jsonl file (a text a line, under "text"); repeat for more. Left out, the '
        "embedded model is fitted to documents of its own tasks; --tokens, --apart, --away, --queries, --buckets and "
        "--hidden then have other defaults."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Folder for the index; left out, the one where saap finds it by itself."),
]
Buckets = Annotated[int, typer.Option(help="Buckets that the keys of each KV head are sorted into.")]
Hidden = Annotated[int, typer.Option(help="Width of the classifiers' inner layer; 256 and 0 (linear) are cheaper.")]
Layers = Annotated[
    str | None, typer.Option(help="Layers to fit, with commas; left out, all with long-range queries (see --away).")
]
Tokens = Annotated[
    int | None,
    typer.Option(
        help="Cut texts into pieces of so many tokens; left out, 16384, or the model's context if that is less."
    ),
]
Apart = Annotated[
    int,
    typer.Option(help="The window in tokens: queries learn from keys farther away. Texts must be longer than this."),
]
Away = Annotated[int, typer.Option(help="Learn only from queries whose best key is more than this many tokens away.")]
Queries = Annotated[int, typer.Option(help="Most queries that are noted of each text and KV head.")]
Pool = Annotated[int, typer.Option(help="Queries of each KV head to learn from, taken evenly from all texts.")]
KeysAtMost = Annotated[int, typer.Option(help="Most keys of each KV head that are clustered.")]
RecipeName = Annotated[
    str,
    typer.Option(
        help="Recipe of the training: fast (500 steps of 512 queries, at a rate that falls from 1e-3), or paper "
        "(40,000 steps of 1,000 queries at a constant rate of 1e-5, from random weights)."
    ),
]
Steps = Annotated[int | None, typer.Option(help="Training steps; the recipe's if left out.")]
Batch = Annotated[int | None, typer.Option(help="Queries of each head in a training step; the recipe's if left out.")]
Rate = Annotated[float | None, typer.Option(help="Learning rate at the start; the recipe's if left out.")]
Products = Annotated[
    str | None,
    typer.Option(
        help="Precision of the training's products: float32, or bfloat16, which is faster where the processor has such "
        "products; the recipe's if left out."
    ),
]
HeldOut = Annotated[
    float, typer.Option(help="Share of the texts that is kept for measuring, and not fitted to; at least one text.")
]
Seed = Annotated[int, typer.Option(help="Random seed: another one gives another index.")]
ShardsFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder for what is noted of the texts, where it stays for other fits; left out, it goes to OUT/work "
        "and is removed at the end."
    ),
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep OUT/work, which is otherwise emptied as layers are done.")]
SaveEvery = Annotated[
    float, typer.Option(min=0, help="Seconds of training between saves: the most that a crash may cost.")
]
UseRay = Annotated[
    bool,
    typer.Option(
        "--ray", help="Spread texts and layers over a Ray cluster whose machines share the folders; same result."
    ),
]
RayAddress = Annotated[
    str, typer.Option(help="Address of the cluster: auto is the one this machine is part of, local a new one here.")
]


def fit(
    context: typer.Context,
    corpus: Files = None,
    out: Out = None,
    model: ModelName = None,
    buckets: Buckets = 1024,
    hidden: Hidden = 1024,
    layers: Layers = None,
    tokens: Tokens = None,
    apart: Apart = 2047,
    away: Away = 1024,
    queries: Queries = 512,
    pool: Pool = 16384,
    keys_at_most: KeysAtMost = 65536,
    recipe: RecipeName = "fast",
    steps: Steps = None,
    batch: Batch = None,
    rate: Rate = None,
    products: Products = None,
    held_out: HeldOut = 0.1,
    seed: Seed = 0,
    dtype: Precision = "auto",
    device: Device = None,
    shards: ShardsFolder = None,
    keep: Keep = False,
    save_every: SaveEvery = 60.0,
    ray: UseRay = False,
    ray_address: RayAddress = "auto",
) -> None:
    """Learn which of a model's keys its queries look for; run it again to go on after an interruption.

    The corpus is read once, and keys and queries are noted in OUT/work or --shards; then layers are fitted one by one.
    The corpus should be like what the model is to be used for: texts in which things are looked up from far away.
    """
    if out is not None:
        check_folder("--out", out)
    if not ray and ray_address != "auto":
        raise ValueError(f"--ray-address {ray_address} says which Ray cluster --ray uses: leave it out, or add --ray")
    given = {"apart": apart, "away": away, "queries": queries, "buckets": buckets, "hidden": hidden}
    given |= {} if tokens is None else {"tokens": tokens}
    given |= _without_corpus(context, model, corpus) | {"keys_at_most": keys_at_most, "pool": pool, "seed": seed}
    settings = _settings(
        recipe, layers, {"steps": steps, "batch": batch, "rate": rate, "products": products}, given, held_out
    )
    whole = tokens is None  # pieces may be as long as the model's context
    _fit(model, dtype, device, corpus, out, settings, shards, ray, ray_address, whole, keep=keep, save_every=save_every)


def _without_corpus(context: typer.Context, model: str | None, corpus: list[Path] | None) -> dict[str, int]:
    """Settings for documents of the embedded model's tasks if these are read; options that were given stay."""
    if corpus:
        return {}
    from kvsketch.evaluation.embedded.corpus import FIT

    if model is not None:
        raise ValueError("every model but the embedded one needs a corpus: kvsketch fit MODEL --corpus FILE")
    sources = {name: context.get_parameter_source(name) for name in FIT}
    return {name: FIT[name] for name, source in sources.items() if source is not None and source.name == "DEFAULT"}


def _settings(
    recipe: str, layers: str | None, training: dict[str, Any], given: dict[str, int], held_out: float
) -> "FitSettings":
    """The settings that the options name; parts of `training` that are None stay the recipe's."""
    from kvsketch.fitting.settings import RECIPES, FitSettings, ShardSettings

    if recipe not in RECIPES:
        raise ValueError(f"--recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    chosen = replace(RECIPES[recipe], **{name: value for name, value in training.items() if value is not None})
    wanted = () if layers is None else tuple(sorted(set(some_numbers("--layers", layers, int))))
    noted = {name: given.pop(name) for name in ("apart", "away", "queries")}
    shards = ShardSettings(layers=wanted, seed=given["seed"], **noted)
    return FitSettings(shards=shards, recipe=chosen, held_out=held_out, **given)


def _fit(
    model: str | None, dtype: str, device: str | None, corpus: list[Path] | None, out: Path | None,
    settings: "FitSettings",
    shards: Path | None, ray: bool, ray_address: str, whole: bool, **options: Any,
) -> None:  # fmt: skip
    """Load the model and fit to it, here or on a Ray cluster, with a bar for each part; then show the result."""
    from kvsketch.caches.lookup.key_index import own_index
    from kvsketch.evaluation.embedded.corpus import write_corpus
    from kvsketch.evaluation.results.provenance import provenance
    from kvsketch.fitting.fit import fit as run
    from kvsketch.fitting.spread import RayCluster
    from kvsketch.huggingface.identity import describe_model
    from kvsketch.huggingface.supported import context_of

    load = partial(model_on, name=model, dtype=dtype)
    cluster = RayCluster(ray_address, load, device) if ray else None
    language_model, tokenizer = load_model(model, dtype, device if cluster is None else "cpu")
    if whole:
        settings = replace(settings, tokens=min(settings.tokens, context_of(language_model) or settings.tokens))
    found = out is None
    out = own_index(describe_model(language_model)) if out is None else out
    with progress_bar(transient=False) as bar, TemporaryDirectory() as folder:
        files = write_corpus(Path(folder), tokenizer) if corpus is None else corpus
        tasks = {part: bar.add_task(part, total=None, visible=False) for part in ("reading", "fitting")}

        def show(progress: "Progress") -> None:
            text = f"{progress.part} {progress.text}".strip()
            task = tasks[progress.part]
            bar.update(task, visible=True, completed=progress.done, total=progress.total, description=text)

        index = run(
            language_model, tokenizer, files, out, settings, name=model or "embedded", shards_folder=shards,
            cluster=cluster, about=provenance(), show=show, note=say, **options,
        )  # fmt: skip
    _show_result(index, None if found else out, settings)


def _show_result(index: "KeyIndex", out: Path | None, settings: "FitSettings") -> None:
    """How good the index is, and how to use it."""
    from kvsketch.algorithms.saap import APART
    from kvsketch.fitting.measure import PROBES

    probes = max(count for count in PROBES if count <= max(1, min(SHOWN_PROBES, settings.buckets // 4)))
    output().print(_table(index, probes))
    window = "" if settings.shards.apart == APART else f", window={settings.shards.apart}"
    where = "" if out is None else f"index={str(out)!r}, "
    say(f"use it: saap({where}probes={probes}, visit=0.1, estimate=True, prefer='density'{window})")


def model_on(device: str, *, name: str | None, dtype: str) -> "PreTrainedModel":
    """The model, for a worker."""
    return load_model(name, dtype, check_device(device))[0]


def _table(index: "KeyIndex", probes: int) -> Table:
    """How much is found in texts that nothing was fitted to."""
    from kvsketch.fitting.measure import CLASSIFIER, KMEANS, ROTATED

    ways = {CLASSIFIER: "classifier", KMEANS: "k-means", ROTATED: "k-means, rotated"}
    reports = {number: index.description["layers"][str(number)]["held_out"] for number in index.layers}
    table = Table("layer", *ways.values(), box=None, pad_edge=False)
    table.title = f"{probes} probes of {index.buckets}: share of far attention found / share of far keys read"
    for number, report in reports.items():
        rows = [row for name in ways for row in report[name] if row["probes"] == probes]
        table.add_row(str(number), *(f"{row['recall']:.3f} / {row['selectivity']:.3f}" for row in rows))
    return table
