"""Files that are whole or refused: they appear in one piece, and every byte of them is checked when they are read.

    atomic.py        how a file takes the place of another
    folders.py       how a folder takes its place
    tensors.py       files of tensors with a description
    description.py   descriptions alone
    claims.py        how only one process writes to a file or folder
    text.py          texts that people bring

Nothing that was read is a view of a file: later changes to the file do not reach it.
"""

from kvsketch.files.atomic import UNFINISHED, can_be_written, is_another, remove_left_over, replacing
from kvsketch.files.claims import claim
from kvsketch.files.description import DamagedError, digest_of, digest_of_file, read_json, write_json
from kvsketch.files.folders import holds_files, making, nearest, private, ready, user_cache
from kvsketch.files.tensors import (
    BEGIN,
    BLANK,
    DTYPE_NAMES,
    DTYPES,
    LARGEST_HEADER,
    TensorFile,
    begins_as_tensors,
    read_about,
    read_tensors,
    write_tensors,
)
from kvsketch.files.text import as_text, check_is_file, is_text, name_of, read_file

__all__ = [
    "BEGIN",
    "BLANK",
    "DTYPES",
    "DTYPE_NAMES",
    "LARGEST_HEADER",
    "UNFINISHED",
    "DamagedError",
    "TensorFile",
    "as_text",
    "begins_as_tensors",
    "can_be_written",
    "check_is_file",
    "claim",
    "digest_of",
    "digest_of_file",
    "holds_files",
    "is_another",
    "is_text",
    "making",
    "name_of",
    "nearest",
    "private",
    "read_about",
    "read_file",
    "read_json",
    "read_tensors",
    "ready",
    "remove_left_over",
    "replacing",
    "user_cache",
    "write_json",
    "write_tensors",
]
