"""The board as a page that needs no other file, with what its columns mean and where its numbers come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsketch.evaluation.board.columns import LIMIT, NOISE, PROSE
from kvsketch.evaluation.board.content import Content
from kvsketch.evaluation.pages import write_html


@dataclass(frozen=True, kw_only=True)
class About:
    """What the page says besides the numbers."""

    model: str
    command: str
    runs: Sequence[Mapping[str, Any]]
    able: float | None
    left_out: Sequence[str] = ()  # specs for which the model has no profile
    agreement: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # by package: answers as ours, and all


def write_board(path: Path, board: Content, about: About) -> Path:
    """Write the board's page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"board": board, "about": about, "limit": LIMIT, "noise": NOISE, "prose": PROSE}
    return write_html(path, "kvsketch.evaluation.board", "board.html", **content)
