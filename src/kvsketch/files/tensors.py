"""A file of tensors with a description, every byte of which is checked when it is read.

It is a safetensors file. Its header begins with a checksum of the header itself, and has a description as JSON and a
digest of every tensor. So a part of a file can be read, and checked, without the rest.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from kvsketch.files.atomic import replacing
from kvsketch.files.description import LARGEST_DESCRIPTION, DamagedError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
BEGIN = b'{"__metadata__":{"checksum":"'  # of every header; after it come the 64 figures of its checksum
BLANK = b"0" * 64
ABOUT, DIGESTS = "kvsketch", "digests"  # in the metadata: the description, and the tensors' digests
LARGEST_HEADER = LARGEST_DESCRIPTION  # a header is a description, with a digest of every tensor
MOST_DIMENSIONS = 8  # of a tensor


# -- writing


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors with a description; beside those given, one tensor at a time is in memory."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that all lie aligned
    header: dict[str, Any] = {"__metadata__": {"checksum": BLANK.decode(), ABOUT: _json(about)}}
    digests, end = dict[str, str](), 0
    for name in order:
        x = tensors[name]
        if x.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name} is of {x.dtype}, which a file cannot hold: expected one of {', '.join(DTYPES)}")
        start, end = end, end + x.numel() * x.element_size()
        header[name] = {"dtype": DTYPE_NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
        digests[name] = hashlib.sha256(_bytes_of(x)).hexdigest()
    header["__metadata__"][DIGESTS] = _json(digests)
    text = _json(header).encode()
    text += b" " * (-len(text) % 8)
    assert text.startswith(BEGIN + BLANK)
    if len(text) > LARGEST_HEADER:
        raise ValueError(f"{path} would have a header of {len(text):,} bytes: at most {LARGEST_HEADER:,} can be read")
    length = len(text).to_bytes(8, "little")
    with replacing(path) as file:
        file.write(length + BEGIN + hashlib.sha256(length + text).hexdigest().encode() + text[len(BEGIN + BLANK) :])
        for name in order:
            file.write(_bytes_of(tensors[name]))


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _bytes_of(x: Tensor) -> memoryview:
    return memoryview(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


# -- reading


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in its file, and its digest."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    digest: str


def begins_as_tensors(content: bytes) -> bool:
    """Whether a file that begins so is one of tensors as kvsketch writes them; the length of its header comes first."""
    return content[8:].startswith(BEGIN)


class TensorFile:
    """A file that `write_tensors` wrote: its description, and its tensors when they are asked for.

    It stays open, as the same file, even if another takes its place meanwhile: `with TensorFile(path) as file`.
    """

    def __init__(self, path: str | Path) -> None:
        """Open a file and read its header; refuse one that is not whole."""
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"there is no file {path}")
        self._file = self.path.open("rb")
        try:
            self._read_header(self._file)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _read_header(self, file: BinaryIO) -> None:
        length, size = file.read(8), os.fstat(file.fileno()).st_size
        count = int.from_bytes(length, "little")
        if len(length) < 8 or count > min(LARGEST_HEADER, size - 8):
            raise self._damaged("it is cut off, or no file of tensors")
        text = file.read(count)
        cut = len(BEGIN) + len(BLANK)
        if not text.startswith(BEGIN):
            raise self._foreign(text)
        self.digest = hashlib.sha256(length + BEGIN + BLANK + text[cut:]).hexdigest()
        if text[len(BEGIN) : cut] != self.digest.encode():
            raise self._damaged("its header is not what was written")
        try:
            header = json.loads(text)
            metadata = header.pop("__metadata__")
            self.about: dict[str, Any] = json.loads(metadata[ABOUT])
            if not isinstance(self.about, dict):
                raise TypeError(f"the description is {self.about!r:.40}")
            digests, self._begin, end = json.loads(metadata[DIGESTS]), 8 + count, 0
            self.places = dict[str, Place]()
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                place = self._place(entry, str(digests[name]), end)
                self.places[name], end = place, place.end
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
            raise self._damaged(f"its header makes no sense: {error!r:.100}") from error
        if self._begin + end != size:
            raise self._damaged(f"it has {size:,} bytes, and {self._begin + end:,} were written")

    @staticmethod
    def _place(entry: Mapping[str, Any], digest: str, start: int) -> Place:
        """An entry of the header: tensors lie one after another."""
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(number) is int and 0 <= number < 1 << 48 for number in (*shape, begin, end))
        whole = whole and len(shape) <= MOST_DIMENSIONS and math.prod(max(1, number) for number in shape) < 1 << 48
        if not whole or begin != start or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{entry} does not fit")
        return Place(dtype, shape, begin, end, digest)

    def read(self, prefix: str = "", device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, named without it; refuses what is not as it was written."""
        names = [name for name in self.places if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._tensor(name).to(device) for name in names}

    def _tensor(self, name: str) -> Tensor:
        place = self.places[name]
        found = torch.empty(place.shape, dtype=place.dtype, device="cpu")
        room = _bytes_of(found)  # shares its memory
        self._file.seek(self._begin + place.start)
        got = 0
        while got < len(room) and (more := self._file.readinto(room[got:])):
            got += more
        if got < len(room) or hashlib.sha256(room).hexdigest() != place.digest:
            raise self._damaged(f"{name} is not what was written; or the file was changed while it was read")
        return found

    def _damaged(self, why: str) -> DamagedError:
        return DamagedError(f"{self.path} is damaged: {why}. Use another copy of it, if there is one, or make it anew")

    def _foreign(self, text: bytes) -> ValueError:
        """The error for a header that is not ours; versions before the first checksum began another way."""
        try:
            known = json.loads(text).get("__metadata__", {}).keys()
        except (ValueError, AttributeError, RecursionError):
            return self._damaged("its header cannot be read")
        if known & {ABOUT, "about"}:
            return ValueError(
                f"{self.path} was written by a version of kvsketch that kept no checksums, which this one does not "
                "read: make it anew, or read it with the version that wrote it"
            )
        return ValueError(f"{self.path} was not written by kvsketch: its header begins with {text[:30]!r}")


def read_tensors(path: str | Path, device: torch.device | str = "cpu", prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a file whose names begin with `prefix`, named without it."""
    with TensorFile(path) as file:
        return file.read(prefix, device)


def read_about(path: str | Path) -> dict[str, Any] | None:
    """The description of a file of tensors; None if there is no such file, or it is not whole."""
    try:
        with TensorFile(path) as file:
            return file.about
    except (ValueError, OSError):
        return None
