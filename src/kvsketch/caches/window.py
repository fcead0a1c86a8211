"""The tokens that a layer holds exactly: its sinks and its latest ones, one column per token.

Rows of unequal lengths meet in one buffer, so a column may be one row's and not another's: its rank
is -1 where it is not. The log weight of such a place is `-inf`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.attention import NO_MASS, WeightedTokens
from kvsketch.caches.storage import Rows, storage_bytes


@dataclass(frozen=True)
class Columns:
    """Tokens side by side, with their ranks: how many tokens of their row came before them."""

    keys: Float[Tensor, "b h n d"]
    values: Float[Tensor, "b h n e"]
    ranks: Int64[Tensor, "b n"]

    def part(self, start: int, stop: int) -> "Columns":
        """Columns start…stop-1."""
        return Columns(self.keys[:, :, start:stop], self.values[:, :, start:stop], self.ranks[:, start:stop])

    def select(self, index: Tensor) -> "Columns":
        """The columns with these numbers."""
        return Columns(
            self.keys.index_select(2, index), self.values.index_select(2, index), self.ranks.index_select(1, index)
        )


class Window:
    """Sinks and latest tokens, in the order in which they came."""

    def __init__(self) -> None:
        self.keys, self.values, self.ranks = Rows(dim=2), Rows(dim=2), Rows(dim=1)
        self.ragged = False  # whether there may be columns that are not all rows' own
        self.tail = 0  # columns at the end none of whose tokens has left: what `crop` can take

    @property
    def length(self) -> int:
        """Number of columns."""
        return self.ranks.length

    @property
    def columns(self) -> Columns:
        """All columns, as views."""
        return Columns(self.keys.view, self.values.view, self.ranks.view)

    def tokens(self) -> WeightedTokens:
        """What attention sees."""
        held = self.ranks.view >= 0 if self.ragged else None
        return WeightedTokens(self.keys.view, self.values.view, log_mass_of(held))

    def append(self, new: Columns) -> None:
        """Add columns at the end."""
        self.keys.append(new.keys)
        self.values.append(new.values)
        self.ranks.append(new.ranks)
        self.tail += new.ranks.shape[1]

    def remove(self, start: int, stop: int) -> None:
        """Take out columns whose tokens have left."""
        for rows in self._all:
            rows.remove(start, stop)
        self.tail = min(self.tail, self.length - start)

    def crop(self, count: int) -> list[int]:
        """Take back the last columns; how many tokens of each row that was."""
        dropped: list[int] = (self.ranks.view[:, self.length - count :] >= 0).sum(1).tolist()
        for rows in self._all:
            rows.remove(rows.length - count, rows.length)
        self.tail -= count
        return dropped

    def compact(self) -> None:
        """Have no more columns than the fullest row needs, each row's tokens to the right in their order."""
        held = self.ranks.view >= 0
        # The last columns that are all rows' own stay in place, so that `crop` can take them.
        self.tail = min(self.tail, int(held.all(0).flip(0).cumprod(0).sum()))
        old = held[:, : self.length - self.tail]
        width = int(old.sum(1).max()) if old.numel() else 0
        spare = old.shape[1] - width
        if spare == 0:
            return
        index = old.long().sort(dim=1, stable=True).indices[:, spare:]  # empty places first
        for rows in self._all:
            front = rows.view.narrow(rows.dim, 0, old.shape[1])
            where = index if rows.dim == 1 else index[:, None, :, None].expand(-1, front.shape[1], -1, front.shape[3])
            moved = front.gather(rows.dim, where)
            rows.remove(0, spare)
            rows.view.narrow(rows.dim, 0, width).copy_(moved)

    def map_rows(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `move` of it."""
        for rows in self._all:
            rows.map(move)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the state by name."""
        return {"keys": self.keys.view, "values": self.values.view, "ranks": self.ranks.view}

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        return storage_bytes(rows.buffer for rows in self._all)

    @property
    def _all(self) -> tuple[Rows, Rows, Rows]:
        return self.keys, self.values, self.ranks


def log_mass_of(held: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b 1 n"] | None:
    """Log weights of places that a row holds: 0 where it does, `-inf` where not."""
    if held is None:
        return None
    return torch.zeros(held.shape, device=held.device).masked_fill(~held, NO_MASS)[:, None]
