"""Documents of a given length in tokens."""

import dataclasses
import random
from collections.abc import Callable

from kvsketch.evaluation.results.rows import name_without_digest
from kvsketch.evaluation.tasks.base import Sample, Setting, Task
from kvsketch.evaluation.tasks.haystack import MADE_UP

PROBED = (100, 300)  # sizes of documents from which the tokens of a unit are estimated
PROBE_LENGTH = 8192
FILLED = 0.98  # a document this full is good enough


class TooShortError(ValueError):
    """A length that is too short for a document of the task."""


class Fitter:
    """Makes documents of one task with a wanted length; the same seed gives the same document."""

    def __init__(self, task: Task, setting: Setting, count: Callable[[Sample], int]) -> None:
        """`count` gives the tokens of a sample's longest prompt; the size in `setting` is ignored."""
        self.task, self.setting, self.count = task, setting, count
        low, high = (self.count(self._make(size, PROBE_LENGTH, "probe", None)) for size in PROBED)
        self.tokens_per_unit = max(1e-3, (high - low) / (PROBED[1] - PROBED[0]))

    @property
    def _name(self) -> str:
        """The name of the task, and of the user's text in which it hides things, if there is one."""
        text = self.setting.haystack.name
        return self.task.name + f" in {name_without_digest(text)}" * (self.task.hides and text not in MADE_UP)

    def sample(self, length: int, seed: str, depth: float | None = None) -> Sample:
        """A document whose longest prompt, context and question, has at most `length` tokens."""
        smallest = self.task.smallest
        fits, too_long = smallest, None
        best = self._make(smallest, length, seed, depth)
        tokens = self.count(best)
        if tokens > length:
            raise TooShortError(
                f"{self._name}: {length:,} tokens are too few for one sample, which takes {tokens:,} at the least"
            )
        while tokens < FILLED * length:
            size = fits + max(1, int((length - tokens) / self.tokens_per_unit))
            if too_long is not None and size >= too_long:
                size = (fits + too_long) // 2
            if size == fits:  # there is no size between these two
                break
            tried = self._make(size, length, seed, depth)
            counted = self.count(tried)
            if counted > length:
                too_long = size
            else:
                fits, best, tokens = size, tried, counted
        return best

    def _make(self, size: int, length: int, seed: str, depth: float | None) -> Sample:
        setting = dataclasses.replace(self.setting, size=size, depth=depth, length=length)
        return self.task.make(random.Random(f"{self.task.name}/{setting.wording}/{seed}"), setting)
