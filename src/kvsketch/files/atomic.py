"""A file appears in one piece or not at all: the one way in which kvsketch writes files that must not be incomplete."""

import errno
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # not there on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

UNFINISHED = ".kvsketch-"  # how the names of unfinished files begin, where they need a name
NO_UNNAMED_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}


def can_be_written(path: str | Path) -> Path:
    """Where a file of this name is, or would be; refuses what is no file, and a name whose folder does not exist."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise ValueError(f"{path} is a symbolic link that leads to itself: name a file, one that is there or a new one")
    if target.exists() and not target.is_file():
        raise ValueError(f"{path} is no regular file: name a file, one that is there or a new one")
    if not target.parent.is_dir():
        raise ValueError(f"there is no folder {target.parent} to write {target.name} to")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise ValueError(f"the folder {target.parent} cannot be written to: name {target.name} in another one")
    return target


def is_another(path: Path, begins: Callable[[bytes], bool]) -> bool:
    """Whether a file of this name is something else, as its first bytes show: writing would destroy it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(1 << 10)
    return bool(start) and not begins(start)


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` when all is written; if anything fails, nothing has changed.

    Where the system can, the file has no name before it is whole, so that nothing is left of it if it is given up. A
    symbolic link is followed. A file that was there keeps its mode; a new one gets the mode that the umask gives.
    """
    target = can_be_written(path)
    # The lock is held until the end. The writer of an unlocked file with such a name was killed.
    prefix = f"{UNFINISHED}{hashlib.sha256(target.name.encode()).hexdigest()[:12]}-"
    remove_left_over(target.parent, prefix)
    try:
        handle, unfinished, named = _open_new(target.parent / prefix)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: no file can be made in this folder", str(path)) from error
    try:
        with os.fdopen(handle, "wb") as file:
            if target.exists():
                os.fchmod(handle, target.stat().st_mode & 0o7777)
            yield file
            file.flush()
            os.fsync(handle)
            if not named:
                _give_name(handle, unfinished)
                named = True
            os.replace(unfinished, target)
            named = False
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, and nothing was written", str(path)) from error
    finally:
        if named:
            unfinished.unlink(missing_ok=True)


def _open_new(prefix: Path) -> tuple[int, Path, bool]:
    """A new locked file, its name, and whether it has that name yet: not where the system can make unnamed files."""
    if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
        try:
            handle = os.open(prefix.parent, os.O_TMPFILE | os.O_WRONLY, 0o666)
        except OSError as error:
            if error.errno not in NO_UNNAMED_FILES:
                raise
        else:
            lock(handle)
            return handle, _another(prefix), False
    while True:
        path = _another(prefix)
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        if _is_ours(handle, path):
            return handle, path, True
        os.close(handle)


def _another(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + secrets.token_hex(8))


def _is_ours(handle: int, path: Path) -> bool:
    """Whether a new file has our lock: just before, another writer may have taken the file for one left over."""
    if fcntl is None:
        return True
    return bool(lock(handle)) and path.exists() and os.path.samestat(os.fstat(handle), path.stat())


def _give_name(handle: int, path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        # With a folder given, Python follows the link to the file itself.
        os.link(f"/proc/self/fd/{handle}", path.name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def lock(handle: int) -> bool | None:
    """Lock an open file or folder: whether nobody else has the lock; None where there are no locks to tell."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network drives have none
        return None
    return True


def remove_left_over(folder: Path, prefix: str = UNFINISHED) -> None:
    """Remove the files in this folder that were left by writers who were killed."""
    for path in folder.glob(f"{prefix}*"):
        with suppress(OSError):
            handle = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
            try:
                if lock(handle):
                    path.unlink()
            finally:
                os.close(handle)
