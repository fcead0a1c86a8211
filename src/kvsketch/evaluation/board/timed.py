"""What is timed: one document, read and compressed several times, then continued token by token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsketch.evaluation.board.names import SPEED_KEY
from kvsketch.evaluation.results.rows import Row
from kvsketch.evaluation.tasks import TASKS, Sample, Setting
from kvsketch.evaluation.tasks.length import Fitter

TASK = "lines"  # the task whose document is timed
READ = 3  # how often the document is read in each way
WARM = 2  # steps that are not counted


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Times `methods`, exact included, on a prompt of `tokens`: compressed `turns` times, then `steps` more tokens."""

    methods: Sequence[str]
    tokens: int
    turns: int = 7
    steps: int = 32

    @property
    def needed(self) -> int:
        """How many tokens the document must have."""
        return self.tokens + WARM + self.steps

    def labels(self, method: str) -> Row:
        """The labels that tell a row from others."""
        return dict(zip(SPEED_KEY, (TASK, self.tokens, self.steps, self.turns, method), strict=True))

    def document(self, encode: Callable[[str], list[int]]) -> list[int]:
        """The tokens that are read, and those that follow; the same for the same tokenizer."""

        def count(sample: Sample) -> int:
            return len(encode(sample.context))

        long_enough = self.needed + self.needed // 10 + 100
        made = Fitter(TASKS[TASK], Setting(size=1, wording="compact"), count).sample(long_enough, "speed")
        return encode(made.context)[: self.needed]
