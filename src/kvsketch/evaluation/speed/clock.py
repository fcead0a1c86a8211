"""Times in turn, with a pass over other memory between two of them; how fast memory is read, and how much is free."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

from kvsketch.evaluation.speed.plan import TORCH, Plan
from kvsketch.huggingface.free_memory import free_memory
from kvsketch.kernels import native

Form = TypeVar("Form")


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

    `works` say what is to be done for a step: that is timed, and to say it is not. One step more or two of the same
    come before it, as in a text, where a step goes on from what the one before it has noted. What a method does only
    every so many steps falls on all kernels, and on these steps, alike: the order and their number are random.
    """
    draw, order = random.Random(0), list(works)
    for step in plan.steps():
        draw.shuffle(order)
        for form in order:
            before = [works[form](step) for _ in range(draw.choice((1, 2)))]
            work = works[form](step)
            with using(kernels[form]):
                for one in before:
                    seconds(one)
                speed = memory.pass_over()
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


def no_room(needed: float | int) -> str | None:
    """What to say where so many bytes are not there; None where they are."""
    free = free_memory(torch.device("cpu"))
    if free is None or needed <= free:
        return None
    return f"it takes about {needed / 1e9:.1f} GB of memory, and {max(free, 0) / 1e9:.1f} GB are free"
