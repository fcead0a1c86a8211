"""Steps recorded as lists of operations on fixed places of memory: what a CUDA graph is, where there is no GPU.

A replay calls the same operations with the same tensors and numbers, and writes what comes of them where it was before.
So a number of Python's that should have changed, or a tensor that lies elsewhere by now, makes a wrong answer; and what
a GPU cannot record, to ask it for a number or to give it a list of them, is refused.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvsketch.huggingface.graphs import NotRecordedError
from waiting import ASKED, WANTED, is_of_unknown_size

ASKED_OR_GIVEN = {*ASKED, "aten::lift_fresh"}


class RefusedError(NotRecordedError):
    """A step that a GPU could not record."""


class _Above(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in WANTED:
            raise RefusedError(f"{function.__name__} of {tuple(args[0].shape)}")
        return function(*args, **(kwargs or {}))


class _Below(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function._schema.name
        if name in ASKED_OR_GIVEN or is_of_unknown_size(function, args):
            raise RefusedError(
                f"{name} of {[tuple(x.shape) for x in tree_leaves(args) if isinstance(x, torch.Tensor)]}"
            )
        out = function(*args, **kwargs)
        self.done.append((function, args, kwargs, out))
        return out


class Lists:
    """Records; and counts the steps that it took, recorded and replayed."""

    def __init__(self):
        self.taken = self.recorded = self.replayed = 0

    def take(self, step):
        self.taken += 1
        return step(), None

    def record(self, step):
        self.recorded += 1
        below = _Below()
        with below, _Above():
            out = step()

        def replay():
            self.replayed += 1
            for function, args, kwargs, before in below.done:
                _write(function(*args, **kwargs), before)

        return replay, out


def _write(new, before):
    for x, place in zip(tree_leaves(new), tree_leaves(before), strict=True):
        if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() != place.untyped_storage().data_ptr():
            place.copy_(x)
