"""`kvsketch sample`: documents of a task, to look at, to ask questions on, or to fit an index to."""

import json
from functools import cache
from typing import TYPE_CHECKING, Annotated

import typer

from kvsketch.cli.app import MOST
from kvsketch.cli.notes import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvsketch.evaluation.tasks import Sample


def sample(
    task: Annotated[str, typer.Argument(help="A task's name, such as lines; a wrong name lists them all.")],
    tokens: Annotated[
        int,
        typer.Option(
            min=1, max=MOST, help="Length of the document with its question, in tokens of the embedded model."
        ),
    ] = 2000,
    wording: Annotated[str, typer.Option(help="Wording of the document: official or compact.")] = "official",
    seed: Annotated[int, typer.Option(help="Random seed: another one gives another document.")] = 0,
    jsonl: Annotated[
        bool,
        typer.Option("--jsonl", help="Print documents that end with many questions and their answers, as JSON lines."),
    ] = False,
    count: Annotated[int, typer.Option(min=1, max=MOST, help="With --jsonl: number of documents.")] = 1,
    questions: Annotated[
        int, typer.Option(min=1, max=MOST, help="With --jsonl: most questions on each document.")
    ] = 24,
) -> None:
    """Print a document of a task; its question and the right answers go to standard error.

    With --jsonl the printed lines are a corpus for `kvsketch fit`.
    """
    from kvsketch.evaluation.embedded.corpus import texts
    from kvsketch.evaluation.tasks import TASKS, WORDINGS, Setting
    from kvsketch.evaluation.tasks.length import Fitter

    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; there are {', '.join(TASKS)}")
    if wording not in WORDINGS:
        raise ValueError(f"--wording must be one of {', '.join(WORDINGS)}, got {wording!r}")
    if count > 1 and not jsonl:
        raise ValueError(f"--count {count} is for --jsonl: without it one document is printed")
    if jsonl:
        setting = Setting(size=1, questions=questions, wording=wording)
        for text in texts(_tokenizer(), task, count, setting, tokens, seed):
            print(json.dumps({"text": text}))
        return
    made = Fitter(TASKS[task], Setting(size=1, wording=wording), _longest).sample(tokens, f"sample/{seed}")
    print(made.context, end="")
    question = made.questions[0]
    say(f"question: {question.prompt!r}")
    say(f"answers:  {', '.join(question.answers)}")


@cache
def _tokenizer() -> "PreTrainedTokenizerBase":
    from kvsketch.evaluation.embedded import load_tokenizer

    return load_tokenizer()


def _length(text: str) -> int:
    """The number of a text's tokens, as the embedded model reads it."""
    return len(_tokenizer()(text)["input_ids"])


def _longest(made: "Sample") -> int:
    """The number of tokens of the document with its longest question."""
    return max(_length(made.context + question.prompt) for question in made.questions)
