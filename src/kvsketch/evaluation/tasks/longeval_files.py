"""LongEval's own test files, if the user has them: `{200,300,400,...}_lines.jsonl`, also as .gz."""

import gzip
import json
import zlib
from pathlib import Path

from kvsketch.evaluation.results.rows import name_with_digest
from kvsketch.evaluation.tasks.base import Question, Sample
from kvsketch.files import as_text, is_text, name_of, read_file

MARK = "\nNow the record is over."


def read_cases(path: str | Path) -> tuple[str, list[Sample]]:
    """A name, which differs for other content; and the cases, split where the question begins."""
    path = Path(path)
    packed = content = read_file(path)
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(packed)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} cannot be unpacked: {error}") from error
    lines = enumerate(as_text(content, path).split("\n"), 1)
    name = name_with_digest(name_of(path).split(".")[0] or path.name, packed)
    return name, [_case(line, path, number) for number, line in lines if line.strip()]


def _case(line: str, path: Path, at: int) -> Sample:
    try:
        case = json.loads(line)
        context, mark, question = case["prompt"].rpartition(MARK)
        number, count, place = float(case["expected_number"]), int(case["num_lines"]), int(case["random_idx"][1])
        if not number.is_integer():
            raise ValueError("an expected_number that is no whole one")
        answer = str(int(number))
        if not 0 <= place < count or not is_text(case["prompt"] + answer):
            raise ValueError(f"line {place} of {count}, or letters that UTF-8 does not have")
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}, line {at}: not a LongEval lines case ({error!r:.100})") from error
    if not mark:
        raise ValueError(f"{path}, line {at}: the prompt has no {MARK.strip()!r}, so it is not a LongEval lines case")
    return Sample(context, (Question(mark + question, (answer,), f"{answer}>", place / max(1, count - 1)),))
