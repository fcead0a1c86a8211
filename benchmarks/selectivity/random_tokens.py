"""Random tokens: what any way to look tokens up has to beat, and what Saap's Figure 5 begins with."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from kvsketch.algorithms.draws import uniforms
from kvsketch.caches.core.checks import check_count, check_seed
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.tokens import Seen
from kvsketch.caches.lookup.config import LookupConfig
from kvsketch.caches.lookup.store import Index, Lookup, Store


@dataclass(frozen=True, kw_only=True)
class RandomTokens(LookupConfig):
    """Keeps everything and reads `top` tokens at random, different ones for every query and KV head."""

    name: ClassVar[str] = "random_tokens"

    top: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("top", self.top, least=1)
        check_seed(self.seed)

    def new_method(self, layer: int) -> Lookup:
        return RandomTokensLookup(self, layer)


class RandomTokensLookup(Lookup):
    """All tokens, each noted with its rank; a query is identified by its KV head and its number."""

    def __init__(self, config: RandomTokens, layer: int) -> None:
        self.config, self.layer = config, layer

    def note(self, seen: Seen) -> Int64[Tensor, "b h n t"]:
        return seen.ranks[:, None, :, None].expand(-1, seen.keys.shape[1], -1, -1).contiguous()

    def ask(self, query: Query, heads: int) -> Int64[Tensor, "b h q 2"]:
        rows, _, queries, _ = query.queries.shape
        each = (torch.arange(size, device=query.queries.device) for size in (rows, heads, queries))
        return torch.stack(torch.meshgrid(*each, indexing="ij")[1:], 3)

    def new_index(self) -> Index:
        return Drawn(self.config, self.layer)


class Drawn(Index):
    """A query reads the tokens for which the smallest numbers are drawn."""

    def __init__(self, config: RandomTokens, layer: int) -> None:
        self.config, self.layer = config, layer

    def find(self, store: Store, query: Query, asked: Int64[Tensor, "l q 2"] | None) -> Answer:
        assert asked is not None, "what is drawn is drawn for a head and a query"
        return store.read_where(query, lambda start, stop: self.visible(store, asked[:, start:stop])[None])

    def visible(self, store: Store, asked: Int64[Tensor, "l q 2"]) -> Bool[Tensor, "l q n"]:
        """The tokens that each query reads."""
        head, query = asked[..., None].unbind(2)
        drawn = uniforms(self.config.seed, self.layer, head, query, store.labels.view[:, None, :, 0])
        least = drawn.kthvalue(min(self.config.top, drawn.shape[2]), dim=2, keepdim=True).values
        return drawn <= least
