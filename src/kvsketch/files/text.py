"""Texts that people bring, in files and pipes."""

from pathlib import Path


def check_is_file(path: Path) -> None:
    """Refuse a folder, and what does not exist; a pipe can be read too."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file")
    if not path.exists():
        raise ValueError(f"there is no file {path}")


def read_file(path: str | Path) -> bytes:
    """What is in a file, or comes through a pipe; refuses a folder."""
    path = Path(path)
    check_is_file(path)
    return path.read_bytes()


def name_of(path: str | Path) -> str:
    """A file's name; "pipe" for a pipe, whose name would be another number each time."""
    return Path(path).name if Path(path).is_file() else "pipe"


def as_text(content: bytes, name: str | Path) -> str:
    """Bytes as text in UTF-8, without the mark that some files begin with, and with plain line ends."""
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is no text in UTF-8: byte {error.start:,} is {content[error.start]:#04x}. Convert it first, for "
            "example with iconv -f LATIN1 -t UTF-8"
        ) from error


def is_text(text: str) -> bool:
    """Whether UTF-8 can hold the text: JSON and the shell can give halves of letters, which are no letters."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
