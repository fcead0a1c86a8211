"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from kvsketch.editions import EDITIONS, EMBEDDED

REPLY = 40  # most tokens of an answer by a model inside the package; right answers have fewer, others would go on


def named(model: str | None) -> str | None:
    """The model's name; None for the embedded model, unless there is a folder of that name here."""
    return None if model == EMBEDDED and not Path(EMBEDDED).exists() else model


def is_ours(model: str | None) -> bool:
    """Whether the name means a model inside the package, and no folder here."""
    return model is None or (model in EDITIONS and not Path(model).exists())


ModelName = Annotated[
    str | None,
    typer.Argument(callback=named, help="A model's folder or name, such as smollm2; the embedded model if left out."),
]
Precision = Annotated[str, typer.Option(help="Precision: float32, bfloat16, float16, or auto: the checkpoint's own.")]
Device = Annotated[
    str | None, typer.Option(help="Device to run on, such as cuda; left out, cuda if it is there, else cpu.")
]
RowsFolder = Annotated[Path, typer.Option("--out", "-o", help="Folder for the result rows and the pictures.")]
