"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

EMBEDDED = "embedded"  # its name: what is meant without one
OURS = (None, "embedded-first")  # what that name, and the first edition's, are once they were read


def named(model: str | None) -> str | None:
    """None where the embedded model is named, unless that is a folder here."""
    return None if model == EMBEDDED and not Path(EMBEDDED).exists() else model


ModelName = Annotated[
    str | None,
    typer.Argument(callback=named, help="A model's folder or name, such as smollm2; the embedded one if left out."),
]
Precision = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto for the checkpoint's own.")]
Device = Annotated[str | None, typer.Option(help="Where to run, such as cuda; the default is the best there is.")]
RowsFolder = Annotated[Path, typer.Option("--out", "-o", help="Rows and pictures go to this folder.")]
