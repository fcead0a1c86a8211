"""Documents of a given length in tokens."""

import dataclasses
import random
from collections.abc import Callable

from kvsketch.evaluation.tasks.base import Sample, Setting, Task

PROBED = (40, 200)  # sizes from which a unit's tokens are estimated
TRIES = 8  # corrections of the estimate before it is walked down
FILLED = 0.97  # a document this full is good enough


class Fitter:
    """Makes documents of one task as long as wanted, the same ones for the same seed."""

    def __init__(self, task: Task, setting: Setting, count: Callable[[str], int]) -> None:
        """`count` gives the tokens of a text; the size in `setting` is not looked at."""
        self.task, self.setting, self.count = task, setting, count
        self.each = self._tokens_of_a_unit()

    def sample(self, length: int, seed: str, depth: float | None = None) -> Sample:
        """A document whose longest prompt, context and question, has at most `length` tokens."""
        size = max(self.task.smallest, int(length / self.each))
        best: tuple[int, Sample] | None = None
        for _ in range(TRIES):
            sample = self._make(size, seed, depth)
            tokens = self._tokens(sample)
            if tokens <= length and (best is None or size > best[0]):
                best = size, sample
            if best is not None and tokens <= length and tokens >= FILLED * length:
                break
            step = int((length - tokens) / self.each)
            bigger = max(self.task.smallest, size + (step if tokens <= length else min(step, -1)))
            if bigger == size or (best is not None and bigger <= best[0]):
                break
            size = bigger
        if best is None and size > self.task.smallest:  # far off: the estimate is no help
            size = self.task.smallest
            sample = self._make(size, seed, depth)
            tokens = self._tokens(sample)
            best = (size, sample) if tokens <= length else None
        if best is None:
            raise ValueError(
                f"{self.task.name}: {length:,} tokens are too few for one sample, which takes {tokens:,} at the least"
            )
        return best[1]

    def _make(self, size: int, seed: str, depth: float | None) -> Sample:
        setting = dataclasses.replace(self.setting, size=size, depth=depth)
        return self.task.make(random.Random(f"{self.task.name}/{self.setting.wording}/{seed}"), setting)

    def _tokens(self, sample: Sample) -> int:
        return self.count(sample.context) + max(self.count(question.prompt) for question in sample.questions)

    def _tokens_of_a_unit(self) -> float:
        low, high = (self.count(self._make(size, "probe", None).context) for size in PROBED)
        return max(1e-3, (high - low) / (PROBED[1] - PROBED[0]))
