"""Methods that keep the tokens to which queries gave most of their attention.

That attention was noted while queries were answered (`caches/core/asking.py`), and comes with a token when the token
leaves the window: such a score stays what it was, and scores of different origin do not compete.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.caches.core.asking import CONTEXT, QUESTIONS, SECOND, WINDOW, Asking
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.checks import check_choice, check_count
from kvsketch.caches.core.chooser import Held, Kept, Pool
from kvsketch.caches.core.method import Holding
from kvsketch.caches.core.tokens import Arriving
from kvsketch.caches.forgetting.residual import tokens_kept
from kvsketch.caches.forgetting.scored import Best, ScoredConfig

OBSERVED = 32  # how many of a call's queries are asked, if it is the last ones


@dataclass(frozen=True, kw_only=True)
class NotedConfig(ScoredConfig):
    """A method that goes by the attention that queries gave to tokens."""

    comparable: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class QueriesConfig(NotedConfig):
    """Such a method with an option that says which queries are asked, apart from what it makes of their attention."""

    noted: ClassVar[str]  # what is noted of all weights that a token gets

    queries: str = WINDOW
    observed: int = OBSERVED
    pooled: int = 5  # tokens whose scores are averaged, where neighbours count

    def __post_init__(self) -> None:
        check_choice("queries", self.queries, (WINDOW, CONTEXT, SECOND, QUESTIONS))
        check_count("observed", self.observed, least=1)
        check_count("pooled", self.pooled, least=1)
        if self.pooled % 2 == 0:
            raise ValueError(f"pooled must be odd, a token and as many on each side, got {self.pooled}")
        if self.queries != WINDOW and self.observed != OBSERVED:
            raise ValueError(
                f"observed={self.observed} says how many of the last queries are asked, and queries={self.queries!r} "
                f"asks others: leave it out, or say queries={WINDOW!r}"
            )
        super().__post_init__()

    @property
    def asking(self) -> Asking:
        return Asking(self.queries, self.noted, self.observed if self.queries == WINDOW else 0)

    @property
    def holds_back(self) -> bool:
        return self.asking.behind or super().holds_back


class Part(NamedTuple):
    """Tokens whose scores are compared with each other."""

    came: int
    there: int  # how many of them are entries now
    closed: bool  # whether no later token joins


class ByAttention(Best):
    """A choice by the attention that tokens got: as noted when they leave the window, and then held in `column`."""

    bits: ClassVar[int] = 16
    column: ClassVar[str]  # its name in `per_entry`
    precision: ClassVar[torch.dtype] = torch.float32

    def __init__(self, config: NotedConfig) -> None:
        super().__init__(config)
        assert config.asking is not None, "somebody has to be asked"
        self.asking: Asking = config.asking
        self.per_entry = {**self.per_entry, self.column: self.precision}

    def arriving(self, notes: Int64[Tensor, "*l n t"]) -> Float[Tensor, "*l n"]:
        """The scores of tokens that leave the window together."""
        return self.asking.score(notes)

    def scores(self, pool: Pool, per_lane: dict[str, Tensor], new: Arriving) -> Float[Tensor, "l n"]:
        return pool.per_entry[self.column].double()

    def write(self, holdings: Sequence[tuple[Holding, Arriving]]) -> None:
        if len({new.count for _, new in holdings}) == 1 and len(holdings) > 1:  # scores of all lanes in one go
            notes = [new.notes for _, new in holdings if new.notes is not None]
            each = self.arriving(torch.cat(notes)).split([len(own) for own in notes])
            pairs = zip(holdings, each, strict=True)
            holdings = [(holding, replace(new, scores=own)) for (holding, new), own in pairs]
        super().write(holdings)

    def about_new(self, new: Arriving) -> dict[str, Tensor]:
        assert new.notes is not None, "tokens come with notes"
        scores = self.arriving(new.notes) if new.scores is None else new.scores
        return {**super().about_new(new), self.column: scores}

    def check(self, held: Held, count: int, budget: Budget) -> None:
        super().check(held, count, budget)
        score = held.per_entry[self.column]
        if not bool((score.isfinite() & (score >= 0)).all()):
            raise ValueError("scores that are negative or not finite")


class Noted(ByAttention):
    """A choice by the score with which a token came.

    A prompt, or any call of a few hundred tokens, is a part of its own, and so are the tokens that come between such
    calls. The parts share the room in proportion to their lengths; what earlier parts do not use, the last one gets.
    """

    column = "score"
    shared = ("parts",)

    def parts(self, held: Held, new: Arriving, budget: Budget) -> list[Part]:
        """What there is to choose from, part by part."""
        parts = [Part(*part) for part in held.numbers.get("parts", [])]
        window = self.config.seen_when(budget, new.after) - new.after - self.config.sinks
        long = new.count > window and not new.few
        closed = long or (not new.before and new.count > self.config.leaving)
        if parts and not closed and not parts[-1].closed:
            last = parts.pop()
            return [*parts, Part(last.came + new.count, last.there + new.count, False)]
        return [*parts, Part(new.count, new.count, closed)]

    def choose(self, held: Held, new: Arriving, budget: Budget) -> Kept:
        parts, room = self.parts(held, new, budget), self.room(held, new, budget)[0]
        rooms = [min(part.there, room * part.came // new.after) for part in parts[:-1]]
        rooms.append(room - sum(rooms))
        there = [part.there for part in parts]
        now = [[part.came, min(part.there, own), part.closed] for part, own in zip(parts, rooms, strict=True)]
        return self.best_of(held, new, budget, list(zip(there, rooms, strict=True)), {"parts": now})

    def check(self, held: Held, count: int, budget: Budget) -> None:
        super().check(held, count, budget)
        parts: Any = held.numbers["parts"]
        right = isinstance(parts, list) and all(
            isinstance(part, list) and [type(x) for x in part] == [int, int, bool] and 0 <= part[1] <= part[0]
            for part in parts
        )
        tokens = tokens_kept(held)
        if not right or sum(part[0] for part in parts) != count or sum(part[1] for part in parts) != tokens:
            raise ValueError(f"parts {parts!s:.60} of {count} tokens and {held.count} entries")


class Pooled(Noted):
    """A method in which the neighbours of a token count too."""

    def __init__(self, config: QueriesConfig) -> None:
        super().__init__(config)
        self.pooled = config.pooled

    def averaged(self, scores: Float[Tensor, "*l n"], *, zeros: bool) -> Float[Tensor, "*l n"]:
        """Each score averaged with its neighbours', of tokens that leave together; beyond them are zeros, or none."""
        if not scores.shape[-1]:
            return scores
        return F.avg_pool1d(scores, self.pooled, stride=1, padding=self.pooled // 2, count_include_pad=zeros)
