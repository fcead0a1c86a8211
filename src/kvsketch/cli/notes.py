"""What a command prints beside its answer."""

from rich.console import Console

notes = Console(
    stderr=True, markup=False, emoji=False
)  # for everything but the answer, so that the answer can be piped


def say(text: str) -> None:
    """Print a note as it is: not wrapped, and without markup."""
    notes.print(text, highlight=False, soft_wrap=True)
