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
ASKED = {"aten::_local_scalar_dense", "aten::equal"}
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_"}


def is_of_unknown_size(function, args):
    """Whether only the device knows how much comes of an operation."""
    name = function._schema.name
    masked = name in INDEXED and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return masked or name in OF_UNKNOWN_SIZE


def is_brought(function, args, kwargs):
    """Whether an operation copies from a device to the CPU."""
    name = function._schema.name
    if name == "aten::copy_":
        source, to = args[1].device, args[0].device
    elif name == "aten::_to_copy":
        source = args[0].device
        to = torch.device(kwargs.get("device") or source)
    else:
        return False
    return source.type != "cpu" and to.type == "cpu"


class Waits(TorchFunctionMode):
    """Counts them, by the line of kvsketch that waits: on any device, for a CPU would not show it by its time."""

    def __init__(self):
        super().__init__()
        self.lines = Counter[str]()
        self.inside = False  # a function that was counted
        self._below = _Below(self)

    def __enter__(self):
        self._below.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._below.__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        copied = function in (torch.tensor, torch.as_tensor) and isinstance(args[0], (list, tuple))
        counted = getattr(function, "__name__", "") in WANTED
        counted = counted or (copied and (kwargs or {}).get("device") not in (None, "cpu"))
        if not counted:
            return function(*args, **(kwargs or {}))
        self.note()
        self.inside = True
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.inside = False

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
        asked = function._schema.name in ASKED or is_of_unknown_size(function, args)
        if not self.waits.inside and (asked or is_brought(function, args, kwargs or {})):
            self.waits.note()
        return function(*args, **(kwargs or {}))
