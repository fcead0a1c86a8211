"""The device that kernels are timed on: a GPU, or the CPU in its place."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def summed_up(taken: Sequence[float]) -> dict[str, Any]:
    """The part of a row about these times."""
    return {"median": statistics.median(taken), "quartiles": statistics.quantiles(taken)[::2]}


class Machine:
    """The device that things run on, and its clock."""

    def __init__(self, dry: bool, rounds: int) -> None:
        self.device = torch.device("cpu" if dry else "cuda")
        self.rounds = rounds
        self.dtype = torch.float16 if dry else torch.bfloat16  # the interpreter cannot multiply bfloat16
        self.draw = torch.Generator(self.device).manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw, device=self.device)

    def times(self, calls: Sequence[Callable[[], Any]], *, graph: bool = True) -> dict[str, dict[str, Any]]:
        """Microseconds per call when all calls run in a row: launched by Python, and replayed as one graph."""
        for call in calls:
            assert call() is not None, "a kernel was refused: the log says why"
        found = {"eager": self._timed(calls, len(calls))}
        if self.device.type == "cuda" and graph:
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                for call in calls:
                    call()
            found["graph"] = self._timed([recorded.replay], len(calls))
        return {name: summed_up(taken) for name, taken in found.items()}

    def _timed(self, calls: Sequence[Callable[[], Any]], count: int) -> list[float]:
        taken = list[float]()
        for _ in range(self.rounds):
            with self.clock(taken):
                for call in calls:
                    call()
        return [each / count for each in taken]

    @contextmanager
    def clock(self, taken: list[float]) -> Iterator[None]:
        """Append the microseconds that the `with` block takes."""
        if self.device.type == "cpu":
            begin = time.perf_counter()
            yield
            taken.append(1e6 * (time.perf_counter() - begin))
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        yield
        end.record()
        torch.cuda.synchronize()
        taken.append(1e3 * begin.elapsed_time(end))
