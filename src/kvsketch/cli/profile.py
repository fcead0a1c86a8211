"""`kvsketch profile`: measure once how unequally a model's KV heads use what they have seen, for `heads="profile"`."""

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvsketch.cli.app import (
    MOST,
    check_folder,
    check_output,
    listed,
    numbers,
    or_default,
    output,
    progress_bar,
    say_no_pictures,
)
from kvsketch.cli.bench_error_inputs import Inputs, Texts, load_inputs
from kvsketch.cli.notes import say
from kvsketch.cli.options import Device, ModelName, Precision

if TYPE_CHECKING:
    from torch import Tensor

    from kvsketch.fitting.profiling import Parts

TOKENS, WINDOWS, KEEPS = 2000, 4, "0.5,0.25,0.125,0.0625,0.03125"
TASKS = "lines,kv,niah_single,niah_multikey"  # the embedded model reads documents of these
KEY = ("text", "start", "tokens", "keeps")
NOTE = (
    "Part of the tokens between sinks and window that a head holds when the best of all heads are kept; "
    "mean and largest head."
)

Files = Annotated[
    list[Path] | None,
    typer.Option(
        help="A text file like those to come; repeat for more. Left out (embedded model only): documents of --tasks."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="The profile's file (.json), a picture beside it (.png); left out, where heads='profile' finds it.",
    ),
]
Tasks = Annotated[
    str | None, typer.Option("--tasks", help=f"Tasks to make documents of, with commas; {TASKS} if left out.")
]
Tokens = Annotated[int, typer.Option(min=64, max=MOST, help="Length in tokens of a piece, which is read twice.")]
Windows = Annotated[int, typer.Option(min=1, max=MOST, help="Pieces of each text, or documents of each task.")]
Keeps = Annotated[str, typer.Option("--keep", help="Budgets for which shares are measured: fractions, with commas.")]


def profile(
    model: ModelName = None,
    texts: Files = None,
    out: Out = None,
    tasks: Tasks = None,
    tokens: Tokens = TOKENS,
    windows: Windows = WINDOWS,
    keep: Keeps = KEEPS,
    dtype: Precision = "auto",
    device: Device = None,
) -> None:
    """Measure which share of a cache each head of a model needs. Run it again to go on after an interruption.

    Pieces of the texts are read twice; what a head looks at in the second reading is what it needs.
    """
    if out is not None and (out.suffix != ".json" or out.is_dir()):
        raise ValueError(f"--out must name a file that ends in .json, got {out}")
    if texts and tasks:
        raise ValueError("--tasks makes documents for the embedded model, and --texts names files: give one or other")
    if model is not None and not texts and not tasks:
        raise ValueError("name texts like those that the model is to read: --texts FILE, again for more")
    keeps = sorted({*numbers("--keep", keep, float)}, reverse=True)
    if not keeps or not all(0 < one < 1 for one in keeps):
        raise ValueError(f"--keep must be fractions between 0 and 1 with commas between them, got {keep!r}")

    from kvsketch.caches.core.profile import own_profile
    from kvsketch.files import user_cache

    folder = user_cache() if out is None else out.parent
    check_folder("--out", folder)
    if out is not None and folder.is_dir():
        check_output("--out", out, texts or (), begins=lambda start: b'"kind": "profile"' in start, what="profile")
        picture = out.with_suffix(".png")
        if picture.exists() and not out.exists():
            raise ValueError(
                f"--out would overwrite {picture} too, a picture that belongs to no profile: name another "
                "file, or remove it"
            )
    inputs = load_inputs(folder, model, None, Texts(files=tuple(texts or ())), dtype, device)
    from kvsketch.huggingface.identity import describe_model

    facts = describe_model(inputs.model)
    path = own_profile(facts) if out is None else out
    pieces = _pieces(inputs, or_default(tasks, TASKS), tokens, windows, keeps)
    _check_pieces(inputs, pieces, keeps)
    means = _measure(inputs, pieces, keeps, path)
    _write(path, facts, inputs, pieces, keeps, means)
    _show(path, keeps, means)


def _pieces(
    inputs: Inputs, tasks: str, tokens: int, windows: int, keeps: Sequence[float]
) -> "list[tuple[dict[str, Any], Tensor]]":
    """The pieces to read: where each comes from, and its tokens."""
    from kvsketch.evaluation.texts.plan import Plan

    about: dict[str, Any] = {"keeps": ",".join(map(str, keeps))}
    if not inputs.texts.files:
        names = listed(tasks)
        if not names:
            raise ValueError(f"--tasks must name tasks with commas between them, got {tasks!r}")
        each = [Texts(task=name, prompts=windows, tokens=tokens, seed="profile") for name in names]
        made = [one for texts in each for one in texts.read(inputs.tokenizer, inputs.model)]
        return [({"text": text.name, "start": 0, "tokens": text.ids.shape[1]} | about, text.ids) for text in made]
    texts = inputs.texts.read(inputs.tokenizer, inputs.model)
    plan = Plan(methods=("uniform",), tokens=tokens, next=1, windows=windows)
    return [
        ({"text": text.name, "start": start, "tokens": tokens} | about, text.ids[:, start : start + tokens])
        for text in texts
        for start in plan.starts(text)
    ]


def _check_pieces(inputs: Inputs, pieces: "Sequence[tuple[dict[str, Any], Tensor]]", keeps: Sequence[float]) -> None:
    """Refuse pieces that cannot be measured, before anything is read."""
    from kvsketch.fitting.profiling import SINKS, WINDOW

    least = min(about["tokens"] for about, _ in pieces)
    if min(keeps) * least < 2 * (SINKS + WINDOW):
        raise ValueError(
            f"--keep {min(keeps):g} of a piece of {least:,} tokens is hardly more than its first {SINKS} and last "
            f"{WINDOW}, which all heads hold: give more --tokens, or larger fractions"
        )
    if not inputs.layers:
        raise ValueError("this model has no layer that attends to everything: there is nothing to divide")


def _measure(
    inputs: Inputs, pieces: "Sequence[tuple[dict[str, Any], Tensor]]", keeps: Sequence[float], path: Path
) -> "Parts":
    """The means over all pieces, with a progress bar; pieces that were read already come from rows beside the file."""
    from kvsketch.evaluation.results.rows import RowsFile, key_of, read_rows
    from kvsketch.files import ready
    from kvsketch.fitting.profiling import mean_parts, parts_of
    from kvsketch.huggingface.second_reading import second_reading

    ready(path.parent)
    work = path.with_suffix(".work.jsonl")
    rows = RowsFile(work, inputs.about, KEY)
    with progress_bar() as bar:
        task = bar.add_task("reading", total=2 * sum(about["tokens"] for about, _ in pieces))
        done = 0

        def advance(before: int, read: int) -> None:
            bar.update(task, completed=before + read)

        for about, ids in pieces:
            if key_of(about, KEY) not in rows.done:
                scores = second_reading(inputs.model, ids, progress=partial(advance, done))
                rows.add([about | {"parts": parts_of(scores, keeps)}])
            done += 2 * about["tokens"]
            advance(done, 0)
    wanted = {key_of(about, KEY) for about, _ in pieces}
    found = {key_of(row, KEY): row["parts"] for row in read_rows(work, KEY)[1]}
    return mean_parts([{int(layer): heads for layer, heads in found[key].items()} for key in found if key in wanted])


def _write(
    path: Path,
    facts: dict[str, Any],
    inputs: Inputs,
    pieces: "Sequence[tuple[dict[str, Any], Tensor]]",
    keeps: Sequence[float],
    means: "Parts",
) -> None:
    import kvsketch
    from kvsketch.caches.core.profile import write_profile
    from kvsketch.files import digest_of

    texts = [
        {name: about[name] for name in KEY[:3]} | {"digest": digest_of({"ids": ids[0].tolist()})[:16]}
        for about, ids in pieces
    ]
    description = {"model": facts, "id": inputs.about.get("model"), "kvsketch": kvsketch.__version__, "texts": texts}
    tokens = round(sum(about["tokens"] for about, _ in pieces) / len(pieces))
    layers = {str(layer): heads for layer, heads in means.items()}
    write_profile(path, description | {"tokens": tokens, "keeps": list(keeps), "layers": layers})
    path.with_suffix(".work.jsonl").unlink()


def _show(path: Path, keeps: Sequence[float], means: "Parts") -> None:
    """Print a table by layer, and save a picture of all heads."""
    table = Table("layer", *(f"keep {keep:g}" for keep in keeps), box=None, pad_edge=False)
    for layer, heads in means.items():
        columns = zip(*heads, strict=True)
        table.add_row(str(layer), *(f"{sum(own) / len(own):.2f} / {max(own):.2f}" for own in columns))
    output().print(table)
    say(NOTE)
    if find_spec("matplotlib") is None:
        say_no_pictures("matplotlib", path)
    else:
        from kvsketch.evaluation.inspection.pictures import profile_picture
        from kvsketch.evaluation.results.panels import save

        say(f"picture: {save(profile_picture(means, keeps), path.with_suffix('.png'))}")
    say(f"profile: {path}; methods that forget take it as heads={str(path)!r}")
