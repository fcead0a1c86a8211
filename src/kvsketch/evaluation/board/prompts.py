"""What was asked, in a file: another package that answers the same prompts can stand beside ours on the board."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsketch.evaluation.answers.runner import Runner
from kvsketch.evaluation.board.names import PROMPT_KEY
from kvsketch.evaluation.results.rows import RowsFile, key_of


def write_prompts(path: Path, about: Mapping[str, Any], runner: Runner) -> None:
    """Add the prompts of a runner that the file lacks: labels, tokens of document and question, right answers."""
    file = RowsFile(path, about, PROMPT_KEY)
    for labels, modes, make in runner.prompts():
        if key_of(labels, PROMPT_KEY) not in file.done:
            prompt = make()
            said = {"context": prompt.context, "question": prompt.question, "answers": list(prompt.answers)}
            file.add([labels | {"asked": list(modes)} | said])
