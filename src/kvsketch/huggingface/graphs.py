"""Decode steps that are recorded and replayed: a GPU takes longer to start thousands of small kernels than to run them.

A step can be recorded where the numbers that Python knows are those of the next step too. What changes from step to
step, the place of the new token and its rank, is counted by the device (`LayerCache.open`). Tokens leave windows
between steps, in blocks, and then a step is recorded anew: what it reads may lie elsewhere by then.

    open ─ a step as it is ─ a step recorded ─ replayed … replayed ─ close, tokens leave ─ open …

Whoever looks at the cache in between finds it closed, as after any step.
"""

import copy
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from kvsketch.huggingface.attention import autocast_of, check_mask
from kvsketch.huggingface.layer import SketchLayer
from kvsketch.huggingface.supported import unwrapped

M = TypeVar("M", bound=nn.Module)
Step = Callable[[], ModelOutput]
MOST = 256  # tokens for which there is room at once, where nothing leaves
LEAST = 4  # before something leaves: for fewer it is not worth while
OFTEN, LOOKED_AT = 3, "the cache is looked at, or its rows are moved, after every step or two"
INPUTS = ("input_ids", "position_ids", "attention_mask", "past_key_values")
PLAIN = {"use_cache": (None, True), "return_dict": (None, True), "labels": (None,), "inputs_embeds": (None,)}
_log = logging.getLogger("kvsketch")


@runtime_checkable
class Graphs(Protocol):
    """What records."""

    def take(self, step: Step) -> ModelOutput:
        """Take a step as it is, where later ones will be recorded."""

    def record(self, step: Step) -> tuple[Callable[[], object], ModelOutput]:
        """Take a step and record it: what takes it again, and where its output is then.

        `NotRecordedError` if that cannot be; then nothing was taken.
        """


class NotRecordedError(Exception):
    """A step that does something that cannot be recorded."""


class CudaGraphs:
    """CUDA graphs, which share their memory: one of them is in use at a time."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self.latest: torch.cuda.CUDAGraph | None = None  # is still there while the next one is made

    def take(self, step: Step) -> ModelOutput:
        now = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            out = step()
        now.wait_stream(self.stream)
        return out

    def record(self, step: Step) -> tuple[Callable[[], object], ModelOutput]:
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        try:
            with torch.cuda.stream(self.stream):
                # Not `with torch.cuda.graph`, which collects garbage first: a step would take longer than without.
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


class Steps:
    """The steps of one cache, which `forward` takes."""

    def __init__(self, cache: Any, forward: Callable[..., ModelOutput], graphs: Graphs) -> None:
        self.stack, self.forward, self.graphs = cache._stack, forward, graphs
        self._cache: weakref.ref[Any] = weakref.ref(cache)  # not held: the cache has this
        self.refused: str | None = None  # why no more steps are recorded
        self.inside = False  # a step is under way
        self.room = 0  # for so many tokens layers are open
        self.inputs: dict[str, Tensor] = {}  # where a step finds them
        self.rest: dict[str, Any] = {}  # what else a step is given
        self.warm = False  # whether a step was taken since layers were opened
        self.replay: Callable[[], object] | None = None
        self.out: ModelOutput | None = None
        self.looked_at = 0  # so many times in a row layers were closed before a step was replayed

    def take(self, inputs: dict[str, Tensor], rest: dict[str, Any]) -> ModelOutput:
        """Take a step that `why_not` has nothing against."""
        if self.room and not (self.rest == rest and all(_alike(self.inputs[name], inputs[name]) for name in inputs)):
            self.close()
        if not self.room:
            self._open(inputs, rest)
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        cache = self._cache()

        def step() -> ModelOutput:
            return self.forward(**self.inputs, past_key_values=cache, use_cache=True, return_dict=True, **self.rest)

        self.inside = self.stack.touched = True  # until the step is through
        try:
            out = self._taken(step)
        except BaseException as error:
            if isinstance(error, NotRecordedError):
                self._forget()
            self._close()
            raise
        finally:
            self.inside = False
        self._came_one()
        self.stack.touched = False
        return out

    def close(self) -> None:
        """Have layers as they are after a step that was not recorded."""
        if not self.inside and self.room:
            self.looked_at = self.looked_at + 1 if self.replay is None else 0
            self.refused = LOOKED_AT if self.looked_at == OFTEN else None
            self._close()

    def _close(self) -> None:
        empty, self.room = self.room, 0
        self.replay, self.out, self.warm = None, None, False
        for layer in self.stack.sketch:
            layer.held.close(empty)

    def _forget(self) -> None:
        """Nothing was taken of a step that could not be recorded, whatever layers say."""
        self.stack.touched = False
        for layer in self.stack.sketch:
            layer.pending, layer.broken = 0, False

    def _open(self, inputs: dict[str, Tensor], rest: dict[str, Any]) -> None:
        room = min(MOST, *(layer.held.room() for layer in self.stack.sketch))
        self.inputs, self.rest = {name: x.clone() for name, x in inputs.items()}, rest
        for layer in self.stack.sketch:
            layer.held.open(room)
        self.room = room

    def _taken(self, step: Step) -> ModelOutput:
        if self.replay is not None:
            self.replay()
        elif self.warm and self.room >= LEAST:
            self.replay, self.out = self.graphs.record(step)
            self.out["past_key_values"] = None  # or what the cache has would have the cache
        else:
            self.warm = True
            return self.graphs.take(step)
        assert self.out is not None, "it was recorded"
        return _copied(self.out, self._cache())

    def _came_one(self) -> None:
        for layer in self.stack.sketch:
            layer.came_one()
        self.room -= 1
        if not self.room:  # what is due leaves
            self._close()
            for layer in self.stack.sketch:
                layer.held.settle()


def why_not(cache: Any) -> str | None:
    """Why steps of this cache cannot be recorded; None if they can."""
    sketch = [layer for layer in cache.layers if type(layer) is SketchLayer]
    if len(sketch) < len(cache.layers):
        return "the model has layers that do not attend to everything, and those are transformers' own"
    if cache.model.rope is not None:
        return "the model's rotation changes with the length of the text"
    if cache.model.divisions or len({layer.held.window.keys.view.device for layer in sketch}) > 1:
        return "the model is spread over several devices"
    for layer in sketch:
        only, config = layer.held.streams.only, layer.held.config
        if only is None:
            return f"{config}: heads of one layer have windows of unequal lengths"
        observes = frozenset() if only.method is None else only.method.observes
        if observes - {"read"} or config.looks_ahead:
            return f"{config} takes note of every query when it was answered"
    return None


@contextmanager
def cuda_graphs(model: M) -> Iterator[M]:
    """Within the block decode steps are recorded as CUDA graphs and replayed, where a cache of ours allows it.

    `with kvsketch.cuda_graphs(model): model.generate(..., past_key_values=cache)`. Answers are the same. Other calls,
    and caches whose steps cannot be recorded, go on as they are; why is said once in the log.
    """
    inner = unwrapped(model)
    device = next(inner.parameters()).device
    if device.type != "cuda":
        _log.warning("steps are not recorded: CUDA graphs are for NVIDIA GPUs, and this model is on %s", device)
        yield model
        return
    with recorded(inner, CudaGraphs(device)):
        yield model


@contextmanager
def recorded(model: nn.Module, graphs: Graphs) -> Iterator[None]:
    """The same, with what records given."""
    if getattr(model.forward, "_kvsketch_records", False):
        raise ValueError("the steps of this model are being recorded: leave the block before another one begins")
    before, own = model.forward, model.__dict__.get("forward")
    caches, told = weakref.WeakSet[Any](), set[str]()

    @functools.wraps(before)
    def forward(*args: Any, **given: Any) -> Any:
        cache: Any = given.get("past_key_values")
        if args or not _is_step(model, cache, given):
            return before(*args, **given)
        if cache.steps is None or cache.steps.forward is not before:
            cache._close()
            cache.steps = Steps(cache, before, graphs)
            caches.add(cache)
        steps: Steps = cache.steps
        reason = steps.refused
        if reason is None and not steps.room:
            cache.check_step(model, given)  # as always, but now and then
            reason = why_not(cache)
        if reason is None:
            rest = {name: x for name, x in given.items() if name not in INPUTS and name not in PLAIN and x is not None}
            try:
                return steps.take(_inputs(cache, given), rest)
            except NotRecordedError as error:
                reason = steps.refused = str(error)
        if reason not in told:
            told.add(reason)
            _log.warning("steps are not recorded: %s", reason)
        return before(**given)

    forward._kvsketch_records = True  # type: ignore[attr-defined]
    model.forward = forward
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own
        for cache in caches:
            cache._close()
            cache.steps = None


def _is_step(model: nn.Module, cache: Any, given: dict[str, Any]) -> bool:
    """Whether a call is a plain step of a cache of ours that has read something."""
    ids, mask, places = (given.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if not (isinstance(cache, Cache) and hasattr(cache, "check_step") and isinstance(ids, Tensor)):
        return False
    if ids.ndim != 2 or ids.shape[1] != 1 or cache.seen == 0 or len(ids) != cache.rows:
        return False
    if torch.is_grad_enabled() or model.training or autocast_of(ids.device) is not None:
        return False
    if any(given.get(name) not in allowed for name, allowed in PLAIN.items()):
        return False
    held = cache.prompt.held or any(layer.held.recording or layer.watcher for layer in cache.sketch_layers)
    if held or not cache.sketch_layers:
        return False
    if mask is not None:
        if not isinstance(mask, Tensor):
            return False
        check_mask(mask, cache.rows, 1, cache.seen)
    if not (places is None or (isinstance(places, Tensor) and places.ndim == 2)):
        return False
    known = {*INPUTS, *PLAIN}
    return not any(isinstance(x, Tensor) for name, x in given.items() if name not in known)


def _inputs(cache: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    """What changes from step to step. The mask does not: a new token is a real one, and those before it are known."""
    ids, places = given["input_ids"], given.get("position_ids")
    return {"input_ids": ids, "position_ids": torch.full_like(ids[:1], cache.seen) if places is None else places}


def _alike(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device


def _copied(out: ModelOutput, cache: Any) -> ModelOutput:
    """An output that the next step does not overwrite."""
    fresh = copy.copy(out)
    fresh["past_key_values"] = cache
    for name, value in out.items():
        if isinstance(value, Tensor):
            fresh[name] = value.clone()
    return fresh
