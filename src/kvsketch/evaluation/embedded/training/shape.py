"""The sizes of the embedded model, and what each slice of its hidden state is for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.evaluation.embedded.training.tokenizer import PLACES

NEARER = (1.0, 1.0, 1.0, 1.0, 0.7, 0.6, 0.5)  # farther tokens count less: before the same name, other tokens may stand
COMPARED = 11  # numbers of a code that are compared with the value said last
MARKED = 5.0  # size of the marks of the first token and of places


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of the model."""

    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    layers: int = 4
    intermediate: int = 512
    theta: float = 1e9  # so large that most pairs of dimensions hardly turn even over a long document
    offsets: int = 7  # how many tokens layer 0 looks back
    code: int = 18  # dimensions of a token's code for matching: slices for the token, each offset, and the token found
    rest: int = 38  # dimensions that only identify the token: slices for it and the token found

    def __post_init__(self) -> None:
        if self.layers < 3 or self.kv_heads != 4 or not len(NEARER) == self.offsets <= self.heads:
            raise ValueError(
                f"the start needs 3 layers or more, 4 KV heads, {len(NEARER)} offsets and a head for each, got "
                f"{self.layers}, {self.kv_heads}, {self.offsets} and {self.heads}"
            )
        if self.one >= self.hidden or self.code + self.rest > self.head_dim:
            raise ValueError(
                f"codes of {self.code} and {self.rest} numbers, and what goes with them take {self.one + 1} dimensions "
                f"where there are {self.hidden}, and {self.code + self.rest} of a head, which has {self.head_dim}"
            )

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    def at(self, offset: int) -> slice:
        """The slice for the code of the token `offset` back."""
        return slice(offset * self.code, (offset + 1) * self.code)

    @property
    def found(self) -> slice:
        """The slice for the code of the token that is expected next."""
        return self.at(self.offsets + 1)

    @property
    def own_rest(self) -> slice:
        """The slice for the rest of a token's own code."""
        return slice(self.found.stop, self.found.stop + self.rest)

    @property
    def found_rest(self) -> slice:
        """The slice for the rest of the code of the token that is expected next."""
        return slice(self.own_rest.stop, self.own_rest.stop + self.rest)

    @property
    def value(self) -> slice:
        """The slice for a part of the code of the value said last."""
        return slice(self.found_rest.stop, self.found_rest.stop + COMPARED)

    @property
    def said(self) -> slice:
        """The slice that tells which place was said last."""
        return slice(self.value.stop, self.value.stop + len(PLACES))

    @property
    def share(self) -> int:
        """The dimension that tells, where a value begins, whether its name had no value before."""
        return self.said.stop

    @property
    def mark(self) -> int:
        """The dimension that marks the first token."""
        return self.share + 1

    @property
    def one(self) -> int:
        """The dimension that is the same for all tokens."""
        return self.mark + 1

    @property
    def turns(self) -> Tensor:
        """The angle by which each pair of dimensions turns from one token to the next."""
        return self.theta ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
