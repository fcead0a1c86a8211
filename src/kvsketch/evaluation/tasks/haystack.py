"""What needles are hidden in: sentences that are made up, or a text of the user's."""

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
TWENTY = ":sentences"  # as --haystack it names these
LONGEST = 2000  # characters of a sentence; novels that models are fitted to and measured on have up to 1,765
PIECE = re.compile(r".{1,400}(?:\s|$)|.{1,400}")  # some sixty words of what is longer, or a part of a very long one
SENTENCE_END = re.compile(r"[.!?][\"')\]\u2019\u201d\u00bb]*(?=\s)")  # with the quotes that are closed there


class Haystack(ABC):
    """Anything that gives pieces of text."""

    name: str
    joint: str  # what stands between two pieces
    letters: float = math.inf  # in all its pieces, if these come again after that

    @abstractmethod
    def pieces(self, draw: random.Random, count: int) -> list[str]:
        """So many sentences or lines, none of which ends with white space."""

    def of(self, sample: int) -> "Haystack":
        """The one that a sample's needles are hidden in."""
        return self


class Sentences(Haystack):
    """The same few sentences again and again: the noise that the first edition of the embedded model was made with."""

    name, joint = "noise", "\n"

    def pieces(self, draw: random.Random, count: int) -> list[str]:
        return draw.choices(SENTENCES, k=count)


class Grammar(Haystack):
    """Sentences of a small grammar, each another one."""

    name, joint = "grammar", " "

    def pieces(self, draw: random.Random, count: int) -> list[str]:
        write = Writer(draw).sentence
        return [write() for _ in range(count)]


MADE_UP = frozenset((Sentences.name, Grammar.name))  # none is a text of the user's


class TextFile(Haystack):
    """The sentences of a text, from a random one on and round again."""

    joint = " "

    def __init__(self, path: str | Path) -> None:
        content = read_file(path)  # once: what comes through a pipe does not come again
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
    """A sentence, if there is one, as a line; one longer than any of a novel in pieces, so that they fill any prompt.

    Such a text has few full stops: it is cut at the ends of its lines, and longer lines between words. Prompts made of
    sentences are what they would be without.
    """
    whole = " ".join(sentence.split())
    if len(whole) <= LONGEST:
        return [whole] if whole else []
    lines = [" ".join(line.split()) for line in sentence.splitlines()]
    return [piece.strip() for line in lines for piece in PIECE.findall(line)]


def names_of(texts: Sequence[Haystack]) -> list[str]:
    """The names of several texts, if none comes twice."""
    names = [text.name for text in texts]
    if len(set(names)) < len(names):
        raise ValueError(f"a haystack is named twice in {', '.join(map(name_without_digest, names))}")
    return names


class Texts(Haystack):
    """Several texts, of which samples take turns."""

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
    """The text of a file, or those of several, or noise where there is none; TWENTY names the twenty sentences."""
    haystacks = [Sentences() if str(path) == TWENTY else TextFile(path) for path in paths]
    return Grammar() if not paths else haystacks[0] if len(haystacks) == 1 else Texts(haystacks)
