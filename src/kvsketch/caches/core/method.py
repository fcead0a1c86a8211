"""What the core knows of a method: what it notes about tokens, what it holds of them, and how that answers queries.

A method that forgets is a `Chooser` (`chooser.py`) and implements none of this; one that looks tokens up is a labeller
and a router (`lookup/store.py`). Only a method whose answers are not attention over weighted tokens has a `Holding` of
its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.attention import WeightedTokens
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.storage import storage_bytes
from kvsketch.caches.core.tokens import Arriving, Seen
from kvsketch.kernels.native.weights import Noting
from kvsketch.kernels.sources import Classifier


class Holding(ABC):
    """What a bundle of lanes holds: all of them have the same budget, and got the same number of tokens in every call.

    Lanes are the first dimension of tensors. Queries come as those of one row whose KV heads are the lanes.
    """

    weighted: WeightedTokens | None = None  # entries, as those of one row; if set, attention over them is the answer

    @property
    def read_from(self) -> object:
        """What single queries read: another object as soon as it changes or lies elsewhere."""
        return self.weighted

    @property
    def wants_asking(self) -> bool:
        """Whether the answer depends on what the method makes of the queries."""
        return False

    @abstractmethod
    def write(self, new: Arriving) -> None:
        """Take tokens; the method decides what remains of them."""

    def answer(self, query: Query, asked: Tensor | None) -> Answer:
        """The answer from what is held, if not all is `weighted`; `asked` is what the method made of the queries."""
        return Answer(None)

    def observe(self, query: Query, read: Int64[Tensor, "1 l q"] | None, lse: Float[Tensor, "1 lg q"] | None) -> None:  # noqa: B027
        """Take note of queries that were answered: what they read, and the log of their denominators over everything.

        For methods that ask for it (`Method.observes`).
        """

    def noting(self) -> Sequence[Noting] | None:
        """Where a kernel is to note the attention that entries get from a single query, as `observe` would.

        None: `observe` itself is called.
        """
        return None

    @abstractmethod
    def count_entries(self) -> int | Int64[Tensor, " l"]:
        """Entries that each lane holds."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the state by name, the lanes as their first dimension, or 1 for something all lanes share."""

    def numbers(self) -> dict[str, Any]:
        """All other state, as JSON: the same for all lanes."""
        return {}

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any], count: int) -> None:
        """Restore what `tensors` and `numbers` gave when `count` tokens had come to each lane; refuse anything else."""

    def select(self, lanes: Int64[Tensor, " l"], count: int) -> None:
        """Keep only these lanes, some of them perhaps several times."""
        tensors = self.tensors()
        one_lane = all(len(x) == 1 for x in tensors.values())  # then sizes do not tell what lanes share
        chosen = {name: x[lanes.to(x.device)] if one_lane or len(x) > 1 else x.clone() for name, x in tensors.items()}
        self.restore(chosen, self.numbers(), count)

    def open(self, *, anew: bool) -> None:  # noqa: B027 (what is not read from the same place has nothing to do)
        """Prepare to be read by recorded steps: what they read stays in place as long as possible.

        `anew`: steps will be recorded anew in any case, so room for more may be made.
        """

    def close(self) -> None:  # noqa: B027
        """Be as before `open`; nothing was written in between."""

    def without_room(self) -> None:  # noqa: B027
        """Give back the room that only recorded steps need."""

    def marks(self) -> object:
        """Where the tensors that a step reads lie, once this is open; while that is the same, recorded steps go on."""
        return object()  # it may be elsewhere

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        return storage_bytes(self.tensors().values())

    def share_read(self) -> Float[Tensor, " l"] | None:
        """The share of what is held that queries read, over all queries that looked up; None if none did."""
        return None

    def details(self, count: int) -> dict[str, float]:
        """What else a report should show, by name: means over lanes, each of which got `count` tokens."""
        return {}

    def warning(self) -> str | None:
        """What a user must know about these tokens and this method, in a sentence."""
        return None


class Method(ABC):
    """A method in one layer."""

    observes: frozenset[str] = frozenset()  # of "queries", "read" and "mass": what holdings want to be told
    looks_up = False  # whether a query may read only a part of what is held
    takes_notes = False  # whether something is noted about tokens when they come
    has_router = False  # whether a classifier alone decides which part of what is held a query reads
    first_head = 0  # the number, in the whole model, of the first KV head that is here
    notes_at_once = False  # whether tokens that come one by one are noted as they come, and not a block at a time

    @abstractmethod
    def new_holding(self, budget: Budget) -> Holding:
        """An empty holding, for lanes with this budget."""

    def write(self, holdings: Sequence[tuple[Holding, Arriving]]) -> None:
        """Give the holdings of all bundles what arrives there."""
        for holding, new in holdings:
            holding.write(new)

    def note(self, seen: Seen) -> Int64[Tensor, "b h n t"] | None:
        """What to note about tokens when they come; it comes back with them when they leave the window."""
        return None

    def check_notes(self, notes: Int64[Tensor, "... n t"]) -> None:  # noqa: B027 (most know of none that is wrong)
        """Refuse what `note` cannot have given."""

    def ask(self, query: Query, heads: int) -> Float[Tensor, "b h q ..."] | Int64[Tensor, "b h q ..."] | None:
        """What the queries of each group look for, before it is known what lanes hold; `heads` are KV heads."""
        return None

    def router(self, query: Float[Tensor, "b hg q d"], heads: int) -> Classifier | None:
        """The classifier that `ask` uses, if that is one of queries before rotation."""
        return None
