"""Expected Attention (Devoto et al. 2025, arXiv:2510.00636): what queries like those so far would look at."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.caches.core.budget import MOST, Budget
from kvsketch.caches.core.checks import check_count, check_number
from kvsketch.caches.core.chooser import Chooser, Held, Pool
from kvsketch.caches.core.tokens import Arriving, Seen
from kvsketch.caches.forgetting.scored import Best, ScoredConfig
from kvsketch.kernels.directions import lengths

AT_ONCE = 1 << 22  # numbers of float64 worked on together: 32 MiB
BYTES = 8  # of a number in notes


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(ScoredConfig):
    """Keeps sinks, window and the tokens that the next queries are expected to look at, by the queries so far.

    Queries before rotation are taken to be normal, with the mean and the covariance of those so far, and to be rotated
    as the next `ahead` positions are on average. Then the weight of a key, exp⟨q, k⟩, has a mean in closed form.
    Its share of all such means, plus `epsilon`, times the value's norm is the score; the share is a mean over the query
    heads of a group.
    """

    name: ClassVar[str] = "expected_attention"
    before_rotation: ClassVar[bool] = True
    looks_ahead: ClassVar[bool] = True
    window_may_be_part: ClassVar[bool] = False  # it holds the window's queries too, whose room must be known

    ahead: int = 512
    epsilon: float | int = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("ahead", self.ahead, least=1, most=1 << 20)
        if self.epsilon != 0 or isinstance(self.epsilon, bool):
            check_number("epsilon", self.epsilon, above=0)

    def new_method(self, layer: int) -> Chooser:
        return MostExpected(self)


class MostExpected(Best):
    """Goes by the mean and the covariance, for every query head, of the queries of tokens that have left the window."""

    bits: ClassVar[int] = 16
    takes_notes = True
    notes_at_once = True

    def __init__(self, config: ExpectedAttention) -> None:
        super().__init__(config)
        self.ahead, self.epsilon = config.ahead, float(config.epsilon)
        self.turned: Callable[[int, int], Tensor] | None = None  # how tokens after the latest ones will be rotated
        self.per_lane = {**self.per_lane, "mean": torch.float32, "covariance": torch.float32}

    # -- queries travel with their tokens, and are counted when the tokens leave the window

    def note(self, seen: Seen) -> Int64[Tensor, "b h n t"]:
        if seen.queries is None:
            raise ValueError(
                f"{self.config.name} goes by queries as they are before rotation, and nobody noted those here: have a "
                "cache of this method read the text itself, in a model"
            )
        self.turned = None if seen.ahead is None else seen.ahead.mean
        heads = seen.keys.shape[1]
        queries = seen.queries.to(seen.keys.dtype).unflatten(1, (heads, -1)).transpose(2, 3).flatten(3)
        short = -queries.shape[3] % (BYTES // queries.element_size())
        packed = F.pad(queries, (0, short)).contiguous().view(torch.int64)
        positions = torch.zeros_like(seen.ranks) if seen.ahead is None else seen.ahead.positions.clamp_min(0)
        return torch.cat([packed, positions[:, None, :, None].expand(-1, heads, -1, -1)], 3)

    def check_notes(self, notes: Int64[Tensor, "... n t"]) -> None:
        positions = notes[..., -1]
        if notes.ndim != 4 or notes.shape[3] < 2 or bool(((positions < 0) | (positions > MOST)).any()):
            raise ValueError(f"notes of shape {tuple(notes.shape)} that are no queries and positions")

    def lanes_after(self, held: Held, new: Arriving) -> dict[str, Tensor]:
        part = new.count / new.after
        mean, covariance = _mean_and_covariance(new)
        if new.before:
            before = held.per_lane["mean"].double()
            apart = mean - before
            mean = before + part * apart
            covariance = (1 - part) * unpacked(held.per_lane["covariance"], mean) + part * covariance
            covariance = covariance + part * (1 - part) * apart[..., None] * apart[..., None, :]
        row, column = torch.triu_indices(*covariance.shape[-2:], device=mean.device)
        return {"mean": mean.float(), "covariance": covariance[..., row, column].float()}

    def beside(self, new: Arriving) -> int:
        """Mean and covariance, whose numbers may be twice as wide, and the window's queries: dozens, or hundreds."""
        width, group = new.keys.shape[2], _group(new)
        numbers = 2 * group * (width + width * (width + 1) // 2)
        numbers += (self.config.least_window + self.config.leaving) * group * width
        return math.ceil(numbers / (width + new.values.shape[2]))

    # -- scores

    def scores(self, pool: Pool, per_lane: dict[str, Tensor], new: Arriving) -> Float[Tensor, "l n"]:
        assert new.notes is not None, "tokens come with notes"
        turned = self._mean_rotation(new.notes[:, -1, -1] + 1 + self.config.least_window, new.keys)
        mean = per_lane["mean"].double() @ turned
        covariance = unpacked(per_lane["covariance"], mean)
        covariance = turned[:, None].mT @ covariance @ turned[:, None]
        weights = expected_logs(pool.keys, mean, covariance).softmax(2).mean(1)
        return (weights + self.epsilon) * lengths(pool.values)

    def _mean_rotation(self, first: Int64[Tensor, " l"], keys: Float[Tensor, "l n d"]) -> Float[Tensor, "l d d"]:
        """The mean rotation of the positions from `first` on, which differs where rows began at different positions."""
        if self.turned is None:
            return torch.eye(keys.shape[2], dtype=torch.float64, device=keys.device).expand(len(first), -1, -1)
        known = {place: self.turned(place, self.ahead).double() for place in dict.fromkeys(first.tolist())}
        return torch.stack([known[place] for place in first.tolist()]).to(keys.device)

    def check(self, held: Held, count: int, budget: Budget) -> None:
        super().check(held, count, budget)
        mean, covariance, width = held.per_lane["mean"], held.per_lane["covariance"], held.keys.shape[2]
        shaped = mean.shape[2:] == (width,) and covariance.shape == (*mean.shape[:2], width * (width + 1) // 2)
        if not shaped or not bool(mean.isfinite().all() and covariance.isfinite().all()):
            raise ValueError(f"queries with a mean {tuple(mean.shape)} and a covariance {tuple(covariance.shape)}")


def expected_logs(
    keys: Float[Tensor, "l n d"], mean: Float[Tensor, "l g d"], covariance: Float[Tensor, "l g d d"]
) -> Float[Tensor, "l g n"]:
    """The log of the mean of exp(⟨q, k⟩/√d) over normal queries."""
    scale, parts = keys.shape[2] ** -0.5, list[Tensor]()
    for part in keys.split(max(1, AT_ONCE // max(1, mean.numel())), 1):
        own = part.double()[:, None]
        spread = ((own @ covariance) * own).sum(3)
        parts.append(scale * (own @ mean[..., None])[..., 0] + scale**2 / 2 * spread)
    return torch.cat(parts, 2)


def unpacked(covariance: Float[Tensor, "l g c"], like: Float[Tensor, "l g d"]) -> Float[Tensor, "l g d d"]:
    """A covariance from its upper half."""
    width = like.shape[2]
    row, column = torch.triu_indices(width, width, device=like.device)
    whole = torch.zeros(*covariance.shape[:2], width, width, dtype=torch.float64, device=like.device)
    whole[..., row, column] = covariance.double()
    whole[..., column, row] = covariance.double()
    return whole


def _group(new: Arriving) -> int:
    """Query heads of a KV head."""
    assert new.notes is not None, "tokens come with notes"
    return (new.notes.shape[2] - 1) * BYTES // new.keys.element_size() // new.keys.shape[2]


def _mean_and_covariance(new: Arriving) -> tuple[Float[Tensor, "l g d"], Float[Tensor, "l g d d"]]:
    """Mean and covariance of the queries of tokens that leave the window together."""
    assert new.notes is not None, "tokens come with notes"
    group, width = _group(new), new.keys.shape[2]

    def queries(part: Tensor) -> Tensor:
        numbers = part[..., :-1].contiguous().view(new.keys.dtype)[..., : group * width]
        return numbers.unflatten(2, (group, width)).transpose(1, 2).double()

    strips = new.notes.split(max(1, AT_ONCE // (len(new.keys) * group * width)), 1)
    mean = sum((queries(part).sum(2) for part in strips), torch.zeros((), device=new.keys.device)) / new.count
    covariance = torch.zeros(*mean.shape, width, dtype=torch.float64, device=mean.device)
    for part in strips:
        apart = queries(part) - mean[:, :, None]
        covariance += apart.mT @ apart
    return mean, covariance / new.count
