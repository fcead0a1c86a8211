"""What grows by a token at a time: a tensor, and the window of a stream, which consists of several such tensors.

The window is passive: `stream.py` says what comes and what leaves. It has one column per token, in the order in which
they came. If rows have unequal lengths, a column may belong to one row and not to another: there its rank is -1, and
its log weight `-inf`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from kvsketch.attention import WeightedTokens, log_mass_of
from kvsketch.caches.core.storage import storage_bytes
from kvsketch.caches.core.tokens import Columns
from kvsketch.kernels.places import close_gap, in_front, keep_in_place

ROOM = 256  # while steps are recorded, room grows by at least so many places at a time
MOST_IDLE = 4  # and no more than so many times that stays empty
SPARE = 32  # places allocated beyond those asked for, or one for every SPARE if that is more, to keep growing cheap


class Growing:
    """A tensor that grows along one dimension without being copied at every step.

    A buffer of n places is copied once for every n/32 places appended. That is 32 places per token, beside the n that
    attention reads anyway, for 3 % of idle memory.
    """

    def __init__(self, dim: int, first: Tensor | None = None, spare: int = SPARE) -> None:
        """Empty, or with a tensor that nobody else uses; at least `spare` places are spare."""
        self.dim, self.spare = dim, spare
        self.least = 0  # so many places are not given back
        self.length = 0
        self.buffer: Tensor | None = None
        if first is not None:
            self.buffer, self.length = first.contiguous(), first.shape[dim]

    @property
    def view(self) -> Tensor:
        """The places in use."""
        assert self.buffer is not None, "nothing was stored yet"
        return self.buffer.narrow(self.dim, 0, self.length)

    @property
    def lanes(self) -> int:
        """The size of the first dimension."""
        assert self.buffer is not None, "nothing was stored yet"
        return len(self.buffer)

    def resize(self, length: int, like: Tensor, most: int | None = None) -> None:
        """Have `length` places shaped as those of `like`; new ones are not filled. Room is never made beyond `most`."""
        self.make_room(length, like, most)
        self.length = length

    def make_room(self, length: int, like: Tensor, most: int | None = None) -> None:
        """Have room for `length` places, and have those in use where they may be changed."""
        if self.buffer is None or length > self.buffer.shape[self.dim]:
            room = max(self.least, length + self._spare(length))
            shape = list(like.shape)
            shape[self.dim] = room if most is None else max(length, min(room, most))
            grown = torch.empty(shape, dtype=like.dtype, device=like.device)
            if self.length:
                grown.narrow(self.dim, 0, self.length).copy_(self.view)
            self.buffer = grown
        self.make_writable()

    def with_room(self, room: int, rest: float | int) -> Tensor:
        """The places in use and empty ones after them, `room` in all; empty places are filled with `rest`.

        As long as `room` is the same, they stay where they are.
        """
        self.least = room
        if self.view.shape[self.dim] < room:
            self.make_room(room, self.view, room)
        self.make_writable()
        assert self.buffer is not None, "there is room"
        self.buffer.narrow(self.dim, self.length, room - self.length).fill_(rest)
        return self.buffer.narrow(self.dim, 0, room)

    def behind(self, start: int) -> Tensor:
        """The places from `start` on, including those that are not in use."""
        assert self.buffer is not None, "nothing was stored yet"
        return self.buffer.narrow(self.dim, start, self.buffer.shape[self.dim] - start) if start else self.buffer

    def append(self, *new: Tensor) -> None:
        """Add places at the end, part by part; an interruption leaves no unfilled place in use."""
        counts, stop = [part.shape[self.dim] for part in new], self.length
        self.make_room(stop + sum(counts), new[0])
        assert self.buffer is not None, "there is room"
        for part, count in zip(new, counts, strict=True):
            self.buffer.narrow(self.dim, stop, count).copy_(part)
            stop += count
        self.length = stop

    def append_beside(self, *parts: Tensor) -> None:
        """Add places at the end that consist of these parts, side by side in their last dimension."""
        widths = [part.shape[-1] for part in parts]
        whole = self._add_places(parts[0].new_empty(()).expand(*parts[0].shape[:-1], sum(widths)))
        for place, part in zip(whole.split(widths, dim=-1), parts, strict=True):
            place.copy_(part)

    def _add_places(self, like: Tensor) -> Tensor:
        """Have places shaped as these at the end; they are not filled."""
        start, new = self.length, like.shape[self.dim]
        self.resize(start + new, like)
        return self.view.narrow(self.dim, start, new)

    def replace_from(self, start: int, new: Tensor, most: int | None = None) -> None:
        """Have these places from `start` on, and none after them."""
        self.resize(start + new.shape[self.dim], new, most)
        self.view.narrow(self.dim, start, new.shape[self.dim]).copy_(new)
        self.give_back()

    def remove(self, start: int, stop: int) -> None:
        """Take out places start…stop-1 and close the gap."""
        behind = self.length - stop
        if behind and stop > start:
            self.make_writable()
            moved = self.view.narrow(self.dim, stop, behind).clone()  # the two ranges may overlap
            self.view.narrow(self.dim, start, behind).copy_(moved)
        self.length -= stop - start
        self.give_back()

    def make_writable(self) -> None:
        """Take a copy where torch would refuse to change what there is."""
        if self.buffer is not None:
            self.buffer = writable(self.buffer)

    def select(self, index: Int64[Tensor, " m"]) -> None:
        """Keep only these indices of the first dimension."""
        if self.buffer is not None:
            self.buffer = self.view.index_select(0, index.to(self.buffer.device))

    def give_back(self) -> None:
        """Shrink a buffer that has more room than growing by tokens ever makes, as after a long chunk."""
        assert self.buffer is not None
        if self.buffer.shape[self.dim] > max(self.least, self.length + 2 * self._spare(self.length)):
            self.buffer = self.view.clone()

    def without_room(self) -> None:
        """Give back what `with_room` asked for."""
        self.least = 0
        if self.buffer is not None:
            self.give_back()

    def _spare(self, length: int) -> int:
        return max(self.spare, length // SPARE)


def remove(each: Sequence[Growing], start: int, stop: int) -> None:
    """`Growing.remove` of several at once."""
    buffers = [grown.buffer for grown in each if grown.buffer is not None]
    closed = False
    if len(buffers) == len(each) and all(map(is_writable, buffers)):
        closed = close_gap(buffers, [grown.dim for grown in each], [grown.length for grown in each], start, stop)
    for grown in each:
        if closed:
            grown.length -= stop - start
            grown.give_back()
        else:
            grown.remove(start, stop)


def rearrange(
    each: Sequence[Growing], start: int, index: Int64[Tensor, "l m"], new: Sequence[Tensor], most: int | None = None
) -> bool:
    """From `start` on, have only the places that `index` names; it counts places from there on, then those of `new`.

    This is done in all of `each`; False if C cannot, and then nothing has moved.
    """
    before, stop = each[0].length - start, start + index.shape[1]
    for grown, x in zip(each, new, strict=True):
        grown.make_room(max(stop, grown.length), x, most)
    if not keep_in_place(index, before, [grown.behind(start) for grown in each], new):
        return False
    for grown in each:
        grown.length = stop
        grown.give_back()
    return True


class Window:
    """Sinks and latest tokens."""

    def __init__(self, spare: int = SPARE) -> None:
        """`spare`: so many tokens come until some leave."""
        self.keys, self.values, self.ranks = (Growing(dim, spare=spare) for dim in (2, 2, 1))
        self.notes: Growing | None = None  # of the first columns: those of the others are still to come
        self.ragged = False  # whether a column may belong to some of the rows only
        # While there are empty columns, see `open`: how many are filled, as Python knows it, and the first empty one.
        self.filled: int | None = None
        self.place: Int64[Tensor, " 1"] | None = None
        self.room = 0  # the number of columns, empty ones included, when last there were any
        self.place_kept: Int64[Tensor, " 1"] | None = None  # the tensor that serves as `place` whenever there is one

    @property
    def length(self) -> int:
        """Number of columns."""
        return self.ranks.length

    @property
    def not_noted(self) -> int:
        """Number of columns about which nothing was noted yet."""
        return self.length - (0 if self.notes is None else self.notes.length)

    @property
    def width(self) -> int:
        """Numbers of a key, or of a value if those are more."""
        return max(self.keys.view.shape[3], self.values.view.shape[3])

    @property
    def columns(self) -> Columns:
        """All columns, as views."""
        notes = None if self.notes is None else self.notes.view
        return Columns(self.keys.view, self.values.view, self.ranks.view, notes)

    def tokens(self) -> WeightedTokens:
        """What attention sees."""
        held = self.ranks.view >= 0 if self.ragged else None
        return WeightedTokens(self.keys.view, self.values.view, log_mass_of(held))

    def append(self, *new: Columns) -> None:
        """Add columns at the end, part by part."""
        self.keys.append(*(part.keys for part in new))
        self.values.append(*(part.values for part in new))
        self.ranks.append(*(part.ranks for part in new))
        self.append_notes(*(part.notes for part in new))

    def open(self, count: int, most: int | None) -> None:
        """Have `count` empty columns at least, and no more than `most` columns in all, if that is known.

        `put` fills them by changing tensors, and nothing that Python knows.
        """
        self.filled = start = self.length
        self.room = roomy(start + count, self.room, most)
        for grown in self._all:
            grown.with_room(self.room, -1 if grown is self.ranks else 0)
            grown.length = self.room
        self.place = self.place_kept = written(self.place_kept, torch.full((1,), start, device=self.ranks.view.device))

    def put(self, new: Columns) -> None:
        """Fill the first empty column."""
        assert self.place is not None, "there are empty columns"
        for grown, x in zip(self._all, (new.keys, new.values, new.ranks, new.notes), strict=False):
            assert x is not None, "notes come with the tokens"
            grown.view.index_copy_(grown.dim, self.place, x)
        self.place.add_(1)

    def close(self, came: int) -> None:
        """Have no empty columns, after `came` were filled; also works if `open` was interrupted."""
        if self.filled is None:
            return
        for grown in self._all:
            grown.length = min(grown.length, self.filled + came)
            grown.give_back()
        self.filled = self.place = None

    def without_room(self) -> None:
        """Give back the room of empty columns."""
        self.room, self.place_kept = 0, None
        for grown in self._all:
            grown.without_room()

    def marks(self) -> object:
        """Where the tensors that are read lie, while there are empty columns."""
        return self.ragged, marks_of(self.place, *(grown.view for grown in self._all))

    def append_notes(self, *notes: Int64[Tensor, "b h _ t"] | None) -> None:
        """Add notes about columns that have none yet, if there are any."""
        there = [x for x in notes if x is not None]
        if there:
            self.notes = self.notes or Growing(dim=2, spare=self.keys.spare)
            self.notes.append(*there)

    @property
    def noted(self) -> Int64[Tensor, "b h n t"]:
        """Notes about all columns."""
        assert self.notes is not None, "notes are made with the tokens"
        return self.notes.view

    def to_note(self, place: slice) -> Int64[Tensor, "b h n t"]:
        """Some numbers (`place`) of the notes about all columns, to be written to."""
        assert self.notes is not None, "notes are made with the tokens"
        self.notes.make_writable()
        return self.notes.view[..., place]

    def renote(self, notes: Int64[Tensor, "b h n t"], place: slice) -> None:
        """Replace some numbers (`place`) of the notes about the first columns."""
        self.to_note(place)[:, :, : notes.shape[2]].copy_(notes)

    def remove(self, start: int, stop: int) -> None:
        """Take out columns whose tokens have left."""
        remove(self._all, start, stop)

    def take_out(self, leaving: Tensor) -> None:
        """Mark places [b, n] as not a row's any more."""
        self.ranks.make_writable()
        self.ranks.view.masked_fill_(leaving, -1)

    def crop(self, lengths: Sequence[int]) -> None:
        """Take back all but each row's first `lengths[row]` tokens, and parts of columns that an interruption left."""
        whole = min(grown.length for grown in self._all)
        for grown in self._all:
            grown.remove(whole, grown.length)
        kept = self.ranks.view < torch.tensor(lengths, device=self.ranks.view.device)[:, None]
        if self.ragged:
            self.take_out(~kept)
            self.compact()
        else:
            self.remove(int(kept[0].sum()), self.length)

    def compact(self) -> None:
        """Have no more columns than the fullest row needs, each row's tokens to the right in their order."""
        held = self.ranks.view >= 0
        width = int(held.sum(1).max()) if held.numel() else 0
        spare = self.length - width
        if spare == 0:
            return
        index = in_front(~held)[:, spare:]  # empty places first
        for grown in self._all:
            x = grown.view
            if grown.dim == 1:
                moved = x.gather(1, index)
            else:
                moved = x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
            grown.make_writable()
            grown.view.narrow(grown.dim, 0, width).copy_(moved)
            grown.remove(width, grown.length)

    def map_rows(self, rows: Int64[Tensor, " b"]) -> None:
        """Row i becomes what row `rows[i]` was."""
        for grown in self._all:
            grown.select(rows)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the state by name."""
        found = {"keys": self.keys.view, "values": self.values.view, "ranks": self.ranks.view}
        return found if self.notes is None else found | {"notes": self.notes.view}

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        return storage_bytes(grown.buffer for grown in self._all)

    @property
    def _all(self) -> tuple[Growing, ...]:
        exact = (self.keys, self.values, self.ranks)
        return exact if self.notes is None else (*exact, self.notes)


def roomy(count: int, before: int, most: int | None = None) -> int:
    """For how many places to have room, so that this number seldom changes; never for more than `most`."""
    step = max(ROOM, 1 << max(0, count.bit_length() - 6))
    room = before if count <= before <= count + MOST_IDLE * step else (count // step + 2) * step
    return room if most is None else max(count, min(room, most))


def written(before: Tensor | None, new: Tensor) -> Tensor:
    """`new`, written into `before` if the two are alike: whoever reads there finds the new numbers."""
    if before is None or (before.shape, before.dtype, before.device) != (new.shape, new.dtype, new.device):
        return new
    return writable(before).copy_(new)


def marks_of(*tensors: Tensor | None) -> object:
    """Where tensors lie, and how: as long as this is the same, whoever reads there reads the same tensors."""
    return tuple(None if x is None else (x.data_ptr(), x.shape, x.stride(), x.dtype) for x in tensors)


def is_writable(tensor: Tensor) -> bool:
    """Whether torch would let it be changed: not if it was made in inference mode and this mode has ended.

    The compiler cannot trace these questions; within compiled code the tensor is taken as it is.
    """
    return torch.compiler.is_compiling() or not tensor.is_inference() or torch.is_inference_mode_enabled()


def writable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where torch would refuse to change it."""
    return tensor if is_writable(tensor) else tensor.clone()
