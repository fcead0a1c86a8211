"""Steps timed by turns, with a pass over other memory before each; how fast memory is read, and how much is free."""

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
    """A timed step, and how fast memory was read right before it: both depend on what else the machine does."""

    seconds: float
    memory: float  # bytes a second


class Memory:
    """Memory that is not used otherwise: reading it drives everything else out of the processor's caches."""

    def __init__(self, nbytes: int) -> None:
        self.numbers = torch.ones(nbytes // 8, dtype=torch.int64)

    def pass_over(self) -> float:
        """Read all of it; how many bytes a second."""
        return self.numbers.nbytes / seconds(self.numbers.sum)


@torch.no_grad()
def seconds(work: Callable[[], object]) -> float:
    """How many seconds one call takes, without gradients."""
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
    """Time a step of each form in every round, in a new random order, into `taken`; yields the rounds' numbers.

    `works` make the work of a step; the work is timed, and making it is not. One or two steps of the same form come
    before a timed one, as in a text, where a step continues from what the one before it has noted. Work that a method
    does only every so many steps falls alike on all kernels and on untimed steps: order and number are random.
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
    """Answer with this kernel in the body."""
    if kernel == TORCH:
        with native.off():
            yield
    else:
        yield


def summed_up(taken: list[float]) -> dict[str, float]:
    """Median, 5th and 95th percentile, and the mean, which includes work that is done only now and then."""
    low, *_, high = statistics.quantiles(taken, n=20, method="inclusive")
    found = {"seconds": statistics.median(taken), "low": low, "high": high, "mean": statistics.fmean(taken)}
    return {name: round(value, 9) for name, value in found.items()}


def share_of_memory(nbytes: int, turns: Sequence[Turn]) -> float:
    """The speed at which a step reads `nbytes`, as a share of the memory's reading speed; the median of turns."""
    return statistics.median(nbytes / turn.seconds / turn.memory for turn in turns)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use `count` threads in the body, in torch and in our kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def no_room(needed: float | int) -> str | None:
    """A message if `needed` bytes of memory are not free; None if they are."""
    free = free_memory(torch.device("cpu"))
    if free is None or needed <= free:
        return None
    return f"it needs about {needed / 1e9:.1f} GB of memory, and only {max(free, 0) / 1e9:.1f} GB are free"
