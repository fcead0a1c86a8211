"""One page that needs no other file: the board, what its columns mean, and where its numbers come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from kvsketch.evaluation.board.columns import LIMIT, NOISE, PROSE
from kvsketch.evaluation.board.content import Content
from kvsketch.files import replacing


@dataclass(frozen=True, kw_only=True)
class About:
    """What the page says beside its numbers."""

    model: str
    command: str
    runs: Sequence[Mapping[str, Any]]
    able: float | None
    left_out: Sequence[str] = ()  # specs for which the model has no profile
    agreement: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # of packages: answers as ours, and all


def write_board(path: Path, board: Content, about: About) -> Path:
    """Write the page."""
    source = (files("kvsketch.evaluation.board") / "board.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(source).render(board=board, about=about, limit=LIMIT, noise=NOISE, prose=PROSE)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(text.encode())
    return path
