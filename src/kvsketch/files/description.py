"""Descriptions: JSON files with a checksum of their content."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsketch.files.atomic import replacing

LARGEST_DESCRIPTION = 16 << 20  # bytes


class DamagedError(ValueError):
    """A file is not what was written."""


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a description with its checksum."""
    text = json.dumps({**content, "checksum": digest_of(content)}, indent=2, ensure_ascii=False, allow_nan=False)
    with replacing(path) as file:
        file.write(text.encode() + b"\n")


def digest_of(content: Mapping[str, Any]) -> str:
    """A digest of content that can be written as JSON, its checksum left out."""
    plain = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, allow_nan=False).encode()).hexdigest()


def digest_of_file(path: Path) -> str:
    """The digest of a file, read piece by piece."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: str | Path) -> dict[str, Any]:
    """What `write_json` wrote."""
    path = Path(path)
    try:
        if path.stat().st_size > LARGEST_DESCRIPTION:
            raise ValueError(f"it has more than {LARGEST_DESCRIPTION:,} bytes")
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it is no description")
        if "checksum" not in content:
            raise ValueError("it has no checksum, as files of earlier versions have none")
        if content.pop("checksum") != digest_of(content):
            raise ValueError("it was changed since")
    except (ValueError, RecursionError) as error:  # broken JSON and broken UTF-8 are ValueErrors
        raise DamagedError(f"{path} cannot be read as what kvsketch wrote: {error!s:.200}") from error
    return content
