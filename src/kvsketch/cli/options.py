"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from kvsketch.editions import EDITIONS, EMBEDDED

REPLY = 40  # most tokens of an answer by a model inside the package: right ones have fewer; others would go on


def named(model: str | None) -> str | None:
    """None where the embedded model is named, unless that is a folder here."""
    return None if model == EMBEDDED and not Path(EMBEDDED).exists() else model


def is_ours(model: str | None) -> bool:
    """Whether it is a model inside the package, and no folder here."""
    return model is None or (model in EDITIONS and not Path(model).exists())


ModelName = Annotated[
    str | None,
    typer.Argument(callback=named, help="A model's folder or name, such as smollm2; the embedded one if left out."),
]
Precision = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto for the checkpoint's own.")]
Device = Annotated[str | None, typer.Option(help="Where to run, such as cuda; the default is the best there is.")]
RowsFolder = Annotated[Path, typer.Option("--out", "-o", help="Rows and pictures go to this folder.")]
