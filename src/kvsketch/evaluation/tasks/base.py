"""What a task is: documents of any size, made from a seed, with questions, and a rule that scores the answers."""

import random
import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from kvsketch.evaluation.tasks.haystack import Grammar, Haystack

Wording = Literal["official", "compact"]
WORDINGS: tuple[Wording, ...] = ("official", "compact")


@dataclass(frozen=True)
class Question:
    """A question that is asked after the document, and its right answers."""

    text: str
    answers: tuple[str, ...]
    reply: str  # a right answer in full, up to where it ends: what a model is trained to say
    depth: float | None = None  # where in the document the (first) answer lies; 0 is the start
    opening: str = ""  # the first words of the answer, which are given

    @property
    def prompt(self) -> str:
        """All text between the document and the answer."""
        return self.text + self.opening


@dataclass(frozen=True)
class Sample:
    """A document with its introduction, and questions on it. A prompt is the context and one of the questions."""

    context: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a document is to be made."""

    size: int  # number of records, sentences or numbers in it, whichever the task counts
    questions: int = 1  # the most; some documents allow only one
    depth: float | None = None  # where the needle goes, in the tasks that have just one; anywhere if None
    wording: Wording = "official"
    haystack: Haystack = field(default_factory=Grammar)
    invented: float = 0.0  # the share of words in names that are made up
    length: int | None = None  # tokens aimed at; some official generators depend on it


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of document and question, with its official scoring rule."""

    name: str
    suite: Literal["lines", "needle", "ruler", "infinite"]
    dense: bool  # every part of the document is needed by some question: nothing can be dropped without loss
    make: Callable[[random.Random, Setting], Sample]
    score: Callable[[str, Sequence[str]], float]
    new_tokens: int  # the official length of an answer
    smallest: int = 1  # the least size
    takes_depth: bool = False  # whether the place of the answer can be chosen
    hides: bool = False  # whether the answer is hidden in a haystack, which can be replaced
    asks_first: bool = False  # the official wording asks before the document too, so the question is always known


def spread(
    draw: random.Random, pieces: list[str], inserts: list[str], depth: float | None
) -> tuple[list[str], list[float]]:
    """Pieces with inserts at random places, in a random order; and the depth of each insert, in the order given.

    The depth of a single insert can be given: the share of the text, in characters, before it.
    """
    before = [0, *accumulate(map(len, pieces))]
    if depth is not None and len(inserts) == 1:
        places = [bisect_left(before, depth * before[-1])]
    else:
        places = [draw.randint(0, len(pieces)) for _ in inserts]
    order = sorted(range(len(inserts)), key=lambda one: (places[one], draw.random()))
    out, start = list[str](), 0
    for one in order:
        out += [*pieces[start : places[one]], inserts[one]]
        start = places[one]
    return out + pieces[start:], [before[place] / max(1, before[-1]) for place in places]


def ask_records(draw: random.Random, setting: Setting) -> list[tuple[int, float]]:
    """Which of `size` records are asked for, each with its depth; the first at the depth wanted, if one is given."""
    last = setting.size - 1
    asked = draw.sample(range(setting.size), min(setting.questions, setting.size))
    if setting.depth is not None:
        asked[0] = round(setting.depth * last)
    return [(number, number / max(1, last)) for number in asked]


def random_uuid(draw: random.Random) -> str:
    """A version 4 UUID."""
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))
