"""Random numbers by address in C, `kernels/native/draws.c`: None where C cannot be used."""

import ctypes

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.kernels import native

PARTS, SIZES = 8, 4  # of an address, and of the result, at most


def uniforms(*address: int | Int64[Tensor, "..."]) -> Float[Tensor, "..."] | None:
    """The numbers of `algorithms/draws.uniforms`, bit for bit."""
    tensors = [x for x in address if isinstance(x, Tensor)]
    library = native.library() if tensors and _can_be_read(address) else None
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    if library is None or len(address) > PARTS or len(shape) > SIZES:
        return None
    found = native.room(*shape, dtype=torch.float64)
    fixed = native.numbers([0 if isinstance(x, Tensor) else x for x in address])
    places, steps = list[int](), list[int]()
    for number, part in enumerate(address):
        at, along = ctypes.addressof(fixed) + 8 * number, list[int]()
        if isinstance(part, Tensor):
            at, along = part.data_ptr(), [*part.expand(shape).stride()]
        places.append(at)
        steps += ([0] * SIZES + along)[-SIZES:]
    sizes, count = native.numbers(([1] * SIZES + [*shape])[-SIZES:]), ctypes.c_int64(len(places))
    pointers, to = (ctypes.c_void_p * len(places))(*places), ctypes.c_void_p(found.data_ptr())
    library.kvs_uniforms(sizes, count, pointers, native.numbers(steps), to)
    return found


def _can_be_read(address: tuple[int | Tensor, ...]) -> bool:
    """Whether the parts are integers of 64 bits, in this machine's memory."""
    if torch.compiler.is_compiling():
        return False
    return all(
        type(x) is Tensor and x.dtype == torch.int64 and x.is_cpu if isinstance(x, Tensor) else -(2**63) <= x < 2**63
        for x in address
    )
