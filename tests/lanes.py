"""The lanes of a method, fed and asked by hand."""

import torch

from kvsketch.attention import WeightedTokens
from kvsketch.caches.core.lanes import Lanes
from kvsketch.caches.core.query import Query
from kvsketch.caches.core.tokens import Arriving, Columns, Seen


class Fed:
    """What a method holds of tokens that are given in parts."""

    def __init__(self, config, budget=None, *, layer=0, rows=1, heads=1):
        self.method = config.new_method(layer)
        self.lanes = Lanes(self.method, [[budget] * heads] * rows)
        self.rows, self.heads = rows, heads

    def write(self, keys, values, unrotated=None, ranks=None, *, few=False):
        """Tokens [b, h, n, ·] that follow those before; or ranks say which row has which, and -1 where it has not."""
        if ranks is None:
            ranks = torch.tensor(self.lanes.counts)[:, None] + torch.arange(keys.shape[2])
        notes = self.method.note(Seen(keys, unrotated, ranks)) if self.method.takes_notes else None
        counts = [before + int(own) for before, own in zip(self.lanes.counts, (ranks >= 0).sum(1), strict=True)]
        self.lanes.write(Columns(keys, values, ranks, notes), counts, [few] * self.rows)
        return self

    @property
    def holding(self):
        """What the only bundle holds; its tensors have the lanes of all rows as their first dimension."""
        (bundle,) = self.lanes.bundles
        return bundle.holding

    def entries(self):
        """The weighted entries [b, h, n, ·] of lanes that lie together."""
        return entries_of(self.lanes)

    def ask(self, query):
        """What is read, looked up or estimated for a `Query`."""
        return self.lanes.answer(query)

    def attend(self, queries, scale, softcap=None):
        """Attention over everything that is held."""
        return self.lanes.answer(Query(queries, scale, softcap, in_full=True)).attended

    def count_entries(self):
        return self.lanes.count_entries()


def entries_of(lanes):
    """The weighted entries [b, h, n, ·] of lanes that lie together; weights that lanes share are repeated."""
    (bundle,) = lanes.bundles
    tokens, shape = tokens_of(bundle.holding), (lanes.rows, lanes.heads)

    def of_rows(x):
        return None if x is None else x[0].expand(shape[0] * shape[1], *x.shape[2:]).unflatten(0, shape)

    return WeightedTokens(*(of_rows(x) for x in (tokens.keys, tokens.values, tokens.log_mass, tokens.log_value)))


def tokens_of(holding):
    """The weighted entries [1, l, n, ·] of a holding that has some."""
    return holding.tokens() if holding.weighted is None else holding.weighted


def entries_of_rows(lanes):
    """The weighted entries [1, h, n, ·] of each row, whose heads lie together; rows may hold unequal numbers."""
    found = [None] * lanes.rows
    for bundle in lanes.bundles:
        tokens, heads = tokens_of(bundle.holding), len(bundle.heads)
        for place, row in enumerate(bundle.rows):
            parts = (tokens.keys, tokens.values, tokens.log_mass, tokens.log_value)
            own = slice(place * heads, (place + 1) * heads)
            lanes_of = (x if x is None else x.expand(1, len(bundle.rows) * heads, *x.shape[2:])[:, own] for x in parts)
            found[row] = WeightedTokens(*lanes_of)
    return found


def holding_of(lanes):
    """What the only bundle holds."""
    (bundle,) = lanes.bundles
    return bundle.holding


def arriving(keys, values, before=0):
    """Tokens [b, h, n, ·] as they reach the lanes of a bundle."""
    heads = torch.arange(keys.shape[1]).repeat(len(keys))
    return Arriving(keys.flatten(0, 1), values.flatten(0, 1), before, lambda _: heads)
