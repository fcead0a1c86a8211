"""What is left of dropped tokens: a few weighted entries, each the mean of a run of neighbours (`residual=`).

    dropped so far   ·· · ··· ·  ···· ·· ·      in the order of their positions
    runs             └────┘└───┘ └──┘└──┘└┘     each time, the two neighbours with the fewest tokens together are joined
    entries          mean key, mean value, and for how many tokens it stands

Keys are rotated: those of tokens far from each other do not add up, and their mean is shorter than they are. So the
tokens of a run follow one another in the text. Where a run begins and ends depends on counts alone, not on rounding.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64
from torch import Tensor

from kvsketch.caches.core.budget import MOST
from kvsketch.caches.core.chooser import Held, Pool
from kvsketch.kernels.places import chosen

FIRST = "first"  # the rank of an entry's first token
TOKENS = "tokens"  # how many tokens each mean is of, lane by lane: the last entries are means
AT_ONCE = 1 << 22  # numbers of float64 worked on together: 32 MiB


@dataclass(frozen=True)
class Means:
    """Runs of tokens, as their means, in any order; a token by itself is a run of one."""

    keys: Float[Tensor, "l n d"]
    values: Float[Tensor, "l n e"]
    tokens: Float[Tensor, "l n"]  # of each run
    first: Int[Tensor, "l n"]  # the rank of its first token

    @property
    def count(self) -> int:
        """Runs of each lane."""
        return self.keys.shape[1]

    def at(self, index: Int64[Tensor, "l m"]) -> "Means":
        """The runs with these numbers."""
        return Means(*(chosen(x, index) for x in (self.keys, self.values, self.tokens, self.first)))

    def beside(self, others: "Means") -> "Means":
        """These runs and others."""
        return Means(
            torch.cat([self.keys, others.keys], 1),
            torch.cat([self.values, others.values], 1),
            torch.cat([self.tokens, others.tokens], 1),
            torch.cat([self.first, others.first], 1),
        )


def joined(means: Means, room: int) -> Means:
    """At most as many runs as there is room for: while there are more, the two neighbours with fewest tokens join.

    They come out in the order of the text.
    """
    means = means.at(means.first.argsort(dim=1))
    if means.count <= room:
        return means
    run = numbered_runs(means.tokens.long(), room)
    members = torch.zeros_like(run[:, :room]).scatter_add_(1, run, torch.ones_like(run))
    tokens = torch.zeros_like(means.tokens[:, :room]).scatter_add_(1, run, means.tokens)
    starts = members.cumsum(1) - members
    keys, values = (_means(x, means.tokens, members, tokens) for x in (means.keys, means.values))
    return Means(keys, values, tokens, means.first.gather(1, starts))


def numbered_runs(tokens: Int64[Tensor, "l n"], room: int) -> Int64[Tensor, "l n"]:
    """The number of the run, out of `room`, to which each entry belongs once neighbours have been joined.

    Each time the two with the fewest tokens together are joined; of equal pairs the first.
    """
    count, own = tokens.shape[1], tokens
    place = torch.arange(count - 1, device=tokens.device)
    run = torch.arange(count, device=tokens.device).expand_as(tokens)
    excess = torch.full_like(tokens[:, :1], count - room)
    while bool((excess > 0).any()):
        together = (own[:, :-1] + own[:, 1:]).masked_fill(own[:, 1:] == 0, MOST)
        cheapest = together == together.amin(1, keepdim=True)
        # Of cheapest pairs that overlap every other one is joined at once: any pair that this makes has more tokens.
        before = place.expand_as(together).masked_fill(cheapest, -1).cummax(1).values
        taken = cheapest & ((place - before) % 2 == 1)
        taken = taken & (taken.cumsum(1) <= excess)
        number = F.pad((~taken).long().cumsum(1), (1, 0))
        own = torch.zeros_like(own).scatter_add_(1, number, own)
        run, excess = number.gather(1, run), excess - taken.sum(1, keepdim=True)
    return run


def _means(
    x: Float[Tensor, "l n w"], weights: Float[Tensor, "l n"], members: Int64[Tensor, "l r"], total: Float[Tensor, "l r"]
) -> Float[Tensor, "l r w"]:
    """Weighted means of runs: `members` says how many entries, one after another, each run has."""
    sums, strip = list[Tensor](), max(1, AT_ONCE // max(1, x[0].numel()))
    for lanes, own, lengths in zip(x.split(strip), weights.split(strip), members.split(strip), strict=True):
        each = (lanes.double() * own.double()[..., None]).flatten(0, 1)
        sums.append(torch.segment_reduce(each, "sum", lengths=lengths.flatten(), axis=0).view(*lengths.shape, -1))
    return (torch.cat(sums) / total.double()[..., None]).to(x.dtype)


def tokens_kept(held: Held) -> int:
    """How many entries are tokens; those after them are means."""
    return held.count - means_kept(held)


def means_kept(held: Held) -> int:
    """How many entries are means."""
    return held.per_lane[TOKENS].shape[1] if TOKENS in held.per_lane else 0


def means_of(entries: Held | Pool, tokens: Float[Tensor, "l n"] | None = None) -> Means:
    """Entries as runs, each of so many `tokens`; of one if None."""
    first = entries.per_entry[FIRST]
    return Means(entries.keys, entries.values, torch.ones_like(first).float() if tokens is None else tokens, first)


def check_means(held: Held, count: int) -> None:
    """Refuse means that are not of exactly those of `count` tokens that are not kept."""
    means, first, kept = held.per_lane[TOKENS], held.per_entry[FIRST], tokens_kept(held)
    if means.ndim != 2 or kept < 0:
        raise ValueError(f"means of shape {tuple(means.shape)} among {held.count} entries")
    ordered = all(bool((x.diff(dim=1) > 0).all()) for x in (first[:, :kept], first[:, kept:]))
    whole = bool((means >= 1).all()) and bool((means.double().sum(1) + kept == count).all())
    if not ordered or not whole or not bool(((first >= 0) & (first < count)).all()):
        raise ValueError(f"{kept} tokens and means of {means.sum(1).tolist()!s:.60} others, and {count} came")
