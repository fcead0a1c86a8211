"""InfiniteBench's synthetic tasks: Retr.PassKey, Retr.Number, Retr.KV and Math.Find."""

import random
import statistics

from kvsketch.evaluation.tasks.base import Question, Sample, Setting, Task, ask_records, random_uuid, spread
from kvsketch.evaluation.tasks.scoring import among_words, first_digits, first_number

HIDDEN = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information.\n\n"
)
LETTERS, DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789"


def passkey(draw: random.Random, setting: Setting) -> Sample:
    """Five digits hidden in noise."""
    return _hidden_digits(draw, setting, str(draw.randint(10_000, 99_999)), "pass key")


def number_string(draw: random.Random, setting: Setting) -> Sample:
    """Ten digits in noise, with many repeats: five at random, then five times one of them is doubled in place."""
    digits = [str(draw.randint(0, 9)) for _ in range(5)]
    for _ in range(5):
        place = draw.randrange(len(digits))
        digits.insert(place, digits[place])
    return _hidden_digits(draw, setting, "".join(digits), "sequence of digits")


def _hidden_digits(draw: random.Random, setting: Setting, key: str, what: str) -> Sample:
    sentence = f"The {what} is {key}. Remember it. {key} is the {what}."
    pieces, depths = spread(draw, setting.haystack.pieces(draw, setting.size), [sentence], setting.depth)
    if setting.wording == "official":
        context = HIDDEN + setting.haystack.joint.join(pieces)
        question = Question(f"\n\nWhat is the {what}?\n\n", (key,), f" {key}.", depths[0], f"The {what} is")
    else:
        context = "A text:\n" + setting.haystack.joint.join(pieces)
        question = Question(f"\nWhat is the {what}?", (key,), f"{key}.", depths[0], f" The {what} is ")
    return Sample(context, (question,))


def key_values(draw: random.Random, setting: Setting) -> Sample:
    """A JSON object of `size` random pairs. The compact wording has ids of six letters and digits by turns."""
    identifier = random_uuid if setting.wording == "official" else _short_id
    pairs = dict[str, str]()
    while len(pairs) < setting.size:
        pairs[identifier(draw)] = identifier(draw)
    keys = list(pairs)
    asked = ask_records(draw, setting)
    body = ", ".join(f'"{key}": "{value}"' for key, value in pairs.items())
    if setting.wording == "official":
        context = (
            f"Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{{{body}}}"
        )
        ask = '\n\n\nKey: "{}"\nThe value associated with the specified key is: '
        end = ""
    else:
        context, ask, end = f"JSON data:\n{{{body}}}", '\nKey and value: "{}": "', '"'
    return Sample(
        context,
        tuple(Question(ask.format(keys[i]), (pairs[keys[i]],), pairs[keys[i]] + end, depth) for i, depth in asked),
    )


def _short_id(draw: random.Random) -> str:
    return "".join(draw.choice(LETTERS) + draw.choice(DIGITS) for _ in range(3))


def math_find(draw: random.Random, setting: Setting) -> Sample:
    """One of the three largest or smallest of `size` whole numbers from 0 to 99, or their median.

    One of the two bounds is moved by up to a fifth.
    """
    low, high = draw.choice(((0, 99 - draw.randint(0, 20)), (draw.randint(0, 20), 99)))
    numbers = [draw.randint(low, high) for _ in range(setting.size)]
    distinct = sorted(set(numbers))
    rank = min(len(distinct), 3)
    found: dict[str, float] = {"median": float(statistics.median(numbers))}
    for place, word in enumerate(("", "second ", "third ")[:rank]):
        found[f"{word}largest number"] = float(distinct[-1 - place])
        found[f"{word}smallest number"] = float(distinct[place])
    body = ", ".join(map(str, numbers))
    asked = draw.sample(sorted(found), min(setting.questions, len(found)))
    if setting.wording == "official":  # the question stands before the list too: one question a document
        what = asked[0]
        context = f"What is the {what} in the following list?\n\n[{body}]"
        text = f"\n\nYou should answer with only one number, no other words. The {what} of the list is: "
        return Sample(context, (Question(text, (_plain(found[what]),), _plain(found[what])),))
    context = f"A list of numbers:\n{body}"
    return Sample(
        context,
        tuple(
            Question(f"\nThe {what} of the list is ", (_plain(found[what]),), f"{_plain(found[what])}.\n")
            for what in asked
        ),
    )


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


TASKS = (
    Task(
        name="passkey",
        suite="infinite",
        dense=False,
        make=passkey,
        score=first_digits,
        new_tokens=6,
        takes_depth=True,
        hides=True,
    ),
    Task(
        name="number_string",
        suite="infinite",
        dense=False,
        make=number_string,
        score=first_digits,
        new_tokens=12,
        takes_depth=True,
        hides=True,
    ),
    Task(name="kv", suite="infinite", dense=True, make=key_values, score=among_words, new_tokens=50, takes_depth=True),
    Task(
        name="math_find",
        suite="infinite",
        dense=False,
        make=math_find,
        score=first_number,
        new_tokens=3,
        smallest=3,
        asks_first=True,
    ),
)
