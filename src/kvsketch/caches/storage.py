"""Keys and values of a changing number of tokens, in buffers with a little room to spare."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, jaxtyped
from torch import Tensor

T = TypeVar("T")
SPARE = 32  # rows allocated beyond those asked for; and one in SPARE of them, so that growing stays cheap


class Rows:
    """A tensor that grows along one dimension without being copied at every step.

    A buffer of n rows is copied once in n/32 appended rows: 32 rows a token, beside the n that
    attention reads anyway, for 3 % of idle memory.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.length = 0
        self.buffer: Tensor | None = None

    @property
    def view(self) -> Tensor:
        """The rows in use."""
        assert self.buffer is not None, "nothing was stored yet"
        return self.buffer.narrow(self.dim, 0, self.length)

    def resize(self, length: int, like: Tensor, most: int | None = None) -> None:
        """Have `length` rows shaped as those of `like`; new ones are not filled. Room is never made beyond `most`."""
        if self.buffer is None or length > self.buffer.shape[self.dim]:
            room = length + _room(length)
            shape = list(like.shape)
            shape[self.dim] = room if most is None else max(length, min(room, most))
            grown = torch.empty(shape, dtype=like.dtype, device=like.device)
            if self.length:
                grown.narrow(self.dim, 0, self.length).copy_(self.view)
            self.buffer = grown
        self.make_writable()
        self.length = length

    def adopt(self, rows: Tensor) -> None:
        """Hold these rows, which are nobody else's, without copying them."""
        self.buffer, self.length = rows.contiguous(), rows.shape[self.dim]

    def append(self, rows: Tensor) -> None:
        """Add rows at the end."""
        self._more(rows).copy_(rows)

    def append_beside(self, *parts: Tensor) -> None:
        """Add rows at the end that are made of these side by side, in their last dimension."""
        widths = [part.shape[-1] for part in parts]
        whole = self._more(parts[0].new_empty(()).expand(*parts[0].shape[:-1], sum(widths)))
        for place, part in zip(whole.split(widths, dim=-1), parts, strict=True):
            place.copy_(part)

    def _more(self, like: Tensor) -> Tensor:
        """Have rows shaped as these at the end; they are not filled."""
        start, new = self.length, like.shape[self.dim]
        self.resize(start + new, like)
        return self.view.narrow(self.dim, start, new)

    def remove(self, start: int, stop: int) -> None:
        """Take out rows start…stop-1 and close the gap."""
        behind = self.length - stop
        if behind and stop > start:
            self.make_writable()
            moved = self.view.narrow(self.dim, stop, behind).clone()  # the two ranges may overlap
            self.view.narrow(self.dim, start, behind).copy_(moved)
        self.length -= stop - start
        self._give_back()

    def make_writable(self) -> None:
        """Take a copy where torch would refuse to change what there is."""
        if self.buffer is not None:
            self.buffer = writable(self.buffer)

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace the rows in use by a function of them."""
        if self.buffer is not None:
            self.buffer = function(self.view).contiguous()

    def _give_back(self) -> None:
        """Shrink a buffer that has more room than growing by tokens ever makes, as after a long chunk."""
        assert self.buffer is not None
        if self.buffer.shape[self.dim] > self.length + 2 * _room(self.length):
            self.buffer = self.view.clone()


def _room(length: int) -> int:
    return max(SPARE, length // SPARE)


@dataclass
class Slots:
    """Tensors [b, h, slots, …] of the dataclass that derives from this, which can have more slots."""

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def resize(self, wanted: dict[str, int]) -> None:
        """Have so many slots at least, to be written to; new ones are 0."""
        for name, tensor in self.tensors().items():
            more = wanted[name] - tensor.shape[2] if name in wanted else 0
            wide = F.pad(tensor, (0, 0) * (tensor.ndim - 3) + (0, more)) if more > 0 else tensor
            setattr(self, name, writable(wide))


def writable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it was made in inference mode and that is over: torch would refuse to change it.

    The compiler can trace none of these questions; within compiled code the tensor is taken as it is.
    """
    if torch.compiler.is_compiling() or not tensor.is_inference() or torch.is_inference_mode_enabled():
        return tensor
    return tensor.clone()


def columns(x: Tensor, index: Tensor) -> Tensor:
    """Columns of `x` [b, h, n, d] with the numbers of `index` [b, m], row by row."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def in_front(there: Bool[Tensor, "*lanes n"]) -> Int64[Tensor, "*lanes n"]:
    """Numbers of the places that hold something, in their order, and then of those that do not."""
    return (~there).long().sort(dim=-1, stable=True).indices


def chosen(x: Tensor, index: Tensor) -> Tensor:
    """Columns of `x` [b, h, n, d] with the numbers of `index` [b, h, m], head by head."""
    lanes = torch.arange(x.shape[0] * x.shape[1], device=x.device)[:, None]
    found = x.flatten(0, 1)[lanes, index.flatten(0, 1)]  # copies whole rows, which `gather` does number by number
    return found.view(*index.shape, x.shape[3])


@dataclass(frozen=True)
class KeyValues:
    """Tokens side by side."""

    keys: Float[Tensor, "b h n d"]
    values: Float[Tensor, "b h n e"]

    @property
    def count(self) -> int:
        """Tokens of each row and head."""
        return self.keys.shape[2]

    def part(self, start: int, stop: int) -> "KeyValues":
        """Tokens start…stop-1."""
        return KeyValues(self.keys[:, :, start:stop], self.values[:, :, start:stop])

    def choose(self, index: Int64[Tensor, "b h m"]) -> "KeyValues":
        """Those with these numbers, head by head."""
        return KeyValues(chosen(self.keys, index), chosen(self.values, index))


def side_by_side(parts: Sequence[KeyValues]) -> KeyValues:
    """All tokens, in this order."""
    return KeyValues(torch.cat([part.keys for part in parts], 2), torch.cat([part.values for part in parts], 2))


def made_of(kind: type[T], tensors: dict[str, Tensor]) -> T:
    """A dataclass of tensors, if these are the ones that its annotations ask for: kinds, and sizes that agree."""
    allowed = {field.name: get_args(field.type) or (field.type,) for field in fields(kind)}  # type: ignore[arg-type]
    given: dict[str, Any] = {name: tensors.get(name) for name in allowed}
    with jaxtyped("context"):  # a letter is one number throughout
        right = all(any(isinstance(given[name], one) for one in allowed[name]) for name in allowed)
    if not right or not tensors.keys() <= allowed.keys():
        shapes = {name: (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in tensors.items()}
        raise ValueError(f"{kind.__name__} of {shapes!s:.150}")
    return kind(**given)


def check_groups(groups: list[int], rows: int, least: int) -> int:
    """How many groups there are, numbered without a gap; -1, where `least` allows it, is none of them."""
    numbers = {number for number in groups if number >= 0}
    if len(groups) != rows or numbers != set(range(len(numbers))) or min(groups, default=0) < least:
        raise ValueError(f"{rows} rows in groups {groups!s:.60}")
    return len(numbers)


def with_prefix(named: dict[str, T], prefix: str) -> dict[str, T]:
    """Those whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of memory that the tensors pin, each allocation once: a view of a large one counts as the large one."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())
