"""Tokens as methods work through them: a block at a time, every head of every row a lane of its own (l = b·h)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.algorithms.draws import uniforms
from kvsketch.caches.base import BLOCK, LeavingTokens
from kvsketch.caches.storage import columns, in_front


@dataclass(frozen=True)
class Block:
    """A few tokens of every lane."""

    keys: Float[Tensor, "l n d"]
    values: Float[Tensor, "l n e"]
    ranks: Int64[Tensor, "l n"]  # -1 where a lane has fewer

    @property
    def valid(self) -> Bool[Tensor, "l n"]:
        """Where there is a token."""
        return self.ranks >= 0


def blocks(tokens: LeavingTokens) -> Iterator[Block]:
    """The tokens of every lane in order, BLOCK at a time; holes between them are closed first."""
    heads, count = tokens.keys.shape[1:3]
    keys, values, ranks = tokens.keys, tokens.values, tokens.ranks
    if bool((ranks < 0).any()):
        index = in_front(ranks >= 0)
        keys, values, ranks = columns(keys, index), columns(values, index), ranks.gather(1, index)
        count = int((ranks >= 0).sum(1).max())
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    ranks = ranks.repeat_interleave(heads, 0)
    for start in range(0, count, BLOCK):
        part = slice(start, min(start + BLOCK, count))
        yield Block(keys[:, part], values[:, part], ranks[:, part])


@dataclass(frozen=True)
class Draws:
    """Numbers for the tokens of all lanes of a layer, by address."""

    seed: int
    layer: int
    heads: int

    def numbers(self, ranks: Int64[Tensor, "l n"], purpose: int, count: int) -> Float[Tensor, "l n count"]:
        """`count` numbers in [0, 1) for every token; other ones for every purpose."""
        head = (torch.arange(len(ranks), device=ranks.device) % self.heads)[:, None, None]
        number = torch.arange(count, device=ranks.device)
        return uniforms(self.seed, self.layer, head, ranks[:, :, None], purpose, number)
