"""The texts of a corpus: files, cut into pieces that a model can read at once."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvsketch.files import as_text, digest_of_file, is_text


@dataclass(frozen=True)
class Text:
    """A piece of text that is read in one go."""

    ids: Int64[Tensor, " n"]
    digest: str  # of the ids


@dataclass(frozen=True)
class Source:
    """A file of the corpus."""

    file: str
    sha256: str
    texts: int  # how many came from it
    tokens: int


@dataclass(frozen=True)
class Corpus:
    """Different texts, where they come from, and what was left out of them."""

    texts: tuple[Text, ...]
    sources: tuple[Source, ...]
    notes: tuple[str, ...]


def read_corpus(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, *, tokens: int, least: int, apart: int
) -> Corpus:
    """Texts of at most `tokens` and at least `least` tokens, from .txt files and the lines of .jsonl files."""
    if not files:
        raise ValueError("a corpus has at least one file, got none")
    if tokens < least:
        raise ValueError(
            f"texts of {tokens} tokens are too short: queries learn from keys more than {apart} tokens away. "
            f"Let them be {least} or longer (--tokens), or look less far (--apart)"
        )
    known, sources, notes, longest = dict[str, Text](), list[Source](), list[str](), 0
    for path in files:
        pieces = [piece for text in _texts_of(path) for piece in _pieces(tokenizer, text, tokens)]
        if not any(pieces):
            raise ValueError(f"{path} has no text: leave it out")
        longest = max([longest, *map(len, pieces)])
        long_enough = [_text(piece) for piece in pieces if len(piece) >= least]
        new = {text.digest: text for text in long_enough if text.digest not in known}
        known |= new
        lengths = [len(text.ids) for text in new.values()]
        sources.append(Source(path.name, digest_of_file(path), len(lengths), sum(lengths)))
        if short := len(pieces) - len(long_enough):
            notes.append(f"{path}: left out {short} of {len(pieces)} texts, which have fewer than {least} tokens")
        if again := len(long_enough) - len(new):
            notes.append(f"{path}: left out {again} of {len(pieces)} texts, which were there before")
    if not known:
        raise ValueError(
            f"every text of the corpus is too short: the longest has {longest} tokens, and {least} are needed, for "
            f"queries learn from keys more than {apart} tokens away. Give longer texts, or look less far (--apart)"
        )
    return Corpus(tuple(known.values()), tuple(sources), tuple(notes))


def _texts_of(path: Path) -> Iterator[str]:
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"{path}: a corpus is made of .txt files (a text each) and .jsonl files (a text a line)")
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    content = as_text(path.read_bytes(), path)
    if path.suffix == ".txt":
        yield content
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            yield _text_of_line(line, f"{path}:{number}")


def _text_of_line(line: str, where: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error!s:.100})") from error
    if not isinstance(found, dict) or not isinstance(found.get("text"), str) or not is_text(found["text"]):
        raise ValueError(f'{where}: expected an object with a string named "text", got {line[:60]}')
    return str(found["text"])


def _pieces(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int) -> list[list[int]]:
    """A text in pieces; each begins as a text does with this tokenizer."""
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    begin = ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []
    rest, step = ids[len(begin) :], tokens - len(begin)
    return [begin + rest[first : first + step] for first in range(0, len(rest), step)]


def _text(ids: list[int]) -> Text:
    return Text(torch.tensor(ids), hashlib.sha256(json.dumps(ids).encode()).hexdigest())
