"""What needles are hidden in: sentences of no matter, or a text of the user's."""

import random
from abc import ABC, abstractmethod
from pathlib import Path

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


class Haystack(ABC):
    """Anything that gives pieces of text."""

    name: str

    @abstractmethod
    def pieces(self, draw: random.Random, count: int) -> list[str]:
        """So many sentences or lines, none of which ends with white space."""


class Noise(Haystack):
    """Sentences of the project's own, in random order."""

    name = "noise"

    def pieces(self, draw: random.Random, count: int) -> list[str]:
        return draw.choices(SENTENCES, k=count)


class TextFile(Haystack):
    """The lines of a text, from a random one on and round again."""

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_file():
            raise ValueError(f"there is no file {path} to hide needles in")
        self.name = Path(path).name
        self.lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        if not self.lines:
            raise ValueError(f"{path} is empty: there is nothing to hide needles in")

    def pieces(self, draw: random.Random, count: int) -> list[str]:
        start = draw.randrange(len(self.lines))
        return [self.lines[(start + i) % len(self.lines)].rstrip() for i in range(count)]
