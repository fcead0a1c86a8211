"""`kvsketch import`: turn a GGUF file into a folder that every other command takes as a model."""

from pathlib import Path
from typing import Annotated

import typer

from kvsketch.cli.app import check_folder
from kvsketch.cli.notes import say


def import_model(
    file: Annotated[Path, typer.Argument(help="The GGUF file to read.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to make, new or empty.")],
    dtype: Annotated[
        str, typer.Option(help="Precision: float32 keeps every digit; bfloat16 or float16 take half the room.")
    ] = "float32",
) -> None:
    """Turn a GGUF file into a folder that transformers loads: weights in safetensors, and the tokenizer."""
    check_folder("--out", out)
    if file.is_dir():
        raise ValueError(f"{file} is a folder: name a GGUF file. A folder that holds a model needs no import")
    if not file.is_file():
        raise ValueError(f"there is no file {file}: name a GGUF file")
    from kvsketch.checkpoints import import_gguf

    made = import_gguf(file, out, dtype, say)
    say(f"{out}: {made.architecture}, {made.parameters:,} numbers in {made.dtype}, the same answers as the file's own")
