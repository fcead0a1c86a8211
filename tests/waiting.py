"""What a program waits for while a device computes: a number that it wants to know stops all that could go on.

So does a list of numbers that is copied to the device.
"""

import traceback
from collections import Counter
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import kvsketch

SOURCE = Path(kvsketch.__file__).parent
WANTED = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy"}
OF_UNKNOWN_SIZE = {"aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2"}


def is_of_unknown_size(function, args):
    """Whether only the device knows how much comes of an operation."""
    masked = function is torch.ops.aten.index.Tensor and any(
        x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
    )
    return masked or function._schema.name in OF_UNKNOWN_SIZE


class Waits(TorchFunctionMode):
    """Counts them, by the line of kvsketch that waits: on any device, for a CPU would not show it by its time."""

    def __init__(self):
        super().__init__()
        self.lines = Counter[str]()
        self._below = _Below(self)

    def __enter__(self):
        self._below.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._below.__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        copied = function in (torch.tensor, torch.as_tensor) and isinstance(args[0], (list, tuple))
        if getattr(function, "__name__", "") in WANTED or (
            copied and (kwargs or {}).get("device") not in (None, "cpu")
        ):
            self.note()
        return function(*args, **(kwargs or {}))

    def note(self):
        """The innermost line that is ours."""
        ours = [frame for frame in traceback.extract_stack() if SOURCE in Path(frame.filename).parents]
        if ours:
            self.lines[f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].line}"] += 1


class _Below(TorchDispatchMode):
    """Sees what functions do inside."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if is_of_unknown_size(function, args):
            self.waits.note()
        return function(*args, **(kwargs or {}))
