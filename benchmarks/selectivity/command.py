"""What the command asks for, measures, prints and draws."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import MofNCompleteColumn

from kvsketch.cli.app import (
    MOST,
    listed,
    or_default,
    output,
    progress_bar,
    reported,
    say_no_pictures,
    some_numbers,
    specs,
)
from kvsketch.cli.bench_error_inputs import Inputs, Texts, shares
from kvsketch.cli.notes import say

if TYPE_CHECKING:
    from benchmarks.selectivity.study import Asked

    from kvsketch.caches.lookup.key_index import KeyIndex
    from kvsketch.evaluation.layers.plan import Prompt
    from kvsketch.evaluation.results.rows import Row

LEARNT = "saap"  # needs an index: buckets that are made here learn nothing about queries
METHODS = (
    f"{LEARNT}; kmeans; kmeans(rope=True); lsh(kind='kdeformer'); lsh(kind='reformer'); lsh(kind='magicpig'); "
    "random_buckets; random_tokens; retrieval"
)
RATES, BUCKETS, TABLES, SEEDS = "1/128,1/64,1/32,1/16,1/8,1/4,1/2", "128,32,64,256", "2,5,10,20,50,100,200", 3
WINDOW, PART = 2047, 8  # in a short text the window is an eighth of it
TRAINING, QUESTIONS = 8, 8  # documents that buckets are made of; questions after every document
LEAST, LONGEST = 32, 16384  # tokens of a text in the files that buckets are made of


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user said."""

    methods: Sequence[str]
    rates: Sequence[float]
    tables: Sequence[int]
    seeds: int
    folders: Sequence[Path]  # of indexes
    buckets: Sequence[int]
    training: Sequence[Path]  # files
    sinks: int
    window: int | None
    asking: int
    top: int
    heads: Sequence[tuple[int, int]]


def read_options(
    methods: str | None, rates: str | None, seeds: int | None, *, index: Sequence[Path] | None, buckets: str | None,
    train_file: Sequence[Path] | None, tables: str | None, sinks: int | None, window: int | None, asking: int | None,
    top: int | None, heads: str | None,
) -> Options:  # fmt: skip
    """The options with their defaults; without an index, the method that learns about queries is left out."""
    from kvsketch.caches.core.checks import check_count
    from kvsketch.caches.lookup.lsh import MOST_PARTS

    if index and buckets:
        raise ValueError("--buckets are made where there is no index: give --index or --buckets")
    made = list(dict.fromkeys(some_numbers("--buckets", or_default(buckets, BUCKETS), int)))
    counted = some_numbers("--tables", or_default(tables, TABLES), int)
    for name, count, most in [*(("buckets", x, MOST) for x in made), *(("tables", x, MOST_PARTS) for x in counted)]:
        check_count(name, count, least=1, most=most)
    named = specs(or_default(methods, METHODS))
    if not index and methods is None:
        named.remove(LEARNT)
        say(f"{LEARNT} is left out: it looks things up by an index (--index FOLDER, made by kvsketch fit)")
    elif not index and any(spec.startswith(LEARNT) for spec in named):
        raise ValueError(f"{LEARNT} looks things up by an index: give one with --index, made by kvsketch fit")
    return Options(
        methods=named,
        rates=shares(or_default(rates, RATES)),
        tables=counted,
        seeds=or_default(seeds, SEEDS),
        folders=index or (),
        buckets=made,
        training=train_file or (),
        sinks=or_default(sinks, 1),
        window=window,
        asking=or_default(asking, 64),
        top=or_default(top, 256),
        heads=[_head(part) for part in listed(heads or "")],
    )


def run(options: Options, inputs: Inputs) -> None:
    """Measure what is missing, with a progress bar; then print and draw everything that was asked for."""
    from benchmarks.selectivity import study as measuring
    from benchmarks.selectivity.plan import index_name
    from benchmarks.selectivity.tables import NOTE, tables

    asked = _asked(options, inputs)
    files = measuring.Files(inputs.out, inputs.about)

    def report() -> None:
        rows, indexes = files.rows(asked), [index_name(index) for index in asked.study.indexes]
        if not rows["lookups"]:
            raise ValueError(f"{inputs.out} has no rows of lookups yet")
        for table in tables(rows, indexes):
            output().print(table)
        say(NOTE)
        _draw(rows, indexes, inputs.out)

    with reported(report), progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task("reading", total=asked.total)
        for label, settled in measuring.run(inputs.model, asked, files):
            bar.update(task, advance=settled, description=label)


def _asked(options: Options, inputs: Inputs) -> "Asked":
    """Everything to measure, now that there is a model; buckets are made if they are not given."""
    from benchmarks.selectivity.attention_span import Cut
    from benchmarks.selectivity.plan import Study
    from benchmarks.selectivity.study import Asked

    from kvsketch.evaluation.results.rows import name_without_digest

    given_indexes = _given_indexes(options, inputs)
    if given_indexes:
        inputs = replace(inputs, layers=_layers_of(given_indexes, inputs.layers))
    texts = replace(inputs.texts, questions=QUESTIONS)
    prompts = texts.read(inputs.tokenizer, inputs.model)
    lengths = [prompt.ids.shape[1] for prompt in prompts]
    cut = Cut(
        sinks=options.sinks, window=or_default(options.window, min(WINDOW, min(lengths) // PART)), asking=options.asking
    )
    for prompt, tokens in zip(prompts, lengths, strict=True):
        cut.check_text(name_without_digest(prompt.name), tokens)
    study = Study(
        methods=options.methods, indexes=(), cut=cut, rates=options.rates, tables=options.tables, seeds=options.seeds
    )
    heads = options.heads or [(inputs.layers[len(inputs.layers) // 2], 0)]
    _check_heads(heads, inputs)
    training = _training(options, texts, inputs)
    indexes = given_indexes or _own_indexes(options, training, inputs)
    return Asked(replace(study, indexes=indexes), prompts, training, inputs.layers, heads, options.top)


def _training(options: Options, texts: Texts, inputs: Inputs) -> "list[Prompt]":
    """The texts that buckets are made of; none if an index is given without its texts."""
    if options.training:
        return _corpus(options, texts.tokens or LONGEST, inputs)
    if options.folders:
        say("no deviations of bucket sizes: they need the texts of the index (--train-file)")
        return []
    if texts.files:
        raise ValueError("buckets are made of other texts: name some with --train-file, or give an --index")
    return replace(texts, prompts=TRAINING, seed="error/training").read(inputs.tokenizer, inputs.model)


def _corpus(options: Options, tokens: int, inputs: Inputs) -> "list[Prompt]":
    """The texts of files, cut as `kvsketch fit` cuts them."""
    from kvsketch.evaluation.layers.plan import Prompt
    from kvsketch.fitting.corpus import read_corpus

    least = options.sinks + LEAST
    found = read_corpus(options.training, inputs.tokenizer, tokens=tokens, least=least, apart=least - 1)
    return [Prompt(f"training#{text.digest[:8]}", text.ids[None].to(inputs.model.device)) for text in found.texts]


def _given_indexes(options: Options, inputs: Inputs) -> "list[KeyIndex]":
    """The indexes that were given; they must fit the model."""
    from kvsketch.caches.lookup.key_index import read_index
    from kvsketch.huggingface.identity import describe_model

    indexes = [read_index(folder) for folder in options.folders]
    for index in indexes:
        index.check_model(describe_model(inputs.model))
    return indexes


def _layers_of(indexes: "Sequence[KeyIndex]", layers: Sequence[int]) -> list[int]:
    """The layers that every index has."""
    there = [layer for layer in layers if all(layer in index.layers for index in indexes)]
    names = ", ".join(str(index.folder) for index in indexes)
    if not there:
        raise ValueError(f"none of the layers {list(layers)} is in all of {names}: name layers that are, with --layers")
    if missing := sorted(set(layers) - set(there)):
        say(f"layers {missing} are left out: not all of {names} have them")
    return there


def _own_indexes(options: Options, training: "Sequence[Prompt]", inputs: Inputs) -> "list[KeyIndex]":
    """Indexes that the study makes, with a progress bar, or finds where it made them before."""
    from benchmarks.selectivity.own_buckets import folder_of, make_buckets

    from kvsketch.caches.lookup.key_index import read_index

    steps = make_buckets(inputs.model, training, inputs.layers, options.buckets, inputs.out, options.sinks)
    with progress_bar() as bar:
        task = bar.add_task("making buckets", total=None)
        for label in steps:
            bar.update(task, description=label)
    return [read_index(folder_of(inputs.out, count)) for count in options.buckets]


def _head(text: str) -> tuple[int, int]:
    try:
        layer, head = map(int, text.split(":"))
    except ValueError as error:
        raise ValueError(f"--heads must be such as 2:0, a layer and one of its query heads, got {text!r}") from error
    return layer, head


def _check_heads(heads: Sequence[tuple[int, int]], inputs: Inputs) -> None:
    """Refuse heads that are not there, and layers that are not read."""
    count = inputs.model.config.get_text_config(decoder=True).num_attention_heads
    for layer, head in heads:
        if layer not in inputs.layers or not 0 <= head < count:
            raise ValueError(
                f"--heads {layer}:{head} is not there: layers {list(inputs.layers)} are read, each with heads from 0 "
                f"to {count - 1}"
            )


def _draw(rows: "dict[str, list[Row]]", indexes: Sequence[str], out: Path) -> None:
    """Draw the pictures, if matplotlib is installed."""
    if find_spec("matplotlib") is None:
        say_no_pictures("matplotlib", out)
        return
    from benchmarks.selectivity import key_pictures
    from benchmarks.selectivity import pictures as lookup_pictures

    from kvsketch.evaluation.results.panels import save

    pictures = {
        "selectivity": lookup_pictures.lookups_picture(rows["lookups"], indexes),
        "recall": lookup_pictures.lookups_picture(rows["lookups"], indexes, "recall"),
        "spans": key_pictures.spans_picture(rows["spans"]),
        "spreads": key_pictures.spreads_picture(rows["spreads"]),
        "separations": key_pictures.separations_picture(rows["separations"]),
    }
    if len(indexes) > 1:
        pictures["buckets"] = lookup_pictures.buckets_picture(rows["lookups"])
    if rows["sizes"]:
        pictures["sizes"] = key_pictures.sizes_picture([row for row in rows["sizes"] if row["index"] == indexes[0]])
    made = [save(figure, out / f"{name}.png") for name, figure in pictures.items()]
    say(f"rows in {', '.join(f'{part}.jsonl' for part in rows)}, pictures in {', '.join(map(str, made))}")
