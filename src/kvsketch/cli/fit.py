"""`kvsketch fit`: learn which keys a model's queries look for, once, for `saap` and `kmeans` to look them up by."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvsketch.cli.app import check_device, check_folder, load_model, output, progress_bar, some_numbers
from kvsketch.cli.notes import say

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvsketch.caches.key_index import KeyIndex
    from kvsketch.fitting.fit import Progress

SHOWN_PROBES = 32


def fit(
    corpus: Annotated[
        list[Path],
        typer.Option(help='A .txt file (one text) or a .jsonl file (a text a line, under "text"); again for more.'),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The index goes to this folder.")],
    model: Annotated[str | None, typer.Argument(help="A model's folder or name; the embedded one if left out.")] = None,
    buckets: Annotated[int, typer.Option(help="Buckets of every KV head.")] = 1024,
    hidden: Annotated[
        int, typer.Option(help="Width of the classifiers' inner layer; 256 and 0 (linear) are cheaper.")
    ] = 1024,
    layers: Annotated[
        str | None, typer.Option(help="These layers, with commas; left out, all with queries that look far.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Cut texts into pieces of so many tokens.")] = 16384,
    apart: Annotated[
        int, typer.Option(help="The window: queries learn from keys farther away. Texts must be longer than this.")
    ] = 2047,
    away: Annotated[int, typer.Option(help="Learn from queries whose best key is farther away than this.")] = 1024,
    queries: Annotated[int, typer.Option(help="Note so many queries of each text and KV head, at most.")] = 512,
    pool: Annotated[
        int, typer.Option(help="Learn from so many queries of each KV head, evenly from all texts.")
    ] = 16384,
    keys_at_most: Annotated[int, typer.Option(help="Cluster so many keys of each KV head, at most.")] = 65536,
    recipe: Annotated[
        str,
        typer.Option(help="fast, or paper: 40,000 steps of 1,000 queries at a constant rate of 1e-5, begun at random."),
    ] = "fast",
    steps: Annotated[int | None, typer.Option(help="Steps of the training; the recipe's if left out.")] = None,
    batch: Annotated[int | None, typer.Option(help="Queries of each head in a step; the recipe's if left out.")] = None,
    rate: Annotated[float | None, typer.Option(help="The rate it begins with; the recipe's if left out.")] = None,
    held_out: Annotated[
        float, typer.Option(help="The share of texts that nothing is fitted to, to measure on; at least one text.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Another seed is another index.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto for the checkpoint's own.")] = "auto",
    device: Annotated[
        str | None, typer.Option(help="Where to run, such as cuda; the default is the best there is.")
    ] = None,
    shards: Annotated[
        Path | None,
        typer.Option(
            help="What is noted of the texts goes to this folder and stays there for other fits; left out, it goes "
            "to OUT/work and is removed at the end."
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep OUT/work, which is emptied as layers are done.")] = False,
    save_every: Annotated[float, typer.Option(min=0, help="Seconds of training that a crash may cost.")] = 60.0,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Spread texts and layers over a Ray cluster, whose machines share the folders; the same result.",
        ),
    ] = False,
    ray_address: Annotated[
        str, typer.Option(help="Which cluster: auto is the one this machine is part of, local a new one here.")
    ] = "auto",
) -> None:
    """Learn which of a model's keys its queries look for; run it again to go on after an interruption.

    It reads the corpus once, noting keys and queries in OUT/work or --shards, and then fits layer by layer. The corpus
    should be like what the model is to be used for: texts in which things are looked up from far away.
    """
    from kvsketch.algorithms.saap import APART
    from kvsketch.evaluation.results.provenance import provenance
    from kvsketch.fitting.fit import fit as run
    from kvsketch.fitting.measure import PROBES
    from kvsketch.fitting.settings import RECIPES, FitSettings, ShardSettings
    from kvsketch.fitting.spread import RayCluster

    check_folder("--out", out)
    if recipe not in RECIPES:
        raise ValueError(f"--recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    given: dict[str, Any] = {"steps": steps, "batch": batch, "rate": rate}
    chosen = replace(RECIPES[recipe], **{name: value for name, value in given.items() if value is not None})
    wanted = () if layers is None else tuple(sorted(set(some_numbers("--layers", layers, int))))
    settings = FitSettings(
        shards=ShardSettings(apart=apart, away=away, queries=queries, layers=wanted, seed=seed),
        recipe=chosen,
        tokens=tokens,
        buckets=buckets,
        hidden=hidden,
        keys_at_most=keys_at_most,
        pool=pool,
        held_out=held_out,
        seed=seed,
    )
    load = partial(model_on, name=model, dtype=dtype)
    cluster = RayCluster(ray_address, load, device) if ray else None
    language_model, tokenizer = load_model(model, dtype, device if cluster is None else "cpu")
    with progress_bar(transient=False) as bar:
        tasks = {part: bar.add_task(part, total=None, visible=False) for part in ("reading", "fitting")}

        def show(progress: "Progress") -> None:
            text = f"{progress.part} {progress.text}".strip()
            task = tasks[progress.part]
            bar.update(task, visible=True, completed=progress.done, total=progress.total, description=text)

        index = run(
            language_model, tokenizer, corpus, out, settings,
            name=model or "embedded", shards_folder=shards, cluster=cluster, keep=keep, save_every=save_every,
            about=provenance(), show=show, note=say,
        )  # fmt: skip
    probes = max(count for count in PROBES if count <= max(1, min(SHOWN_PROBES, buckets // 4)))
    output().print(_table(index, probes))
    window = "" if apart == APART else f", window={apart}"
    say(f"use it: saap(index='{out}', probes={probes}{window})")


def model_on(device: str, *, name: str | None, dtype: str) -> "PreTrainedModel":
    """The model, for a worker."""
    return load_model(name, dtype, check_device(device))[0]


def _table(index: "KeyIndex", probes: int) -> Table:
    """What was found in texts that nothing was fitted to."""
    from kvsketch.fitting.measure import CLASSIFIER, KMEANS, ROTATED

    ways = {CLASSIFIER: "classifier", KMEANS: "k-means", ROTATED: "k-means, rotated"}
    reports = {number: index.description["layers"][str(number)]["held_out"] for number in index.layers}
    table = Table("layer", *ways.values(), box=None, pad_edge=False)
    table.title = f"{probes} probes of {index.buckets}: share of far attention found / share of far keys read"
    for number, report in reports.items():
        rows = [row for name in ways for row in report[name] if row["probes"] == probes]
        table.add_row(str(number), *(f"{row['recall']:.3f} / {row['selectivity']:.3f}" for row in rows))
    return table
