"""`kvsketch train-demo`: train the embedded model again."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsketch.cli.app import MOST, check_folder, progress_bar
from kvsketch.cli.models import check_device
from kvsketch.cli.notes import say

if TYPE_CHECKING:
    from kvsketch.evaluation.embedded.training.recipe import Progress as Training


def train_demo(
    folder: Annotated[Path, typer.Argument(help="Folder for the checkpoints, the log and the finished model.")],
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST,
            help="Tokens to train on before the last part, which adds a third of them (on a GPU four fifths); "
            "if left out, 12 million (on a GPU 54 million).",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=MOST, help="Random seed: another one gives another model.")] = 0,
    haystack: Annotated[
        list[Path] | None,
        typer.Option(help="A text file to hide things in too, beside made-up texts; repeat for more."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device to train on, such as cuda; left out, cuda if it is there, else cpu.")
    ] = None,
) -> None:
    """Train the small model that this package contains; run it again to go on after an interruption."""
    from kvsketch.evaluation.embedded.training.recipe import LENGTHS, Recipe
    from kvsketch.evaluation.embedded.training.train import train
    from kvsketch.evaluation.tasks.haystack import TextFile

    check_folder("the folder", folder)
    texts = [TextFile(path) for path in haystack or ()]
    place = check_device(device)
    recipe = Recipe.on(place, seed=seed, tokens=tokens)
    with progress_bar(transient=False) as bar:
        task = bar.add_task("starting", total=recipe.all_tokens)

        def show(progress: "Training") -> None:
            solved = sum(progress.accuracy.values()) / max(1, len(progress.accuracy))
            text = f"step {progress.step:,}, documents of {LENGTHS[progress.stage]:,} tokens, accuracy {solved:.2f}"
            bar.update(task, completed=progress.tokens, description=text)

        finished = train(folder, recipe, haystacks=texts, device=place, show=show)
    say(f"the model is in {finished}")
