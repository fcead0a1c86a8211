"""What is asked of the tokens that are held, and what they answer."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.attention import Partial
from kvsketch.kernels.sources import Source


@dataclass(frozen=True)
class Query:
    """Queries of a call: as attention takes them, and before rotation where the method asks for that.

    `in_full`: the answer is over everything that is held, even if the method would look at a part of it. `apart`: the
    estimate must be told apart from what was read (if not, a single query may read both at once).
    """

    queries: Float[Tensor, "b hg q d"]
    scale: float
    softcap: float | None = None
    unrotated: Float[Tensor, "b hg q d"] | None = None
    ranks: Int64[Tensor, "b q"] | None = None  # how many tokens of its row came before; -1: padding
    in_full: bool = False
    apart: bool = True
    sinks: Float[Tensor, " s"] | None = None  # learned ones: logits that are in every denominator
    padded: bool = True  # whether padding may be among the queries

    @property
    def ranks_in_row(self) -> Int64[Tensor, "b q"]:
        """The ranks of a layer's queries, which always come with them."""
        assert self.ranks is not None, "queries come with their ranks"
        return self.ranks

    def over_all(self, lse: Float[Tensor, "b hg q"]) -> Float[Tensor, "b hg q"]:
        """The logs of denominators once learned sinks are added to these."""
        return lse if self.sinks is None else torch.logaddexp(lse, self.sinks.float()[None, :, None])

    def part(self, start: int, stop: int) -> "Query":
        """Queries start…stop-1."""
        unrotated = None if self.unrotated is None else self.unrotated[:, :, start:stop]
        ranks = None if self.ranks is None else self.ranks[:, start:stop]
        return replace(self, queries=self.queries[:, :, start:stop], unrotated=unrotated, ranks=ranks)

    def copied(self) -> "Query":
        """The same queries as copies, so that none is a view of a larger tensor or a part of an autograd graph."""
        queries = self.queries.detach().clone()
        unrotated, ranks = (None if x is None else x.detach().clone() for x in (self.unrotated, self.ranks))
        return replace(self, queries=queries, unrotated=unrotated, ranks=ranks)


@dataclass(frozen=True)
class Answer:
    """Attention over the tokens that were read, an estimate of the others' if there is one, and how many were read.

    `read` is None if queries read everything, `attended` if there was nothing to read. `unread` is still to be read,
    together with what else the query sees: see `answers.complete`.
    """

    attended: Partial | None
    estimated: Partial | None = None
    read: Int64[Tensor, "b h q"] | None = None
    unread: tuple[Source, ...] = ()
