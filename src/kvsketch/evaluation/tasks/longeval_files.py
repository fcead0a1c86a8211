"""LongEval's own test files, where the user has them: `{200,300,400,...}_lines.jsonl`, also as .gz."""

import gzip
import json
import zlib
from pathlib import Path

from kvsketch.evaluation.rows import name_with_content
from kvsketch.evaluation.tasks.base import Question, Sample

MARK = "\nNow the record is over."


def name_of_file(path: str | Path) -> str:
    """A name that is another one for another content."""
    path = Path(path)
    return name_with_content(path.name.split(".")[0], path.read_bytes())


def read_cases(path: str | Path) -> list[Sample]:
    """The cases of a file, split where the record ends and the question begins."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        packed = path.read_bytes()
        text = (gzip.decompress(packed) if path.suffix == ".gz" else packed).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return [_case(line, path, number) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _case(line: str, path: Path, number: int) -> Sample:
    try:
        case = json.loads(line)
        context, mark, question = case["prompt"].rpartition(MARK)
        answer, count, place = str(case["expected_number"]), int(case["num_lines"]), int(case["random_idx"][1])
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"{path}, line {number}: not a LongEval lines case ({error!r})") from error
    if not mark:
        raise ValueError(
            f"{path}, line {number}: the prompt has no {MARK.strip()!r}, so it is not a LongEval lines case"
        )
    return Sample(context, (Question(mark + question, (answer,), f"{answer}>", place / max(1, count - 1)),))
