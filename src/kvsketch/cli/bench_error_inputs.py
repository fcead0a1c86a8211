"""What both studies of `kvsketch bench error` are given: a model, its layers, and texts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvsketch.cli.app import made_text, read_text, some_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvsketch.evaluation.layer_error_plan import Prompt

T = TypeVar("T")
TASK, PROMPTS, TOKENS = "lines", 3, 4000  # the documents that are made


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Which texts: files, or so many documents of a task, with questions and answers behind them if wanted."""

    files: Sequence[Path] = ()
    task: str | None = None
    prompts: int | None = None
    tokens: int | None = None
    questions: int = 0
    seed: str = "error"

    def __post_init__(self) -> None:
        if self.files and (self.task or self.prompts):
            raise ValueError(
                "--task and --prompts make documents, and --prompt-file names texts: give one or the other"
            )
        assert self.contents is not None, "read before a model is loaded"

    @cached_property
    def contents(self) -> list[tuple[str, str]]:
        """The files, by name."""
        from kvsketch.files import name_of

        return [(name_of(path), read_text(path)) for path in self.files]

    def read(self, tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel") -> "list[Prompt]":
        """All of them, cut to the tokens wanted, on the model's device."""
        from kvsketch.evaluation.layer_error_plan import Prompt
        from kvsketch.evaluation.rows import name_with_content

        found = list[Prompt]()
        for name, text in self.contents or self._made(tokenizer):
            ids = tokenizer(text, return_tensors="pt")["input_ids"][:, : self.tokens]
            found.append(Prompt(name_with_content(name, json.dumps(ids.tolist()).encode()), ids.to(model.device)))
        return found

    def _made(self, tokenizer: "PreTrainedTokenizerBase") -> list[tuple[str, str]]:
        task, tokens = self.task or TASK, self.tokens or TOKENS
        numbers = range(self.prompts or PROMPTS)
        made = [made_text(task, tokens, f"{self.seed}/{number}", tokenizer, self.questions) for number in numbers]
        return [(f"{task}/{tokens}/{number}", text) for number, text in enumerate(made)]


@dataclass(frozen=True)
class Inputs:
    """Everything but what is special to a study."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    texts: Texts
    layers: Sequence[int]
    out: Path
    about: dict[str, Any]  # the run


def specs(text: str) -> list[str]:
    """Methods, with ; between."""
    return [spec.strip() for spec in text.split(";") if spec.strip()]


def shares(text: str) -> list[float]:
    """Numbers, or fractions as the tables have them."""
    return some_numbers("--rates", text, _share)


def given(value: T | None, default: T) -> T:
    """What was said, or the default where nothing was."""
    return default if value is None else value


def _share(text: str) -> float:
    try:
        return float(Fraction(text.strip()))
    except ZeroDivisionError as error:
        raise ValueError(f"{text} is no number") from error
