"""Queries and keys as attention layers have them before rotation, without a change to the model.

A modeling file rotates by calling its own `apply_rotary_pos_emb(queries, keys, cos, sin)`. While a `BeforeRotation` is
open, that name leads to a function that rotates as ever and notes what it was given, until the layer has run. It notes
only layers of the model it was opened for, by thread; when it is closed, the name leads where it did before.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsketch.caches.core.tokens import Ahead
from kvsketch.huggingface.modules import attention_modules

ROTATION, POSITIONS = "apply_rotary_pos_emb", "position_ids"
WATCH = "_kvsketch_watch"  # on attention modules: the watch that `attach` opened
_FILES = threading.RLock()  # held while a file's name is exchanged; a garbage collection meanwhile may exchange another


@dataclass(frozen=True)
class Rotated:
    """One layer's queries and keys of one call, before and after rotation."""

    queries: Float[Tensor, "b hg q d"]
    keys: Float[Tensor, "b h q d"]
    rotated_queries: Float[Tensor, "b hg q d"]
    rotated_keys: Float[Tensor, "b h q d"]
    turning: "Turning"


@dataclass(frozen=True)
class Turning:
    """How they were rotated: a modeling file's function, and what it was given beside queries and keys."""

    rotate: Callable[..., Any]
    cosines: "weakref.ref[Tensor] | None"  # of the call's positions
    arguments: tuple[Any, ...]  # after cosines and sines
    options: dict[str, Any]

    def mean(self, angles: "Angles", width: int, first: int, count: int) -> Float[Tensor, "d d"]:
        """The mean rotation of `count` positions from `first` on; row i is what becomes of the i-th unit vector."""
        cosines, sines = (x.mean(1, keepdim=True) for x in angles.at(first, count))
        units = torch.eye(width, dtype=torch.float32, device=cosines.device)[None, :, None]
        return self.rotate(units, units, cosines, sines, *self.arguments, **self.options)[0][0, :, 0].double()


@dataclass(frozen=True)
class Angles:
    """Where the cosines and sines of a call's positions come from."""

    module: "weakref.ref[nn.Module]"
    positions: Tensor
    others: dict[str, Any]  # what else the module was given, such as a kind of layers
    cosines: "weakref.ref[Tensor]"

    def at(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `count` positions from `first` on, in float32."""
        module = self.module()
        assert module is not None, "the model asks"
        device = self.positions.device
        positions = torch.arange(first, first + count, device=device)[None]
        like = torch.zeros(1, 1, 1, dtype=torch.float32, device=device)
        cosines, sines = module.forward(like, positions, **self.others)
        return cosines, sines


class NotingRotation:
    """Stands in for a modeling file's rotation while it is watched."""

    def __init__(self, rotate: Callable[..., Any]) -> None:
        self.rotate = rotate
        self.watches: tuple[weakref.ref[BeforeRotation], ...] = ()  # not held: they hold their models

    def __call__(self, queries: Tensor, keys: Tensor, *arguments: Any, **options: Any) -> Any:
        """Rotate as ever, and tell the watches."""
        found = self.rotate(queries, keys, *arguments, **options)
        for reference in self.watches:
            watch = reference()
            if watch is not None:
                cosines = weakref.ref(arguments[0]) if arguments else None
                turning = Turning(self.rotate, cosines, arguments[2:], options)
                watch.note(Rotated(queries, keys, found[0], found[1], turning))
        return found

    def watched_by(self, watch: "BeforeRotation") -> bool:
        """Whether this watch is told."""
        return any(reference() is watch for reference in self.watches)


class BeforeRotation:
    """Notes what the layers of a model rotate, while it is open; `take` gives that out while the layer runs."""

    def __init__(self, model: PreTrainedModel, layers: Collection[int] | None = None) -> None:
        """A watch of these layers, or of all."""
        self.name = type(model).__name__
        self.modules = [m for m in attention_modules(model) if layers is None or m.layer_idx in layers]
        self.embeddings = [m for m in model.modules() if _makes_angles(m)]
        self._here = threading.local()  # the layer that runs in this thread, and what was noted
        self._hooks = list[Any]()
        self._compared = set[int]()  # layers whose noted vectors were compared with those that attention got

    def __enter__(self) -> "BeforeRotation":
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _closed, (self.name,)  # a copy of the model, or one from a file, is not watched

    def open(self) -> None:
        """Begin to note; a watch that was not closed is closed when its model is gone."""
        self.check()
        files = self._files()
        weakref.finalize(self, _stop_telling, files, None)
        for module in self.modules:
            self._hooks.append(module.register_forward_pre_hook(self._enter_layer))
            self._hooks.append(module.register_forward_hook(self._leave_layer, always_call=True))
        for module in self.embeddings:
            self._hooks.append(module.register_forward_hook(self._note_angles, with_kwargs=True))
        with _FILES:
            for names in files:
                if not isinstance(names[ROTATION], NotingRotation):
                    names[ROTATION] = NotingRotation(names[ROTATION])
                names[ROTATION].watches += (weakref.ref(self),)

    def check(self) -> None:
        """Refuse a model for which nothing could be noted."""
        for module in self.modules:
            names = _names_of_forward(module)
            if ROTATION not in names or list(inspect.signature(names[ROTATION]).parameters)[1] == "cos":
                raise ValueError(
                    f"{self.name} does not rotate queries and keys together by {ROTATION}: how they were before "
                    "rotation cannot be seen, which saap and expected_attention need"
                )

    def close(self) -> None:
        """Leave everything as it was."""
        for hook in self._hooks:
            hook.remove()
        _stop_telling(self._files(), self)
        self._hooks = []

    def take(self, layer: int, queries: Tensor, keys: Tensor, *, check: bool = True) -> tuple[Tensor, Tensor]:
        """What the layer's queries and keys were before rotation, given what they are after it.

        If a layer rotates nothing, they are returned as they are. A model that rotates in a way that was not seen here,
        or rotates only a part of each vector, is refused. `check=False` trusts that these are what was rotated: to
        compare them would stall a GPU at every step; a layer's first call is always compared.
        """
        noted: dict[int, Rotated] = getattr(self._here, "noted", {})
        found = noted.pop(layer, None)
        if found is None:
            self._check_it_would_have_been_seen()
            return queries, keys
        same = found.rotated_queries.shape == queries.shape and found.rotated_keys.shape == keys.shape
        if same and (check or layer not in self._compared):
            same = _alike(found.rotated_queries, queries) and _alike(found.rotated_keys, keys)
            self._compared.add(layer)
        if not same:
            raise ValueError(
                f"layer {layer} of {self.name} does not attend to the vectors that {ROTATION} made (it may rotate "
                "only a part of each): its queries and keys before rotation are not available, which saap and "
                "expected_attention need"
            )
        return found.queries, found.keys

    def ahead(self, layer: int, rows: int) -> Ahead | None:
        """How the layer, which runs now, will rotate the tokens to come; None if it rotates nothing."""
        found: Rotated | None = getattr(self._here, "noted", {}).get(layer)
        if found is None:
            return None
        known: list[Angles] = getattr(self._here, "angles", [])
        cosines = None if found.turning.cosines is None else found.turning.cosines()
        angles = next((each for each in known if cosines is not None and each.cosines() is cosines), None)
        if angles is None or angles.positions.ndim != 2:
            raise ValueError(
                f"how layer {layer} of {self.name} will rotate what follows cannot be seen: its angles do not come "
                "from positions of one dimension. Use a method that does not look ahead, such as keydiff"
            )
        width = found.queries.shape[3]
        return Ahead(angles.positions.expand(rows, -1), partial(found.turning.mean, angles, width))

    def _note_angles(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        """Keep where angles came from: the latest of each kind. Outputs other than cosines and sines are not kept."""
        names = list(inspect.signature(module.forward).parameters)
        given = dict(zip(names, arguments, strict=False)) | options
        given.pop(names[0], None)
        positions, kind = given.pop(POSITIONS, None), (weakref.ref(module), given)
        plain = isinstance(positions, Tensor) and not any(isinstance(other, Tensor) for other in given.values())
        if plain and isinstance(output, tuple) and isinstance(output[0], Tensor):
            new = Angles(kind[0], positions, given, weakref.ref(output[0]))
            known = [each for each in getattr(self._here, "angles", []) if (each.module, each.others) != kind]
            self._here.angles = [*known, new]

    def _check_it_would_have_been_seen(self) -> None:
        """Nothing was noted: either the layer rotates nothing, as some do, or this watch is not told any more."""
        for names in self._files():
            if not (isinstance(names[ROTATION], NotingRotation) and names[ROTATION].watched_by(self)):
                raise ValueError(
                    f"the rotation of {self.name} is not watched any more: {ROTATION} in its modeling file was "
                    "replaced, or the model was detached. Attach it again: kvsketch.attach(model, before_rotation=True)"
                )

    def _enter_layer(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._here.layer = module.layer_idx

    def _leave_layer(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self._here.layer = None
        getattr(self._here, "noted", {}).pop(module.layer_idx, None)

    def note(self, rotated: Rotated) -> None:
        """Keep what a layer of this model rotates in this thread."""
        layer = getattr(self._here, "layer", None)
        if layer is not None:
            if not hasattr(self._here, "noted"):
                self._here.noted = dict[int, Rotated]()
            self._here.noted[layer] = rotated

    def _files(self) -> list[dict[str, Any]]:
        """The global names of every modeling file of the model that has a rotation."""
        found = {id(names): names for names in map(_names_of_forward, self.modules) if ROTATION in names}
        return list(found.values())


def forget_copied(model: nn.Module) -> None:
    """Remove hooks that a copy of a watched model brought along: they belong to a watch of no modules."""
    for module in model.modules():
        before: dict[int, Any] = module._forward_pre_hooks
        after: dict[int, Any] = module._forward_hooks
        flags: tuple[dict[int, bool], ...] = (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)
        for hooks, known in ((before, ()), (after, flags)):
            for number, hook in list(hooks.items()):
                watch = getattr(hook, "__self__", None)
                if isinstance(watch, BeforeRotation) and not watch.modules:
                    for each in (hooks, *known):  # another hook may get this number
                        each.pop(number, None)


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether tensors of one shape have the same numbers: mostly they share memory, and need not be read."""
    place = _place(one)
    return (place is not None and place == _place(other)) or torch.equal(one, other)


def _place(x: Tensor) -> tuple[Any, ...] | None:
    """Where a tensor's numbers lie; None if that is not known, as for a tensor divided among processes."""
    if type(x) is not Tensor or not x.data_ptr() or x.is_neg():
        return None
    return x.data_ptr(), x.dtype, x.device, [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def _makes_angles(module: nn.Module) -> bool:
    """Whether a module makes cosines and sines of positions."""
    return (
        type(module).__name__.endswith("RotaryEmbedding") and POSITIONS in inspect.signature(module.forward).parameters
    )


def _names_of_forward(module: nn.Module) -> dict[str, Any]:
    """The names that a module's forward looks up: those of its modeling file."""
    return inspect.unwrap(type(module).forward).__globals__


def _closed(name: str) -> BeforeRotation:
    """A watch of no modules."""
    watch = BeforeRotation.__new__(BeforeRotation)
    watch.name, watch.modules, watch.embeddings, watch._hooks, watch._compared = name, [], [], [], set()
    watch._here = threading.local()
    return watch


def _stop_telling(files: list[dict[str, Any]], watch: BeforeRotation | None) -> None:
    """Stop telling this watch and those that are gone; where no watch is left, the name leads where it did before."""
    with _FILES:
        for names in files:
            noting = names[ROTATION]
            if not isinstance(noting, NotingRotation):
                continue  # other code has put another function there
            noting.watches = tuple(known for known in noting.watches if known() not in (None, watch))
            if not noting.watches:
                names[ROTATION] = noting.rotate
