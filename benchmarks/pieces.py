"""Pieces of long texts, evenly spaced in each, as a corpus for `kvsketch fit` or as texts for studies of layers."""

import json
from pathlib import Path
from typing import Annotated

import typer

from kvsketch.cli.models import load_model

MARGIN = 0.03  # share of a text to skip at either end: title pages, contents, licences


def main(
    files: Annotated[list[Path], typer.Argument(help="Texts.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="A .jsonl file, or a folder for one .txt file per piece.")],
    model: Annotated[str, typer.Option(help="The model whose tokens are counted.")] = "smollm2",
    each: Annotated[int, typer.Option(help="Pieces from each text.")] = 3,
    tokens: Annotated[int, typer.Option(help="Tokens in each piece.")] = 4096,
) -> None:
    """Cut pieces of equally many tokens out of texts, at equal distances."""
    _, tokenizer = load_model(model, "auto", "cpu")
    found = [
        (f"{path.name.removesuffix('.txt')}-{number}", piece)
        for path in files
        for number, piece in enumerate(pieces(tokenizer, path.read_text(encoding="utf-8"), each, tokens))
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".jsonl":
        out.write_text("".join(json.dumps({"text": piece}) + "\n" for _, piece in found), encoding="utf-8")
        return
    out.mkdir(parents=True, exist_ok=True)
    for name, piece in found:
        (out / f"{name}.txt").write_text(piece, encoding="utf-8")


def pieces(tokenizer, text: str, each: int, tokens: int) -> list[str]:
    """The first `tokens` tokens of `each` equal parts of a text, each beginning with a new line of text."""
    first, length = int(MARGIN * len(text)), int((1 - 2 * MARGIN) * len(text))
    found = []
    for number in range(each):
        start = text.index("\n", first + length * number // each) + 1
        read = tokenizer(text[start : start + 8 * tokens], return_offsets_mapping=True, add_special_tokens=False)
        assert len(read["input_ids"]) >= tokens, f"{len(read['input_ids'])} tokens in {8 * tokens} characters"
        found.append(text[start : start + read["offset_mapping"][tokens - 1][1]])
    return found


if __name__ == "__main__":
    typer.run(main)
