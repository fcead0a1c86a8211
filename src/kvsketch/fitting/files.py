"""Files that are there whole or not at all: tensors, and what is known about them."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

ABOUT = "about"
NEW = ".new"  # behind the name of a file that is not whole yet


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors with a description; whoever finds the file finds all of it."""
    fresh = _fresh(path)
    named = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    fresh.touch()
    usual = fresh.stat().st_mode
    save_file(named, fresh, metadata={ABOUT: json.dumps(about, allow_nan=False)})
    fresh.chmod(usual)  # safetensors lets nobody else read its files
    os.replace(fresh, path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """The same for a description alone."""
    fresh = _fresh(path)
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    fresh.write_text(text + "\n", encoding="utf-8")
    os.replace(fresh, path)


def read_about(path: Path) -> dict[str, Any] | None:
    """The description of a file of tensors; None if there is no such file, or not one of ours."""
    try:
        with safe_open(path, "pt") as file:
            about: dict[str, Any] = json.loads(file.metadata()[ABOUT])
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError):
        return None
    return about


def read_tensors(path: Path, device: torch.device | str = "cpu", prefix: str = "") -> dict[str, Tensor]:
    """Those tensors whose names begin so, without the beginning."""
    with safe_open(path, "pt", device=str(device)) as file:
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 (it is no mapping)
        return {name.removeprefix(prefix): file.get_tensor(name) for name in names}


def _fresh(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f"{path.name}{NEW}")
