"""LongEval's line retrieval: a record of lines, each with a random number; one is asked for."""

import random

from kvsketch.evaluation.tasks.base import Question, Sample, Setting, Task, ask_records
from kvsketch.evaluation.tasks.scoring import last_number
from kvsketch.evaluation.tasks.words import names

HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding "
    "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of "
    "a certain line index. Now the record start:\n\n"
)
LARGEST = 50_000


def lines(draw: random.Random, setting: Setting) -> Sample:
    """A record of `size` lines."""
    keys = names(draw, setting.size, setting.invented)
    numbers = [draw.randint(1, LARGEST) for _ in keys]
    asked = ask_records(draw, setting)
    if setting.wording == "official":
        context = HEADER + "".join(
            f"line {key}: REGISTER_CONTENT is <{number}>\n" for key, number in zip(keys, numbers, strict=True)
        )
        ask = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {}? I need the number. "
    else:
        context = "A record of lines:\n" + "".join(
            f"line {key}: <{number}>\n" for key, number in zip(keys, numbers, strict=True)
        )
        ask = "\nWhat is the number in line {}? <"
    return Sample(
        context,
        tuple(Question(ask.format(keys[i]), (str(numbers[i]),), f"{numbers[i]}>", depth) for i, depth in asked),
    )


TASKS = (
    Task(name="lines", suite="lines", dense=True, make=lines, score=last_number, new_tokens=100, takes_depth=True),
)
