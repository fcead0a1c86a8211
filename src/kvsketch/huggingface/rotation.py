"""Queries and keys as attention layers have them before they are rotated, without a change to the model.

A modeling file rotates by calling its own `apply_rotary_pos_emb(queries, keys, cos, sin)`. While a `BeforeRotation` is
open, that name leads to a function that rotates as ever and notes what it was given, until the layer is through. Only
layers of the model it was opened for are noted, by thread; at its end the name leads where it did before.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsketch.huggingface.modules import attention_modules

ROTATION = "apply_rotary_pos_emb"
WATCH = "_kvsketch_watch"  # on attention modules: the watch that `attach` opened


@dataclass(frozen=True)
class Rotated:
    """One layer's queries and keys of one call, before and after."""

    queries: Float[Tensor, "b hg q d"]
    keys: Float[Tensor, "b h q d"]
    rotated_queries: Float[Tensor, "b hg q d"]
    rotated_keys: Float[Tensor, "b h q d"]


@dataclass(frozen=True)
class NotingRotation:
    """A modeling file's rotation, while somebody watches."""

    rotate: Callable[..., Any]
    watches: "weakref.WeakSet[BeforeRotation]" = field(default_factory=weakref.WeakSet)  # they hold their models

    def __call__(self, queries: Tensor, keys: Tensor, *arguments: Any, **options: Any) -> Any:
        """Rotate as ever, and tell."""
        found = self.rotate(queries, keys, *arguments, **options)
        for watch in self.watches:
            watch.note(Rotated(queries, keys, *found))
        return found


class BeforeRotation:
    """Notes what the layers of a model rotate, while it is open; `take` hands it out while the layer runs."""

    def __init__(self, model: PreTrainedModel, layers: Collection[int] | None = None) -> None:
        """Of these layers, or of all."""
        self.name = type(model).__name__
        self.modules = [m for m in attention_modules(model) if layers is None or m.layer_idx in layers]
        self._here = threading.local()  # the layer that runs in this thread, and what was noted
        self._hooks = list[Any]()

    def __enter__(self) -> "BeforeRotation":
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> "BeforeRotation":
        return self  # a copy of the model runs the same modeling file

    def open(self) -> None:
        """Begin to note; what was not closed is closed when its model is gone."""
        weakref.finalize(self, _give_back, self._files())
        for module in self.modules:
            self._hooks.append(module.register_forward_pre_hook(self._enter_layer))
            self._hooks.append(module.register_forward_hook(self._leave_layer, always_call=True))
        for names in self._files():
            if not isinstance(names[ROTATION], NotingRotation):
                names[ROTATION] = NotingRotation(names[ROTATION])
            names[ROTATION].watches.add(self)

    def close(self) -> None:
        """Leave everything as it was."""
        for hook in self._hooks:
            hook.remove()
        for names in self._files():
            names[ROTATION].watches.discard(self)
        _give_back(self._files())
        self._hooks = []

    def take(self, layer: int, queries: Tensor, keys: Tensor, *, check: bool = True) -> tuple[Tensor, Tensor]:
        """What the layer's queries and keys were before rotation, given what they are after it.

        A layer that rotates nothing has them as they are. Where a model rotates in a way that was not seen here, or
        rotates a part of each vector alone, it is refused. `check=False` trusts that these are what was rotated: to
        compare them would stall a GPU at every step.
        """
        noted: dict[int, Rotated] = getattr(self._here, "noted", {})
        found = noted.pop(layer, None)
        if found is None:
            self._check_it_may_rotate_nothing(layer)
            return queries, keys
        same = found.rotated_queries.shape == queries.shape and found.rotated_keys.shape == keys.shape
        if same and check:
            same = torch.equal(found.rotated_queries, queries) and torch.equal(found.rotated_keys, keys)
        if not same:
            raise ValueError(
                f"layer {layer} of {self.name} attends to other vectors than {ROTATION} made (it may rotate a part "
                "of each alone): its queries and keys before rotation cannot be had, which Saap needs"
            )
        return found.queries, found.keys

    def _check_it_may_rotate_nothing(self, layer: int) -> None:
        """Some models have such layers; where the modeling file has no function of the name, none could be seen."""
        module = next(module for module in self.modules if module.layer_idx == layer)
        if ROTATION not in _names_of_forward(module):
            raise ValueError(
                f"{self.name} does not rotate by {ROTATION}: how its queries and keys were before rotation cannot be "
                "seen, which Saap needs"
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
        """The names of every modeling file of the model that has a rotation."""
        found = {id(names): names for names in map(_names_of_forward, self.modules) if ROTATION in names}
        return list(found.values())


def _names_of_forward(module: nn.Module) -> dict[str, Any]:
    """The names that a module's forward looks up: those of its modeling file."""
    return inspect.unwrap(type(module).forward).__globals__


def _give_back(files: list[dict[str, Any]]) -> None:
    """Have the name lead where it did before, in every file that nobody watches any more."""
    for names in files:
        noting = names[ROTATION]
        if isinstance(noting, NotingRotation) and not list(noting.watches):
            names[ROTATION] = noting.rotate
