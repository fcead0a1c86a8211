"""What a method is to the core: what it notes about tokens, what it holds of them, and what that answers.

A method that forgets is a `Chooser` (`chooser.py`) and writes none of this; one that looks things up is a labeller and
a router (`lookup/store.py`). Only a method whose answers are not attention over weighted tokens has a `Holding` of its
own.
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
    """What a bundle of lanes holds: all of them have the same budget, and got the same tokens in the same calls.

    Lanes come as the first dimension of tensors. Queries come as those of one row whose KV heads are the lanes.
    """

    weighted: WeightedTokens | None = None  # entries, as those of one row: then attention over them is the answer

    @property
    def read_from(self) -> object:
        """What single queries read: another object once it is another, or lies elsewhere."""
        return self.weighted

    @property
    def wants_asking(self) -> bool:
        """Whether the answer depends on what the method makes of the queries."""
        return False

    @abstractmethod
    def write(self, new: Arriving) -> None:
        """Take tokens; the method decides what remains of them."""

    def answer(self, query: Query, asked: Tensor | None) -> Answer:
        """What is held answers, where that is not all `weighted`; `asked` is what the method made of the queries."""
        return Answer(None)

    def observe(self, query: Query, read: Int64[Tensor, "1 l q"] | None, lse: Float[Tensor, "1 lg q"] | None) -> None:  # noqa: B027
        """Take note of queries that were answered: what they read, and the log of their denominators over everything.

        For methods that ask for it (`Method.observes`).
        """

    def noting(self) -> Sequence[Noting] | None:
        """Where a kernel is to note what entries get of a single query's attention, as `observe` would.

        None where that is asked itself.
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
        """Take back what `tensors` and `numbers` gave when `count` tokens had come to each lane; refuse others."""

    def select(self, lanes: Int64[Tensor, " l"], count: int) -> None:
        """Have these lanes alone, some of them perhaps several times."""
        tensors = self.tensors()
        one_lane = all(len(x) == 1 for x in tensors.values())  # nothing says then what is shared
        chosen = {name: x[lanes.to(x.device)] if one_lane or len(x) > 1 else x.clone() for name, x in tensors.items()}
        self.restore(chosen, self.numbers(), count)

    def open(self, *, anew: bool) -> None:  # noqa: B027 (what is not read from the same place has nothing to do)
        """Begin to be read by steps that are recorded: what they read stays in its place as long as that can be.

        `anew`: steps will be recorded anew in any case, so that there may be room for more.
        """

    def close(self) -> None:  # noqa: B027
        """Be as before `open`, after which nothing was written."""

    def without_room(self) -> None:  # noqa: B027
        """Give back what was only there for steps that are recorded."""

    def marks(self) -> object:
        """Where what a step reads lies, once this is open. Steps that were recorded go on where it is the same."""
        return object()  # it may be elsewhere

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        return storage_bytes(self.tensors().values())

    def share_read(self) -> Float[Tensor, " l"] | None:
        """The share of what is held that queries read, over all that looked up; None if none did."""
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
    looks_up = False  # whether a query may read a part of what is held
    takes_notes = False  # whether something is noted about tokens when they come
    has_router = False  # whether a classifier alone says which of what is held a query reads
    first_head = 0  # the number, in the whole model, of the first KV head that is here
    notes_at_once = False  # of tokens that come one by one: about each as it comes, or about a block of them together

    @abstractmethod
    def new_holding(self, budget: Budget) -> Holding:
        """An empty holding, for lanes that may hold so much."""

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
        """What `ask` asks, where that is a classifier of queries before rotation."""
        return None
