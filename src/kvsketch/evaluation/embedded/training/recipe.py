"""The numbers of the training: how long it takes, what is trained, and when documents get longer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

LENGTHS = (192, 384, 768, 1536, 3072, 4608, 8192)
SHARE_AT_LENGTH = (0.04, 0.1, 0.2, 0.35, 0.55, 0.8, 1.0)  # of all tokens: then the next length comes, solved or not
NOT_BEFORE = (0.0, 0.0, 0.0, 0.0, 0.2, 0.4, 0.8)  # of all tokens, however soon shorter ones are solved
WATCHED = ("lines", "kv", "niah_multikey_dense", "niah_multikey")  # when these are solved, documents get longer
SOLVED = 0.97
SHORTER = 4  # each step also has one of so many lengths before the present one
MEMORY = 0.9  # weight of the past in the running accuracies
FINISHED_WITH: Mapping[str, int] = {  # how often tasks are drawn in the finish: the hardest ones
    "kv": 30,
    "niah_multivalue": 18,
    "niah_multiquery": 14,
    "niah_multikey_uuid": 12,
    "lines": 10,
    "niah_multikey_dense": 6,
    "niah_single_uuid": 5,
    "number_string": 4,
    "passkey": 4,
    "needle": 2,
}
FINISHED_AT = LENGTHS[3:]  # the same number of tokens of each


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run; on a CPU, the same recipe gives the same model on the same machine."""

    tokens: int = 12_000_000
    batch: int = 2048  # tokens of each of a step's two lengths; or one document, if that is longer
    rate: float = 7e-4  # higher rates undo the initial weights
    warm_up: int = 60  # steps
    decay_from: float = 0.2  # share of the tokens after which the rate falls, as a cosine
    last_rate: float = 2e-5
    finish: float = 1 / 3  # share of `tokens` that is added at the end, on the hardest tasks
    finish_rate: float = 6e-4  # at the start of the finish; it falls to the last rate again
    seed: int = 0

    @classmethod
    def on(cls, device: str, *, seed: int, tokens: int | None = None) -> "Recipe":
        """The default recipe for a device; a GPU reads more tokens, in larger steps."""
        usual = cls(seed=seed)
        if device.startswith("cuda"):
            usual = cls(tokens=54_000_000, batch=16_384, finish=0.8, seed=seed)
        return usual if tokens is None else replace(usual, tokens=tokens)

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens must be positive, got {self.tokens}")
        if self.finish < 0 or not 0 <= self.decay_from < 1:
            raise ValueError(
                f"finish must not be negative and decay_from from 0 to below 1, got {self.finish} and {self.decay_from}"
            )

    def finishes(self, tokens: int) -> bool:
        """Whether the finish has begun after `tokens` tokens."""
        return tokens >= self.tokens

    @property
    def all_tokens(self) -> int:
        """The tokens of the whole run, those of the finish included."""
        return self.tokens + int(self.finish * self.tokens)

    def rate_at(self, step: int, tokens: int) -> float:
        """The learning rate."""
        if self.finishes(tokens):
            through = (tokens - self.tokens) / max(1, self.all_tokens - self.tokens)
            return self._falling(self.finish_rate, through)
        through = max(0.0, tokens / self.tokens - self.decay_from) / (1 - self.decay_from)
        return self._falling(self.rate, through) * min(1.0, step / self.warm_up)

    def _falling(self, rate: float, through: float) -> float:
        return self.last_rate + (rate - self.last_rate) * (1 + math.cos(math.pi * min(1.0, through))) / 2


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    tokens: int = 0
    stage: int = 0  # index into LENGTHS
    accuracy: Mapping[str, float]  # running share of right reply tokens, by task

    def after(self, tokens: int, seen: Mapping[str, float], recipe: Recipe) -> "Progress":
        """The progress after one more step: new running accuracies; longer documents if the present ones are solved."""
        accuracy = dict(self.accuracy)
        for name, found in seen.items():
            accuracy[name] = MEMORY * accuracy[name] + (1 - MEMORY) * found if name in accuracy else found
        tokens += self.tokens
        stage = self.stage
        solved = all(name in accuracy for name in WATCHED) and (
            sum(accuracy[name] for name in WATCHED) / len(WATCHED) > SOLVED
        )
        over = tokens > SHARE_AT_LENGTH[stage] * recipe.tokens
        if stage + 1 < len(LENGTHS) and (solved or over) and tokens >= NOT_BEFORE[stage + 1] * recipe.tokens:
            stage += 1
            accuracy.update(dict.fromkeys(WATCHED, 0.8))  # must be earned again at the new length
        return Progress(step=self.step + 1, tokens=tokens, stage=stage, accuracy=accuracy)
