"""What a command says beside its answer."""

from rich.console import Console

notes = Console(stderr=True, markup=False, emoji=False)  # everything but the answer, so that the answer can be piped


def say(text: str) -> None:
    """A note, as it is: not wrapped, and no markup."""
    notes.print(text, highlight=False, soft_wrap=True)
