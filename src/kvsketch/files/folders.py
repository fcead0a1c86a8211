"""A folder appears in one piece or not at all, as files do."""

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvsketch.files.atomic import UNFINISHED, lock

TAKEN = "is there, and not an empty folder: name a new one"


def nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def user_cache() -> Path:
    """Where kvsketch keeps what it can make again: $KVSKETCH_CACHE, or kvsketch in the user's cache folder."""
    if own := os.environ.get("KVSKETCH_CACHE"):
        return Path(own)
    common = os.environ.get("XDG_CACHE_HOME")
    return (Path(common) if common else Path.home() / ".cache") / "kvsketch"


def private(folder: Path) -> Path:
    """The folder, which exists from now on; folders that had to be made for it are open to the user alone."""
    for place in reversed([place for place in (folder, *folder.absolute().parents) if not place.exists()]):
        place.mkdir(mode=0o700, exist_ok=True)
    return folder


def ready(folder: Path) -> Path:
    """The folder, which exists from now on, with those above it; private in the user's cache, where kernels lie too."""
    if folder.absolute().is_relative_to(user_cache().absolute()):
        return private(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def holds_files(folder: Path) -> bool:
    """Whether this is a file, or a folder with files beside those that a killed writer has left."""
    return folder.is_file() or any(
        path.is_file() and not path.name.startswith(UNFINISHED) for path in folder.rglob("*")
    )


@contextmanager
def making(folder: str | Path) -> Iterator[Path]:
    """A folder to fill, which becomes `folder` when all is there; if anything fails, nothing has changed.

    `folder` must not exist yet, or be empty; its parents are made. What killed writers have left is removed.
    """
    target = Path(os.path.realpath(folder))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{folder} {TAKEN}")
    ready(target.parent)
    prefix = f"{UNFINISHED}{hashlib.sha256(target.name.encode()).hexdigest()[:12]}-folder-"
    for path in target.parent.glob(f"{prefix}*"):
        _remove_folder(path)
    unfinished = target.parent / (prefix + secrets.token_hex(8))
    unfinished.mkdir()
    handle = os.open(unfinished, os.O_RDONLY)
    try:
        lock(handle)  # held until the end: the writer of an unlocked folder with such a name was killed
        yield unfinished
        os.rename(unfinished, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise ValueError(f"{folder} {TAKEN}") from error
        raise
    finally:
        os.close(handle)
        shutil.rmtree(unfinished, ignore_errors=True)


def _remove_folder(path: Path) -> None:
    """Remove an unfinished folder, unless somebody is writing to it."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_DIRECTORY", 0))
    except OSError:
        return
    try:
        if lock(handle):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)
