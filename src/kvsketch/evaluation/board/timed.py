"""What is timed: one document, read and compressed several times, and gone on with token by token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsketch.evaluation.board.names import SPEED_KEY
from kvsketch.evaluation.results.rows import Row
from kvsketch.evaluation.tasks import TASKS, Sample, Setting
from kvsketch.evaluation.tasks.length import Fitter

TASK = "lines"  # whose document it is
READ = 3  # times that it is read in each way
WARM = 2  # steps that are not counted


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`methods`, exact among them, on a prompt of `tokens`: `turns` times compressed, then `steps` further tokens."""

    methods: Sequence[str]
    tokens: int
    turns: int = 7
    steps: int = 32

    @property
    def needed(self) -> int:
        """Tokens of a document that this takes."""
        return self.tokens + WARM + self.steps

    def labels(self, method: str) -> Row:
        """What tells a row from others."""
        return dict(zip(SPEED_KEY, (TASK, self.tokens, self.steps, self.turns, method), strict=True))

    def document(self, encode: Callable[[str], list[int]]) -> list[int]:
        """The tokens that are read, and those that follow them: the same ones for the same tokenizer."""

        def count(sample: Sample) -> int:
            return len(encode(sample.context))

        long_enough = self.needed + self.needed // 10 + 100
        made = Fitter(TASKS[TASK], Setting(size=1, wording="compact"), count).sample(long_enough, "speed")
        return encode(made.context)[: self.needed]
