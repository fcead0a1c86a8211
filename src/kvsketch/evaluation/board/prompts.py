"""A file of the prompts that were asked: a package that answers them too can stand beside ours on the board."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsketch.evaluation.answers.runner import Runner
from kvsketch.evaluation.board.names import SAME_PROMPT
from kvsketch.evaluation.results.rows import RowsFile, key_of


def write_prompts(path: Path, about: Mapping[str, Any], runner: Runner) -> None:
    """Add a runner's prompts that the file lacks: labels, tokens of document and question, right answers."""
    file = RowsFile(path, about, SAME_PROMPT)
    for labels, modes, make in runner.prompts():
        wanted = [labels | {"asked": asked} for asked in modes]
        missing = [one for one in wanted if key_of(one, SAME_PROMPT) not in file.done]
        if missing:
            prompt = make()
            said = {"context": prompt.context, "question": prompt.question, "answers": list(prompt.answers)}
            file.add(one | said for one in missing)
