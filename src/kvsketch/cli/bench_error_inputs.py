"""The inputs of studies of single layers: a model, its layers, and texts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsketch.cli.app import MOST, check_folder, made_text, read_text, some_numbers
from kvsketch.cli.bench import describe
from kvsketch.cli.models import load_model
from kvsketch.cli.options import named

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvsketch.evaluation.layers.plan import Prompt

TASK, PROMPTS, TOKENS = "lines", 3, 4000  # the documents that are made


def methods_option(usual: str) -> Any:
    """The option that names the methods to compare; `usual` are its default."""
    return typer.Option("--methods", "-m", help=f"Specs without budgets, with ; between them; if left out: {usual}.")


# Options that all these studies have.
ModelName = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", callback=named, help="A model's folder or name; the embedded model if left out."),
]
Layers = Annotated[str | None, typer.Option(help="Layers to measure, with commas; all if left out.")]
PromptFiles = Annotated[
    list[Path] | None, typer.Option(help="A text file to read; repeat for more. Left out: documents of a task.")
]
Task = Annotated[str | None, typer.Option(help=f"Task whose documents are read; {TASK} if left out.")]
Prompts = Annotated[int | None, typer.Option(min=1, max=MOST, help=f"Number of documents; {PROMPTS} if left out.")]
Tokens = Annotated[
    int | None,
    typer.Option(
        min=1, max=MOST, help=f"Tokens of a document, {TOKENS:,} if left out; for a file, the most that are read."
    ),
]


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The texts to read: files, or made-up documents of a task, which may end with questions and their answers."""

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
        if len(set(self.contents)) < len(self.contents):  # read before a model is loaded
            raise ValueError(f"a text is named twice in {', '.join(map(str, self.files))}: leave out one of the two")

    @cached_property
    def contents(self) -> list[tuple[str, str]]:
        """The name and the text of each file."""
        from kvsketch.files import name_of

        return [(name_of(path), read_text(path)) for path in self.files]

    def read(self, tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel") -> "list[Prompt]":
        """All texts, cut to the number of tokens wanted, on the model's device."""
        from kvsketch.evaluation.layers.plan import Prompt
        from kvsketch.evaluation.results.rows import name_with_digest

        found = list[Prompt]()
        for name, text in self.contents or self._made(tokenizer):
            ids = tokenizer(text, return_tensors="pt")["input_ids"][:, : self.tokens]
            found.append(Prompt(name_with_digest(name, json.dumps(ids.tolist()).encode()), ids.to(model.device)))
        return found

    def _made(self, tokenizer: "PreTrainedTokenizerBase") -> list[tuple[str, str]]:
        task, tokens = self.task or TASK, self.tokens or TOKENS
        numbers = range(self.prompts or PROMPTS)
        made = [made_text(task, tokens, f"{self.seed}/{number}", tokenizer, self.questions) for number in numbers]
        return [(f"{task}/{tokens}/{number}", text) for number, text in enumerate(made)]


@dataclass(frozen=True)
class Inputs:
    """All that a study is given, but its own options."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    texts: Texts
    layers: Sequence[int]
    out: Path
    about: dict[str, Any]  # describes the run


def shares(text: str) -> list[float]:
    """Shares written as numbers, or as fractions such as 1/4, which the tables show."""
    return some_numbers("--rates", text, _share)


def _share(text: str) -> float:
    try:
        return float(Fraction(text.strip()))
    except ZeroDivisionError as error:
        raise ValueError(f"{text} is no number") from error


def load_inputs(
    out: Path, model: str | None, layers: str | None, texts: Texts, dtype: str, device: str | None
) -> Inputs:
    """Load the model, and collect everything else that a study is given."""
    check_folder("--out", out)
    wanted = None if layers is None else some_numbers("--layers", layers, int)

    from kvsketch.huggingface import make_cache
    from kvsketch.huggingface.capture import choose_layers

    language_model, tokenizer = load_model(model, dtype, device)
    cache = make_cache(language_model)
    about = describe(language_model, model, str(cache.model.fingerprint()))
    return Inputs(language_model, tokenizer, texts, choose_layers(cache, wanted), out, about)
