"""How much memory is free now."""

from pathlib import Path

import torch

MEMORY = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")  # of processes that share a limit


def free_memory(device: torch.device) -> int | None:
    """Free bytes; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    return min((free for free in (_of_machine(), _of_group()) if free is not None), default=None)


def _of_machine() -> int | None:
    try:  # on Linux
        with MEMORY.open() as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _of_group() -> int | None:
    """What is left of a container's limit; files in its cache give way, and count as free."""
    try:
        limit, used = (int((GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
        return limit - used + int(lines.get("inactive_file", 0))
    except (OSError, ValueError):  # there is no such group, or it has no limit ("max")
        return None
