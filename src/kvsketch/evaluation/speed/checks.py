"""What one layer reads for an answer, entry by entry, and whether the answer is as near to exact as plain torch's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens, merge, weighted_attention
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.stream import Stream
from kvsketch.caches.lookup.saap import IndexedConfig, Saap
from kvsketch.caches.lookup.store import Store
from kvsketch.evaluation.speed.clock import using
from kvsketch.evaluation.speed.plan import TORCH
from kvsketch.kernels.gpu.attention import doubled
from kvsketch.kernels.routing.native import read_of
from kvsketch.kernels.routing.reference import mean_probability
from kvsketch.kernels.sources import Entries

OF_BYTES = 0.006  # the error that a router may have from weights stored as bytes

HeldByHead = list[list[WeightedTokens]]  # the sets of entries of each KV head, each shaped as one row's


@dataclass(frozen=True)
class Checked:
    """Relative errors of an answer and of plain torch, against float64, and what was read for the answer."""

    errors: dict[str, tuple[float, float]]  # of the answer, and of the router if there is one: own, plain torch's
    nbytes: int
    entries: int

    def right(self, within: float) -> bool:
        """Whether all errors are at most `within` times plain torch's."""
        return all(own <= within * plain for own, plain in self.errors.values())


def check_dense(
    out: Float[Tensor, "1 hg 1 e"],
    query: Float[Tensor, "1 hg 1 d"],
    keys: Float[Tensor, "1 h n d"],
    values: Float[Tensor, "1 h n e"],
    scale: float,
) -> Checked:
    """Check an answer over all tokens."""
    held = [[WeightedTokens(keys[:, h : h + 1], values[:, h : h + 1])] for h in range(keys.shape[1])]
    errors = _errors(out, query, held, None, scale)
    return Checked({"answer": errors}, keys.nbytes + values.nbytes, keys.shape[1] * keys.shape[2])


def check_layer(cache: LayerCache, query: Float[Tensor, "1 hg 1 d"], scale: float, kernel: str) -> Checked:
    """Check a layer's answer with these kernels, over the entries that they look up."""
    ranks = torch.tensor(cache.lengths)[:, None] - 1
    asked = Query(query, scale, None, query, ranks)
    with using(kernel):
        found = cache.attend(query, scale, unrotated=query)
        held, own, own_bytes = _held(cache, asked)
    assert found is not None, "something is held"
    errors = {"answer": _errors(found.out, query, held, own, scale)}
    router_bytes, rounded = _read_by_router(cache, query.dtype, kernel)
    if router_bytes:
        router, plain = _router_errors(cache, asked, kernel)
        errors["router"] = (router, max(plain, OF_BYTES) if rounded else plain)
    entries = sum(part.count for parts in held for part in parts)
    nbytes = sum(x.nbytes for parts in held for part in parts for x in vars(part).values() if x is not None)
    return Checked(errors, nbytes + own_bytes + router_bytes, entries)


def _read_by_router(cache: LayerCache, dtype: torch.dtype, kernel: str) -> tuple[int, bool]:
    """Bytes that these kernels read to find out where to look, and whether the weights among them were bytes."""
    config = cache.config
    if not isinstance(config, IndexedConfig) or not _asks(cache):
        return 0, False
    learnt = config.learnt.layer(cache.layer, "cpu", dtype)
    if not isinstance(config, Saap):
        return learnt.centroids.nbytes, False
    with using(kernel):
        return read_of(learnt.classifier)


def _asks(cache: LayerCache) -> bool:
    """Whether any holding already has to know what queries look for."""
    past = cache.streams.all[0].past
    return past is not None and any(one.holding.wants_asking for one in past.bundles)


def _held(cache: LayerCache, asked: Query) -> tuple[HeldByHead, Partial | None, int]:
    """The entries that a query reads in each head; the part answered without entries, and the bytes that may take."""
    held: HeldByHead = [[] for _ in cache.streams.budgets]
    answer = cache.streams.look(replace(asked, unrotated=asked.queries))
    for part in (part.chosen() for source in answer.unread for part in source):
        lanes = range(len(held)) if part.lanes is None else part.lanes.tolist()
        for place, lane in enumerate(lanes):
            held[lane].append(_read(part, place))
    others = [part for part in (answer.attended, answer.estimated) if part is not None]
    if not others:
        return held, None, 0
    assert cache.streams.only is not None, "methods that answer have one stream"
    return held, merge(*others), _bytes_of(cache.streams.only, answer)


def _bytes_of(stream: Stream, answer: Answer) -> int:
    """Bytes that an answer without entries may read: the whole past, or the index that is kept of it."""
    assert stream.past is not None, "something has answered"
    if answer.attended is not None:
        return stream.past.nbytes
    return sum(one.holding.index.nbytes for one in stream.past.bundles if isinstance(one.holding, Store))


def _read(part: Entries, place: int) -> WeightedTokens:
    """The entries that are read of one lane."""
    tokens = part.tokens
    each = [tokens.keys[0, place], tokens.values[0, place]]
    weights = [
        None if x is None else x.expand(*tokens.keys.shape[:3])[0, place] for x in (tokens.log_mass, tokens.log_value)
    ]
    if part.segments is not None:
        runs = zip(part.segments.begin[0, place, 0].tolist(), part.segments.length[0, place, 0].tolist(), strict=True)
        index = torch.cat([torch.arange(begin, begin + length) for begin, length in runs])
        each, weights = [x[index] for x in each], [None if x is None else x[index] for x in weights]
    mass, value = (None if x is None else x[None, None] for x in weights)
    return WeightedTokens(each[0][None, None], each[1][None, None], mass, value)


def _joined(parts: Sequence[WeightedTokens]) -> WeightedTokens:
    """All parts as one set of entries."""

    def weights(name: str, like: str | None = None) -> Tensor | None:
        if all(getattr(part, name) is None for part in parts):
            return None
        found = list[Tensor]()
        for part in parts:
            x = getattr(part, name)
            x = getattr(part, like) if x is None and like else x
            found.append(torch.zeros(1, 1, part.count) if x is None else x)
        return torch.cat(found, 2)

    keys, values = (torch.cat([getattr(part, name) for part in parts], 2) for name in ("keys", "values"))
    return WeightedTokens(keys, values, weights("log_mass"), weights("log_value", "log_mass"))


def _errors(
    out: Float[Tensor, "1 hg 1 e"],
    query: Float[Tensor, "1 hg 1 d"],
    held: HeldByHead,
    own: Partial | None,
    scale: float,
) -> tuple[float, float]:
    """Errors of an answer and of plain torch, relative to the definition in float64, computed head by head."""
    group = query.shape[1] // len(held)
    of_head = [slice(head * group, (head + 1) * group) for head in range(len(held))]
    wrong = plain_wrong = whole = 0.0
    for mine, parts in zip(of_head, held, strict=True):
        beside = None if own is None else Partial(own.out[:, mine].float(), own.lse[:, mine].float())
        wide = None if beside is None else Partial(beside.out.double(), beside.lse.double())
        asking, truth, plain = query[:, mine], wide, beside
        if parts:
            tokens = _joined(parts)
            truth = _with(weighted_attention(asking.double(), doubled(tokens), scale), wide)
            plain = _with(_plain(asking, tokens, scale), beside)
        assert truth is not None, "every head reads something"
        assert plain is not None, "as the truth"
        whole += float(truth.out.square().sum())
        wrong += float((out[:, mine].double() - truth.out).square().sum())
        plain_wrong += float((plain.out.to(query.dtype).double() - truth.out).square().sum())
    return (wrong / whole) ** 0.5, (plain_wrong / whole) ** 0.5


def _with(part: Partial, beside: Partial | None) -> Partial:
    return part if beside is None else merge(part, beside)


def _plain(query: Float[Tensor, "1 g 1 d"], tokens: WeightedTokens, scale: float) -> Partial:
    """Attention as two plain products, in the precision of what is held."""
    logits = (query.transpose(1, 2) @ tokens.keys.mT).float() * scale  # [1, 1, g, n]
    masses = logits if tokens.log_mass is None else logits + tokens.log_mass[:, :, None]
    lse = torch.logsumexp(masses, 3, keepdim=True)
    shares = masses if tokens.log_value is None else logits + tokens.log_value[:, :, None]
    out = torch.exp(shares - lse).to(tokens.values.dtype) @ tokens.values
    return Partial(out.transpose(1, 2).float(), lse[..., 0].transpose(1, 2))


def _router_errors(cache: LayerCache, asked: Query, kernel: str) -> tuple[float, float]:
    """Errors of the router's scores of buckets, with this kernel and with plain torch."""
    method, heads = cache.streams.all[0].method, len(cache.streams.budgets)
    assert method is not None, "there is something to look up"
    wide = asked.queries.double()
    truth = method.ask(replace(asked, queries=wide, unrotated=wide), heads)
    found = list[Tensor]()
    for one in (kernel, TORCH):
        with using(one):
            scores = method.ask(asked, heads)
        assert scores is not None, "a router says something"
        found.append(mean_probability(scores) if scores.ndim == 5 else scores)
    assert truth is not None, "as in float64"
    own, plain = (float((x.double() - truth).norm() / truth.norm()) for x in found)
    return own, plain
