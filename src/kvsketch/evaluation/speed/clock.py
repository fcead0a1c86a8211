"""Times in turn, with a pass over other memory between two of them; how fast memory is read, and how much is free."""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from kvsketch.evaluation.speed.plan import TORCH, Plan
from kvsketch.kernels import native

Form = TypeVar("Form")
MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")  # of processes that share a limit


class Turn(NamedTuple):
    """A step that was timed, and how fast memory was read right before it: both depend on what else a machine does."""

    seconds: float
    memory: float  # bytes a second


class Memory:
    """Memory that nobody needs: reading it drives everything else out of the processor's caches."""

    def __init__(self, nbytes: int) -> None:
        self.numbers = torch.ones(nbytes // 8, dtype=torch.int64)

    def pass_over(self) -> float:
        """Read all of it; bytes a second."""
        return self.numbers.nbytes / seconds(self.numbers.sum)


@torch.no_grad()
def seconds(work: Callable[[], object]) -> float:
    """How long one call takes; nobody wants a gradient."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_turn(
    plan: Plan,
    memory: Memory,
    works: Mapping[Form, Callable[[int], Callable[[], object]]],
    kernels: Mapping[Form, str],
    taken: Mapping[Form, list[Turn]],
) -> Iterator[int]:
    """Put turns of each into `taken`, a step of each in every round, in an order that is drawn anew; rounds' numbers.

    `works` say what is to be done for a step: that is timed, and to say it is not. What a method does only every so
    many steps falls on all kernels alike, as the order is random.
    """
    draw, order = random.Random(0), list(works)
    for step in plan.steps():
        draw.shuffle(order)
        for form in order:
            work = works[form](step)
            speed = memory.pass_over()
            with using(kernels[form]):
                found = seconds(work)
            if step >= 0:
                taken[form].append(Turn(found, speed))
        yield step


@contextmanager
def using(kernel: str) -> Iterator[None]:
    """Have this kernel answer."""
    if kernel == TORCH:
        with native.off():
            yield
    else:
        yield


def summed_up(taken: list[float]) -> dict[str, float]:
    """Median, 5th and 95th percentile, and the mean, which has what is done only now and then."""
    low, *_, high = statistics.quantiles(taken, n=20, method="inclusive")
    found = {"seconds": statistics.median(taken), "low": low, "high": high, "mean": statistics.fmean(taken)}
    return {name: round(value, 9) for name, value in found.items()}


def share_of_memory(nbytes: int, turns: Sequence[Turn]) -> float:
    """Of the speed at which memory is read, how much a step reaches that reads so much; the median of turns."""
    return statistics.median(nbytes / turn.seconds / turn.memory for turn in turns)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many, for torch and for us."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def free_bytes() -> float | int:
    """Memory that can be had now; infinite where the system does not tell."""
    found = list[float | int]([math.inf])
    if MEMINFO.is_file():
        lines = MEMINFO.read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    try:
        limit, used = ((GROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        files = [int(x.split()[1]) for x in (GROUP / "memory.stat").read_text().splitlines() if "inactive_file" in x]
        if limit.isdigit():
            found.append(int(limit) - int(used) + sum(files[:1]))
    except OSError:
        pass  # no limit that is known
    return min(found)


def no_room(needed: float | int) -> str | None:
    """What to say where so many bytes are not there; None where they are."""
    free = free_bytes()
    if needed <= free:
        return None
    return f"it takes about {needed / 1e9:.1f} GB of memory, and {max(free, 0) / 1e9:.1f} GB are free"
