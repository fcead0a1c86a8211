"""A decode step like the one before it, in one call of C: `native/step.c` says what that does.

All that C is told, except where its numbers come from and go to, was written down when the step before was answered: in
a step of many layers the interpreter finds the processor's caches empty, so each object it touches costs microseconds.
"""

import ctypes
import struct
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from kvsketch.attention import WeightedTokens
from kvsketch.kernels import native
from kvsketch.kernels.native.attention import NOTED, lead_to, shape_of, sources_of
from kvsketch.kernels.native.weights import NO_ROOM, Noting, Weighing
from kvsketch.kernels.routing.native import Asked, ChoiceInC, Question
from kvsketch.kernels.sources import Entries

MOST_PUT = 4  # as in `step.c`
CHANGING = 8 + MOST_PUT  # numbers in front of `struct step`, which change with every token
RANK = 7  # which of them is the token's rank
_write = struct.Struct(f"={CHANGING}q").pack_into  # all of them at once

Note = tuple[Noting, Weighing, bool]  # where attention is noted, how, and whether that is in the window


class _Put(ctypes.Structure):
    """`struct put` in `step.c`."""

    _fields_ = [
        ("to", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "to_row", "to_head", "from_row", "from_head", "bytes")),
    ]


class _Note(ctypes.Structure):
    """`struct note` in `step.c`."""

    _fields_ = [
        ("how", Weighing),
        *((name, ctypes.c_void_p) for name in ("keys", "log_mass", "got")),
        ("of_window", ctypes.c_int64),
    ]


class _Step(ctypes.Structure):
    """`struct step` in `step.c`."""

    _fields_ = [
        ("changing", ctypes.c_int64 * CHANGING),
        ("puts", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("asked", "choice", "layers", "scores", "shape", "sources")),
        *((name, ctypes.c_int64) for name in ("number", "window")),
        ("notes", ctypes.c_void_p),
        ("noted", ctypes.c_int64),
    ]


class Step:
    """What C is told about a step, and the objects that this points to, which must stay in place as long as it."""

    def __init__(
        self,
        query: Float[Tensor, "b hg 1 d"],
        parts: Sequence[Entries],
        heads: int,
        how: tuple[float, float | None],
        places: Sequence[tuple[Tensor, Tensor | None]],
        asking: Question | None,
        notes: Sequence[Note],
    ) -> None:
        """The last part gets the new token. `how`: scale and softcap; `asking`: what is asked for the runs to read.

        `places`: buffers of keys, values, ranks and perhaps notes, each with what the token before put there, or None
        for ranks, which get a number. `notes`: where the attention that entries get is noted.
        """
        library = native.library()
        assert library is not None, "there is something to call"
        self.kept: list[object] = [asking, notes]
        self.kept += [part.noted[NOTED].kept for part in parts]  # such as the numbers of lanes
        self.read: Sequence[object] = parts
        values = parts[0].noted[NOTED].widths[1]
        self.shape, self.sources = shape_of(query, heads, values, *how), sources_of(parts)
        self.puts = (_Put * len(places))(*(_put(buffer, new) for buffer, new in places))
        self.put_into([buffer for buffer, _ in places])
        self.given = _Step(
            puts=ctypes.addressof(self.puts), count=len(places), shape=ctypes.addressof(self.shape),
            sources=ctypes.addressof(self.sources), number=len(parts), window=len(parts) - 1,
        )  # fmt: skip
        self.choice, self.asked = ChoiceInC(), Asked()
        if asking is not None:
            self.asked = asking.asked
            ((number, choice),) = ((n, part.choice) for n, part in enumerate(parts) if part.choice is not None)
            self.choice = ChoiceInC.from_buffer_copy(choice.asked)
            self.sources[number].choice = ctypes.addressof(self.choice)
            scores, left = native.room(2, self.choice.lanes, self.choice.buckets)
            self.kept += [scores, left]
            self.choice.scores = self.given.scores = scores.data_ptr()
            self.given.choice = ctypes.addressof(self.choice)
            if self.choice.left:  # means of buckets that are not visited are read, with these weights
                (means,) = (source for source in self.sources if source.log_mass == self.choice.left)
                self.choice.left = means.log_mass = left.data_ptr()
            self.given.asked, self.given.layers = ctypes.addressof(self.asked), ctypes.addressof(asking.of.layers)
        self.notes = (_Note * len(notes))(*(_note(*own) for own in notes))
        self.given.notes, self.given.noted = ctypes.addressof(self.notes), len(notes)
        self.call = library.kvs_step
        self.call.argtypes = [ctypes.c_void_p]
        self.at = ctypes.addressof(self.given)
        self.rank_at = self.at + RANK * ctypes.sizeof(ctypes.c_int64)  # it is copied to its place like the rest

    def run(
        self,
        place: int,
        rank: int,
        new: tuple[int, int, int],
        query: Tensor,
        unrotated: Tensor | None,
        into: tuple[int, int, int],
    ) -> bool:
        """Store a token and answer its query; False: no memory is left.

        `new`: the addresses of its keys, values and perhaps notes (0: there are none); `into`: those for the answer,
        its log of denominators, and how much was looked up.
        """
        asked = 0 if unrotated is None else unrotated.data_ptr()
        (keys, values, notes), (out, lse, read) = new, into
        where = (query.data_ptr(), out, lse, asked, read)
        _write(self.given, 0, place, native.threads(), *where, rank, keys, values, self.rank_at, notes)
        failed = self.call(self.at)
        if failed > 1:
            raise MemoryError(NO_ROOM)
        return not failed

    def read_others(self, entries: Sequence[WeightedTokens]) -> None:
        """From now on read these, of the same lanes, instead of those read before."""
        for source, own in zip(self.sources, entries, strict=True):
            lead_to(source, own)
        self.read = entries

    def put_into(self, buffers: Sequence[Tensor]) -> None:
        """From now on put tokens into these, which have room for more."""
        for put, buffer in zip(self.puts, buffers, strict=True):
            size = buffer.element_size()
            put.to, put.to_row, put.to_head = buffer.data_ptr(), size * buffer.stride(0), size * buffer.stride(1)
        self.buffers: Sequence[object] = buffers


def _note(to: Noting, how: Weighing, of_window: bool) -> _Note:
    mass = None if to.log_mass is None else to.log_mass.data_ptr()
    return _Note(how, to.keys.data_ptr(), mass, to.got.data_ptr(), int(of_window))


def _put(buffer: Tensor, new: Tensor | None) -> _Put:
    """How C puts a token into a buffer [b, h, n, d], where a head's places lie side by side; or a rank into [b, n]."""
    size = buffer.element_size()
    if new is None:
        return _Put(rows=len(buffer), heads=1, bytes=size)
    rows, heads, _, width = buffer.shape
    row, head, *_ = new.stride()
    return _Put(rows=rows, heads=heads, from_row=size * row, from_head=size * head, bytes=size * width)
