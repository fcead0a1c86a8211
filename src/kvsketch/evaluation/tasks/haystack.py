"""Haystacks, in which needles are hidden: made-up sentences, or a text of the user's."""

import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from kvsketch.evaluation.results.rows import name_with_digest, name_without_digest
from kvsketch.evaluation.tasks.prose import Writer
from kvsketch.files import as_text, name_of, read_file

SENTENCES = (
    "The kettle sings and the window is open.",
    "A cart rolls down the lane toward the sea.",
    "Nobody at the table was in a hurry.",
    "The bread is warm, and the butter is soft.",
    "Two birds sit on the roof of the barn.",
    "The road turns left behind the old mill.",
    "It rained in the night, and the grass is wet.",
    "The clock in the hall is slow again.",
    "A letter lies on the desk by the lamp.",
    "The children went home before dark.",
    "Some say the winter will be long.",
    "The dog sleeps in the sun all day.",
    "There is a path along the river.",
    "The baker opens the door at six.",
    "We walked on and did not look back.",
    "The boat is tied to the pier.",
    "Smoke rises from the house on the hill.",
    "The market is loud on a fine morning.",
    "He closed the book and went to bed.",
    "A cold wind blows from the north.",
)
TWENTY = ":sentences"  # given as --haystack, it stands for these sentences
LONGEST = 2000  # characters of a sentence; those of the novels used for fitting and measuring have up to 1,765
PIECE = re.compile(r".{1,400}(?:\s|$)|.{1,400}")  # some sixty words of a longer line, or a part of a very long word
SENTENCE_END = re.compile(r"[.!?][\"')\]\u2019\u201d\u00bb]*(?=\s)")  # with closing quotes


class Haystack(ABC):
    """A source of pieces of text."""

    name: str
    joint: str  # what stands between two pieces
    letters: float = math.inf  # of all its pieces, if these are repeated after that

    @abstractmethod
    def pieces(self, draw: random.Random, count: int) -> list[str]:
        """`count` sentences or lines, none of which ends with white space."""

    def of(self, sample: int) -> "Haystack":
        """The haystack in which a sample's needles are hidden."""
        return self


class Sentences(Haystack):
    """The same few sentences again and again: the noise on which the embedded model's first edition was trained."""

    name, joint = "noise", "\n"

    def pieces(self, draw: random.Random, count: int) -> list[str]:
        return draw.choices(SENTENCES, k=count)


class Grammar(Haystack):
    """Sentences of a small grammar, each a new one."""

    name, joint = "grammar", " "

    def pieces(self, draw: random.Random, count: int) -> list[str]:
        write = Writer(draw).sentence
        return [write() for _ in range(count)]


MADE_UP = frozenset((Sentences.name, Grammar.name))  # neither is a text of the user's


class TextFile(Haystack):
    """The sentences of a text, from a random one on; after the last comes the first."""

    joint = " "

    def __init__(self, path: str | Path) -> None:
        content = read_file(path)  # read once: a pipe cannot be read again
        text = as_text(content, path)
        self.name = name_with_digest(name_of(path), text.encode())
        found = re.split(r"\n\s*\n", SENTENCE_END.sub(r"\g<0>\n\n", text))
        self.sentences = [piece for sentence in found for piece in _cut(sentence)]
        if not self.sentences:
            raise ValueError(f"{path} is empty: there is nothing to hide needles in")
        self.letters = sum(map(len, self.sentences))

    def pieces(self, draw: random.Random, count: int) -> list[str]:
        start = draw.randrange(len(self.sentences))
        return [self.sentences[(start + i) % len(self.sentences)] for i in range(count)]


def _cut(sentence: str) -> list[str]:
    """A sentence as one line, or none if it is blank; if it is longer than any of a novel, pieces of it.

    A text with such sentences has few full stops. It is cut at line ends, and longer lines between words, so that
    pieces can fill any prompt. Prompts made of shorter sentences are not changed by this.
    """
    whole = " ".join(sentence.split())
    if len(whole) <= LONGEST:
        return [whole] if whole else []
    lines = [" ".join(line.split()) for line in sentence.splitlines()]
    return [piece.strip() for line in lines for piece in PIECE.findall(line)]


def names_of(texts: Sequence[Haystack]) -> list[str]:
    """The names of several texts; refuses a name that comes twice."""
    names = [text.name for text in texts]
    if len(set(names)) < len(names):
        raise ValueError(f"a haystack is named twice in {', '.join(map(name_without_digest, names))}")
    return names


class Texts(Haystack):
    """Several texts, which the samples use by turns."""

    joint = TextFile.joint

    def __init__(self, texts: Sequence[Haystack]) -> None:
        names = names_of(texts)
        self.texts = texts
        self.letters = min(text.letters for text in texts)
        self.name = name_with_digest("+".join(map(name_without_digest, names)), "+".join(names).encode())

    def pieces(self, draw: random.Random, count: int) -> list[str]:
        return draw.choice(self.texts).pieces(draw, count)

    def of(self, sample: int) -> Haystack:
        return self.texts[sample % len(self.texts)]


def haystack_of(paths: Sequence[str | Path]) -> Haystack:
    """The haystack of one or several files, or noise without any; TWENTY stands for the twenty sentences."""
    haystacks = [Sentences() if str(path) == TWENTY else TextFile(path) for path in paths]
    return Grammar() if not paths else haystacks[0] if len(haystacks) == 1 else Texts(haystacks)
