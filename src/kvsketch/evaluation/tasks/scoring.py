"""The official scoring rules, one function each: an output and the right answers give a score between 0 and 1."""

import re
from collections.abc import Sequence


def last_number(output: str, answers: Sequence[str]) -> float:
    """LongEval: the last run of digits is the answer; any Unicode digits count, and 2,416 is 416."""
    numbers = re.findall(r"\d+", output)
    return float(bool(numbers) and _whole(numbers[-1]) == int(answers[0]))


def all_contained(output: str, answers: Sequence[str]) -> float:
    """RULER's string_match_all: the share of the answers that occur in the output, whatever the case."""
    text = re.sub(r"[\x00-\x1f]", "\n", output.strip()).strip().lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)


def first_digits(output: str, answers: Sequence[str]) -> float:
    """InfiniteBench's pass key and number string: the first run of ASCII digits, compared as text."""
    found = re.search(r"[0-9]+", output)
    return float(found is not None and found.group() == answers[0])


def among_words(output: str, answers: Sequence[str]) -> float:
    r"""InfiniteBench's Retr.KV: the answer is one of the words, with \n : " ' . , ? ! { } taken as blanks."""
    return float(answers[0] in re.sub(r"""[\n:"'.,?!{}]""", " ", output).split())


def first_number(output: str, answers: Sequence[str]) -> float:
    """InfiniteBench's Math.Find: the first number; if the answer is a whole number, a decimal fraction is wrong.

    The official script stops with an error there, which must be meant as a wrong answer.
    """
    found = re.search(r"\d+\.\d+|\d+", output)
    if found is None:
        return 0.0
    if "." in answers[0]:
        return float(float(found.group()) == float(answers[0]))
    return float("." not in found.group() and _whole(found.group()) == int(answers[0]))


def _whole(digits: str) -> int | None:
    """The number; None if it is too long for Python to read, as no right answer is."""
    return int(digits) if len(digits) < 1000 else None
