"""What records a step: CUDA graphs, or something else in their place."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, runtime_checkable

import torch
from transformers.utils import ModelOutput

Step = Callable[[], ModelOutput]
PROTOTYPE = "Synchronization debug mode is a prototype"  # how torch's warning about this mode begins


class NotRecordedError(Exception):
    """A step that does something that cannot be recorded."""


@runtime_checkable
class Graphs(Protocol):
    """What records and replays steps."""

    def take(self, step: Step) -> tuple[ModelOutput, str | None]:
        """Take a step as it is, where later ones will be recorded: its output, and why it cannot be recorded, if so."""

    def record(self, step: Step) -> tuple[Callable[[], object], ModelOutput]:
        """Take a step and record it: a function that takes it again, and where its output is then.

        `NotRecordedError` if it cannot be recorded; then nothing was taken.
        """


class CudaGraphs:
    """CUDA graphs, which share their memory: one of them is in use at a time."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self.latest: torch.cuda.CUDAGraph | None = None  # kept while the next one is made

    def take(self, step: Step) -> tuple[ModelOutput, str | None]:
        now = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(now)
        # A recording that fails leaves some versions of torch in a bad state: what would make it fail is found first.
        mode = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings(record=True) as said, torch.cuda.stream(self.stream):
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                out = step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            now.wait_stream(self.stream)
        waits = [one for one in said if "synchronizing CUDA operation" in str(one.message)]
        for one in said:
            if one not in waits and PROTOTYPE not in str(one.message):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        where = f"{waits[0].filename}:{waits[0].lineno}" if waits else ""
        return out, f"a step waits for a number of the GPU's, or copies one there ({where})" if waits else None

    def record(self, step: Step) -> tuple[Callable[[], object], ModelOutput]:
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        try:
            with torch.cuda.stream(self.stream):
                # Not `with torch.cuda.graph`, which first frees all cached memory: that takes longer than a step.
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    out = step()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except RuntimeError as error:
            raise NotRecordedError(f"{type(error).__name__}: {error!s:.300}") from error
        self.latest = graph
        graph.replay()
        return graph.replay, out
