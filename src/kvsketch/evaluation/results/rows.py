"""Result files: JSON lines that can be added to after any interruption.

Lines with "run" describe a run: what the rows after them were made with. The other lines are rows, one for each answer.
A row is written once it is complete; a line that a crash has cut off is dropped when the file is opened again. Every
line ends with a checksum.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FORMAT = 2
CHECK = "check"  # the last part of every line
LEARNT = "learnt"  # the part of a run that says which index or profile its methods use
REMOVE = "Remove that line, and run the same command again: its row is made anew"
FIRST = "Before any row there is a line that says what made them. Put it back as it was, or write to another folder"
# Two rows are the same if these are equal: everything that an answer depends on, besides the model.
KEY = (
    "task", "wording", "haystack", "cases", "template", "asked", "length", "depth", "sample", "new_tokens", "method",
)  # fmt: skip
Row = dict[str, Any]


class RowsFile:
    """A file of rows, all made with the same model and version."""

    def __init__(self, path: Path, run: Mapping[str, Any], key: Sequence[str] = KEY) -> None:
        """Open or begin the file; `run` says what the rows are made with: model, fingerprint, version and more.

        Its part "learnt", if there is one, says which index or profile methods use.
        """
        from kvsketch.files import claim  # not above: to show help must not load torch

        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no file: rows are written there. Remove it, or write to another folder")
        self.path, self.key = path.absolute(), key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.claim = claim(path)
        self.done = self._go_on({"format": FORMAT, **run})

    def _go_on(self, run: Mapping[str, Any]) -> set[tuple[Any, ...]]:
        """Make this the file's last run; the keys of rows done before. Refuses rows of another model, and others."""
        path, key = self.path, self.key
        runs, rows = read_rows(path, key)
        for earlier in runs:
            for name, what in (("fingerprint", "model"), ("dtype", "precision"), ("kvsketch", "version")):
                if earlier.get(name) != run.get(name):
                    written, this = (
                        f"{about.get('model')} in {about.get('dtype')}, kvsketch {about.get('kvsketch')}"
                        for about in (earlier, run)
                    )
                    this = this if this != written else "another one of this name"
                    raise ValueError(
                        f"{path} holds rows of another {what}: {written}; this is {this}. Write to another folder"
                    )
        learnt = dict[str, str]()
        for earlier in runs:
            learnt |= earlier.get(LEARNT, {})
        for method, now in run.get(LEARNT, {}).items():
            if learnt.get(method, now) != now:
                raise ValueError(
                    f"{path} holds rows of {method} with another index or profile than there is now. Write to another "
                    "folder, or put that one back"
                )
        _drop_cut_line(path)
        if run not in runs[-1:]:
            self._write([{"run": run}])
        return {key_of(row, key) for row in rows}

    def add(self, rows: Iterable[Row]) -> None:
        """Write rows, except those that are in the file already."""
        new = [row for row in rows if key_of(row, self.key) not in self.done]
        self._write(new)
        self.done.update(key_of(row, self.key) for row in new)

    def fill(self, wanted: Mapping[str, Row], measure: Callable[[str], Row], what: str) -> Iterator[tuple[str, int]]:
        """Measure the missing rows, by name; yields what was just done, and how many rows that settled."""
        missing = [name for name, labels in wanted.items() if key_of(labels, self.key) not in self.done]
        yield what, len(wanted) - len(missing)
        for name in missing:
            self.add([wanted[name] | measure(name)])
            yield f"{what}, {name}", 1

    def _write(self, lines: list[Row]) -> None:
        try:
            with self.path.open("ab") as file:
                file.write(b"".join(map(with_checksum, lines)))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            what = f"{error.strerror}; rows that were written stay. Make room, and run the same command again to go on"
            raise OSError(error.errno, what, str(self.path)) from error


def with_checksum(line: Row) -> bytes:
    """A line of the file: JSON that ends with a checksum of all that stands before."""
    return _json({**line, CHECK: _checksum(line)}) + b"\n"


def _checksum(line: Row) -> str:
    return f"{zlib.crc32(_json(line)):08x}"


def _json(line: Row) -> bytes:
    return json.dumps(line, ensure_ascii=False).encode()


def read_rows(path: Path, key: Sequence[str] = KEY) -> tuple[list[dict[str, Any]], list[Row]]:
    """The runs and the rows of a file; refuses a file in which a line is not as it was written."""
    runs, rows, places = list[dict[str, Any]](), list[Row](), dict[tuple[Any, ...], int]()
    *lines, cut = path.read_bytes().split(b"\n")  # not splitlines: answers may hold other line ends
    if not lines and not b'{"run": '.startswith(cut[:8]):
        raise ValueError(f"{path} is not a file of rows: it begins with {cut[:40]!r}")
    for number, line in enumerate(lines, 1):
        found = _read_line(line, f"{path}, line {number}", REMOVE if runs else FIRST)
        if "run" in found:
            runs.append(found["run"])
        elif any(name not in found or isinstance(found[name], list) for name in key):
            raise ValueError(f"{path}, line {number}: not a row of a kvsketch benchmark")
        elif not runs:
            raise ValueError(f"{path}, line {number}: {FIRST}")
        elif (first := places.setdefault(key_of(found, key), number)) != number:
            raise ValueError(f"{path}, line {number}: this row stands in line {first} already. Remove one of the two")
        else:
            rows.append(found)
    return runs, rows


def _read_line(line: bytes, where: str, advice: str) -> Row:
    """A line without its checksum, which must be right."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:  # broken UTF-8 is a ValueError
        raise ValueError(f"{where}: not JSON ({error!s:.100}); is this a file of rows? {advice}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where}: not a row but {line[:40]!r}")
    run = found.get("run")
    if "run" in found and not (isinstance(run, dict) and run.get("format") == FORMAT):
        raise ValueError(
            f"{where} was made by another version of kvsketch: it begins with {line[:60]!r}, and this version reads "
            f"and adds to format {FORMAT}. Write to another folder, or use the version that made it"
        )
    if CHECK not in found:
        raise ValueError(f"{where}: not a row of a kvsketch benchmark")
    check = found.pop(CHECK)
    if check != _checksum(found):
        raise ValueError(f"{where}: damaged, it is not what was written. {advice}")
    return found


def name_with_digest(name: str, content: bytes) -> str:
    """A name for rows, with a digest, so that other content has another name."""
    return f"{name}#{zlib.crc32(content):08x}"


def name_without_digest(name: str) -> str:
    """The name without the digest, as people know it."""
    return name.rpartition("#")[0] or name


def key_of(row: Row, key: Sequence[str] = KEY) -> tuple[Any, ...]:
    """The values of a row's key; rows with the same key are the same row."""
    return tuple(row[name] for name in key)


def _drop_cut_line(path: Path) -> None:
    """Drop what stands after the last line end, in a file that is known to be ours."""
    content = path.read_bytes() if path.is_file() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
