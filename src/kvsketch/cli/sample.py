"""`kvsketch sample`: a document of a task, to look at or to ask about."""

from typing import Annotated

import typer

from kvsketch.cli.app import say


def sample(
    task: Annotated[str, typer.Argument(help="A task's name, such as lines; a wrong one lists them all.")],
    tokens: Annotated[int, typer.Option(min=1, help="Length of the document with its question.")] = 2000,
    wording: Annotated[str, typer.Option(help="official or compact.")] = "official",
    seed: Annotated[int, typer.Option(help="Another seed is another document.")] = 0,
) -> None:
    """Print a document; the question on it and the right answers go to standard error."""
    from kvsketch.evaluation.embedded import load_tokenizer
    from kvsketch.evaluation.tasks import TASKS, WORDINGS, Sample, Setting
    from kvsketch.evaluation.tasks.fit import Fitter

    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; there are {', '.join(TASKS)}")
    if wording not in WORDINGS:
        raise ValueError(f"--wording must be one of {', '.join(WORDINGS)}, got {wording!r}")
    tokenizer = load_tokenizer()

    def count(made: Sample) -> int:
        return max(len(tokenizer(made.context + question.prompt)["input_ids"]) for question in made.questions)

    made = Fitter(TASKS[task], Setting(size=1, wording=wording), count).sample(tokens, f"sample/{seed}")
    print(made.context, end="")
    question = made.questions[0]
    say(f"question: {question.prompt!r}")
    say(f"answers:  {', '.join(question.answers)}")
