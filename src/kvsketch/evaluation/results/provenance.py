"""Where numbers come from: commit, versions, machine."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import kvsketch


def provenance() -> dict[str, Any]:
    """The facts that are written beside a measurement."""
    return {
        "kvsketch": kvsketch.__version__,
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "processor": _processor(),
    }


def _commit() -> str | None:
    """The commit of a checkout, with a mark if the sources differ from it; None for an installed package."""
    source = Path(kvsketch.__file__).parent
    if source.parent.name != "src":
        return None
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=source, capture_output=True, text=True, check=True
        )
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "."], cwd=source, check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+changes" if changed else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor()
    return f"{name}, {os.cpu_count()} cores"
