"""A file or a folder to which only one process writes: two runs that add to the same results spoil both."""

import os
import weakref
from pathlib import Path

from kvsketch.files.atomic import lock


class Claim:
    """Holds a place for this process, as long as anything in the process holds this object."""

    def __init__(self, handle: int) -> None:
        self.close = weakref.finalize(self, os.close, handle)


_held = weakref.WeakValueDictionary[tuple[int, int], Claim]()  # by device and number of what is claimed


def claim(path: Path) -> Claim | None:
    """Hold what is at `path` for this process; refuses what another one holds. None where there are no such locks."""
    while True:
        handle = os.open(path, os.O_RDONLY)
        about = os.fstat(handle)
        place = about.st_dev, about.st_ino
        if (held := _held.get(place)) is not None:
            os.close(handle)
            return held
        made, free = Claim(handle), lock(handle)
        if free is None:
            return None
        if not free:
            raise ValueError(f"another run is writing to {path}: wait until it has ended, or write to another folder")
        if path.exists() and os.path.samestat(about, path.stat()):  # else its owner has just removed it
            _held[place] = made
            return made
