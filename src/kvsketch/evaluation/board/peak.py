"""The most memory that a computation holds at once, from torch's own allocations: other processes do not change it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")
MEMORY = "[memory]"  # the profiler's name for an allocation, or for its end


def peak_bytes(work: Callable[[], T], device: torch.device) -> tuple[int, T]:
    """How far the memory in tensors rises above its level before the work, and the work's result."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        made = work()
        return torch.cuda.max_memory_allocated(device) - before, made
    watch = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False)
    with _quiet():
        watch.start()
    try:
        made = work()
    finally:
        with _quiet():
            watch.stop()
    assert watch.profiler is not None
    assert watch.profiler.kineto_results is not None
    events: list[Any] = [one for one in watch.profiler.kineto_results.events() if one.name() == MEMORY]
    held = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak, made


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence standard error: the profiler's own library reports there when it begins and ends."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
