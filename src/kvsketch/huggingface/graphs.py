"""Decode steps that are recorded and replayed: a GPU takes longer to start thousands of small kernels than to run them.

A step can be recorded if every number that Python knows is the same in the next step. What changes from step to step,
the place of the new token and its rank, is counted by the device (`LayerCache.open`). Tokens leave windows between
steps, in blocks. If all that a step reads then still lies where it lay (`LayerCache.marks`), with empty places after it
for new tokens, the step is replayed again; if not, a new one is recorded.

    open ─ a step as it is ─ a step recorded ─ replayed … replayed ─ close, tokens leave ─ open ─ replayed …

Code that looks at the cache in between finds it closed, as after any step.
"""

import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from kvsketch.huggingface.attention import check_mask
from kvsketch.huggingface.autocast import autocast_of
from kvsketch.huggingface.cuda import CudaGraphs, Graphs, NotRecordedError
from kvsketch.huggingface.layer import SketchLayer
from kvsketch.huggingface.naming import as_argument, cache_in, named
from kvsketch.huggingface.supported import unwrapped
from kvsketch.kernels.gpu import attention as in_triton

M = TypeVar("M", bound=nn.Module)
MOST = 256  # tokens for which room is made at once, where nothing leaves
LEAST = 4  # steps until something leaves a window: with no more than that it is not worth while
OFTEN = 3  # times in a row
KEPT = 4  # recorded steps of a cache, which may go from one of several states to another and back
INPUTS = ("input_ids", "position_ids")  # change from step to step; the mask does not, for new tokens are real ones
SEEN_TO = (*INPUTS, "attention_mask")  # handled here, and so is the cache
PLAIN = {"use_cache": (None, True), "return_dict": (None, True), "labels": (None,), "inputs_embeds": (None,)}
LOOKED_AT = "the cache is looked at, or its rows are moved, after every step or two"
UNEVEN = "in rows of unequal lengths tokens leave the windows after too few steps"
_log = logging.getLogger("kvsketch")


@dataclass(frozen=True)
class Recorded:
    """A step that can be taken again while all that it reads is where it was."""

    marks: object
    replay: Callable[[], object]
    out: ModelOutput
    beside: list[object]  # what it reads beside what `marks` describes: held here, or it would be gone


class Steps:
    """The steps of one cache, which `forward` computes."""

    def __init__(self, cache: Any, forward: Callable[..., ModelOutput], graphs: Graphs) -> None:
        self.stack, self.forward, self.graphs = cache._stack, forward, graphs
        self._cache: weakref.ref[Any] = weakref.ref(cache)  # not held: the cache holds this object
        self.refused: str | None = None  # why no more steps are recorded
        self.inside = False  # a step is under way
        self.open = False  # whether layers are open
        self.room = 0  # for how many tokens more they are
        self.inputs: dict[str, Tensor] = {}  # the tensors in which a step finds its inputs
        self.rest: dict[str, Any] = {}  # what else a step is given
        self.inference = False  # whether torch's inference mode is on: its tensors may not be changed outside it
        self.warm = False  # whether a step was taken since layers were opened, and could have been recorded
        self.waited = 0  # how many steps in a row could not be recorded
        self.short = 0  # at how many steps in a row there was no room for several more
        self.looked_at = 0  # how many times in a row layers were closed before a step was replayed
        self.now: Recorded | None = None  # the step that is replayed
        self.known: deque[Recorded] = deque(maxlen=KEPT)

    def fit(self, inputs: Mapping[str, Tensor], rest: Mapping[str, Any]) -> bool:
        """Whether layers are open for a step with these inputs."""
        return self.open and self._known(inputs, rest)

    def _known(self, inputs: Mapping[str, Tensor], rest: Mapping[str, Any]) -> bool:
        """Whether the recorded steps are right for these inputs."""
        same = self.inference == torch.is_inference_mode_enabled() and self.rest == rest
        same = same and self.inputs.keys() == inputs.keys()
        return same and all(_alike(self.inputs[name], x) for name, x in inputs.items())

    def may_open(self) -> bool:
        """Whether there is room for enough steps to be worth while."""
        self.room = min(MOST, *(layer.held.room() for layer in self.stack.sketch))
        self.short = 0 if self.room > LEAST else self.short + 1
        return self.room > LEAST

    def take(self, inputs: Mapping[str, Tensor], rest: dict[str, Any]) -> ModelOutput:
        """Take a step that may be recorded."""
        try:
            if not self.open:
                self._open(inputs, rest)
            for name, x in inputs.items():
                self.inputs[name].copy_(x)
            self.inside = self.stack.touched = True  # until the step is through
            out = self._taken(self._cache())
            self.inside = False
            self._came_one()
        except BaseException as error:
            self.inside = False
            self._close()
            self.known.clear()
            if isinstance(error, NotRecordedError):
                self._forget()
            raise
        self.stack.touched = False
        return out

    def close(self) -> None:
        """Bring layers into the state in which a step that was not recorded leaves them."""
        if self.open and not self.inside:
            self.looked_at = self.looked_at + 1 if self.now is None else 0
            self.refused = LOOKED_AT if self.looked_at == OFTEN else self.refused
            self._close()

    def _open(self, inputs: Mapping[str, Tensor], rest: dict[str, Any]) -> None:
        self.open = True
        if not self._known(inputs, rest):
            self.known.clear()
            self.inference, self.rest = torch.is_inference_mode_enabled(), rest
            self.inputs = {name: x.clone() for name, x in inputs.items()}
        if not self._laid_out(anew=False) and self.known:
            for layer in self.stack.sketch:  # something has moved: lay out all anew, to stay in place for long
                layer.held.close()
            self._laid_out(anew=True)

    def _laid_out(self, *, anew: bool) -> bool:
        """Open all layers; whether all that one of the recorded steps reads is where it was."""
        for layer in self.stack.sketch:
            layer.held.open(self.room, anew=anew)
        marks = self._marks()
        self.now = next((one for one in self.known if one.marks == marks), None)
        return self.now is not None

    def _marks(self) -> object:
        return [layer.held.marks() for layer in self.stack.sketch]

    def _close(self) -> None:
        self.now, self.warm = None, False
        if self.refused is not None:
            self.known.clear()
        for layer in self.stack.sketch:
            layer.held.close()
        self.open = False

    def _taken(self, cache: Any) -> ModelOutput:
        def step() -> ModelOutput:
            given = as_argument(self.forward, cache)
            return self.forward(**self.inputs, **given, use_cache=True, return_dict=True, **self.rest)

        if self.now is not None:
            self.now.replay()
        elif self.warm:
            marks = self._marks()
            replay, out = self.graphs.record(step)
            for name in named(None, out):
                out[name] = None  # the cache will hold this output, which must not hold the cache
            self.now = Recorded(marks, replay, out, [layer.held.read_beside() for layer in self.stack.sketch])
            if marks == self._marks():  # some things may lie elsewhere each time
                self.known.append(self.now)
        else:
            out, wrong = self.graphs.take(step)
            self.warm, self.waited = wrong is None, 0 if wrong is None else self.waited + 1
            self.refused = wrong if self.waited == OFTEN else None  # a first step may have to look at what is new to it
            return out
        return _copied(self.now.out, cache)

    def _came_one(self) -> None:
        for layer in self.stack.sketch:
            layer.came_one()
        self.room -= 1
        if self.room and self.refused is None:
            return
        self._close()
        for layer in self.stack.sketch:  # evict what is due
            layer.held.settle()

    def _forget(self) -> None:
        """Undo what layers note of a step that could not be recorded: nothing of it was taken."""
        for layer in self.stack.sketch:
            layer.pending, layer.broken = 0, False
        self.stack.touched = False


class Recording:
    """Stands in for a model's `forward`, and records the steps of caches of ours."""

    def __init__(self, model: nn.Module, graphs: Graphs) -> None:
        self.model, self.graphs, self.before = model, graphs, model.forward
        self.caches, self.told = weakref.WeakSet[Any](), set[str]()
        self.lock = threading.RLock()  # recordings share their memory
        functools.update_wrapper(self, self.before)  # `generate` asks for the names of its arguments

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """The plain `forward` for a copy of the model: it must not compute with this model, nor record."""
        twin = memo[id(self.model)]
        return type(twin).forward.__get__(twin)

    def __call__(self, *args: Any, **given: Any) -> Any:
        cache: Any = cache_in(given)
        if args or not _is_step(cache, given):
            if isinstance(cache, Cache) and getattr(cache, "steps", None) is not None:
                cache._close()
                cache.steps.looked_at = 0
            return self.before(*args, **given)
        with self.lock:
            steps = self._steps_of(cache)
            if steps.stack.touched:  # the call will refuse such a cache
                return self.before(**given)
            inputs = {name: given[name] for name in INPUTS if given.get(name) is not None}
            others = given.keys() - {*SEEN_TO, *PLAIN}
            rest = {name: x for name, x in given.items() if name in others and x is not None and x is not cache}
            reason = self._against(steps, cache, given, inputs, rest)
            if reason is None:
                try:
                    return steps.take(inputs, rest)
                except NotRecordedError as error:
                    reason = steps.refused = str(error)
        if reason != UNEVEN or steps.short > LEAST:  # before a block leaves a window there are at most LEAST such steps
            self._say(reason)
        return self.before(**given)

    def end(self) -> None:
        """Leave all caches in the state in which steps that were not recorded leave them."""
        for cache in self.caches:
            cache.without_room()
            cache.steps = None

    def _steps_of(self, cache: Any) -> Steps:
        if cache.steps is None or cache.steps.forward is not self.before:
            cache._close()
            cache.steps = Steps(cache, self.before, self.graphs)
            self.caches.add(cache)
        return cache.steps

    def _against(
        self, steps: Steps, cache: Any, given: Mapping[str, Any], inputs: Mapping[str, Tensor], rest: Mapping[str, Any]
    ) -> str | None:
        """Why this step is not recorded; None if it can be: then layers are open, or can be opened."""
        reason = steps.refused or _against_call(self.model, given, rest)
        if reason is not None or steps.fit(inputs, rest):
            return reason
        cache._close()
        steps.refused = why_not(cache)
        if steps.refused is None and steps.may_open():
            cache.check_step(self.model, given)  # the check of any call, but made only now and then
            return None
        return steps.refused or UNEVEN

    def _say(self, reason: str) -> None:
        if reason not in self.told:
            self.told.add(reason)
            _log.warning("steps are not recorded: %s", reason)


def why_not(cache: Any) -> str | None:
    """Why steps of this cache cannot be recorded; None if they can."""
    sketch = [layer for layer in cache.layers if type(layer) is SketchLayer]
    if len(sketch) < len(cache.layers):
        return "the model has layers that do not attend to everything, and those are transformers' own"
    if cache.model.rope is not None:
        return "the model's rotation changes with the length of the text"
    devices = {layer.held.window.keys.view.device for layer in sketch}
    if cache.model.divisions or len(devices) > 1:
        return "the model is spread over several devices"
    if any(device.type == "cuda" and not in_triton.runs_on(device) for device in devices):
        return "kernels in Triton do not run here, and torch's own take more memory when they are recorded"
    for layer in sketch:
        only, config = layer.held.streams.only, layer.held.config
        if only is None:
            return f"{config}: heads of one layer have windows of unequal lengths"
        observes = frozenset() if only.method is None else only.method.observes
        if observes - {"read"} or config.looks_ahead:
            return f"{config} takes notes after every query that was answered"
    return None


@contextmanager
def cuda_graphs(model: M) -> Iterator[M]:
    """Within the block, decode steps are recorded as CUDA graphs and replayed, where a cache of ours allows it.

    `with kvsketch.cuda_graphs(model): model.generate(..., cache=cache)`. Answers are the same. Other calls, and caches
    whose steps cannot be recorded, work as before; the log says once why. Leave the model as it is inside the block: a
    replayed step does not notice weights that were moved, nor hooks or adapters that were exchanged. Threads may share
    the block if they use one CUDA stream: recorded steps share their memory.
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
    """The same, with the given `graphs` to record steps."""
    if isinstance(model.forward, Recording):
        raise ValueError("the steps of this model are being recorded: leave the block before another one begins")
    own, recording = model.__dict__.get("forward"), Recording(model, graphs)
    model.forward = recording
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own
        recording.end()


def _is_step(cache: Any, given: Mapping[str, Any]) -> bool:
    """Whether a call is a single token for a cache of ours that has read something, and asks for nothing else."""
    ids = given.get("input_ids")
    if not (isinstance(cache, Cache) and hasattr(cache, "check_step") and isinstance(ids, Tensor)):
        return False
    if ids.ndim != 2 or ids.shape[1] != 1 or cache.seen == 0 or len(ids) != cache.rows:
        return False
    if torch.compiler.is_compiling() or (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    if any(given.get(name) not in allowed for name, allowed in PLAIN.items()):
        return False
    sketch = cache.sketch_layers
    return bool(sketch) and not (cache.prompt.held or any(one.held.recording or one.watcher for one in sketch))


def _against_call(model: nn.Module, given: Mapping[str, Any], rest: Mapping[str, Any]) -> str | None:
    """Why a call of a single token cannot be recorded, by its arguments; None if it can."""
    ids, mask, places = (given.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    assert isinstance(ids, Tensor), "it is a step"
    if torch.is_grad_enabled() or model.training:
        return "gradients are wanted, or the model is in training: model.eval(), and torch.no_grad() around the call"
    if autocast_of(ids.device) is not None:
        return "torch.autocast is on"
    if not isinstance(places, Tensor) or places.ndim != 2:
        return "a call came without position_ids, rows × tokens (generate has them)"
    if any(isinstance(x, Tensor) for x in tree_leaves(rest)):
        return f"a call came with other tensors: {', '.join(rest)}"
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        return f"a call came with a mask of another kind: {type(mask).__name__}"
    check_mask(mask, len(ids), 1, cache_in(given).seen)
    return None if bool(mask[:, -1].all()) else "a row's new token is padding"


def _alike(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device


def _copied(out: ModelOutput, cache: Any) -> ModelOutput:
    """An output that the next step does not overwrite."""
    fresh = {name: tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, value) for name, value in out.items()}
    return type(out)(**fresh | named(cache, out))
