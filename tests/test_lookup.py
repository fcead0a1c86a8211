"""Buckets and bins of a whole layer: the one-head forms head by head, limits, estimates, and what moves where."""

import copy
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import normal
from kvsketch.algorithms import lsh as one_head
from kvsketch.algorithms import saap
from kvsketch.attention import WeightedTokens, exact_attention, merge, weighted_attention
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.query import Query
from kvsketch.caches.core.tokens import NewTokens, Seen, Unrotated
from kvsketch.caches.lookup import store as store_module
from kvsketch.caches.lookup.kmeans import KMeans
from kvsketch.caches.lookup.lsh import LSH
from kvsketch.caches.lookup.random_buckets import RandomBuckets
from kvsketch.caches.lookup.retrieval import Retrieval
from kvsketch.caches.lookup.saap import Saap, SaapLookup
from kvsketch.caches.lookup.store import BASE, BEFORE, Store
from kvsketch.kernels import native
from kvsketch.kernels.routing.reference import choose
from kvsketch.kernels.sources import Limits
from lanes import Fed
from made_index import make_index

HEADS, GROUP, WIDTH, BUCKETS = 2, 3, 16, 8
SCALE = WIDTH**-0.5


def tokens(count, seed=0):
    """Keys, values, and keys before rotation."""
    return tuple(normal(1, HEADS, count, WIDTH, seed=3 * seed + i) for i in range(3))


def some_queries(count=1, seed=50):
    queries = normal(1, HEADS * GROUP, count, WIDTH, seed=seed)
    return Query(queries, SCALE, None, queries.flip(-1), 1000 + torch.arange(count)[None])


def filled(config, keys, values, unrotated, sizes=None, layer=1):
    """A method that was given the tokens in parts of these sizes."""
    fed, start = Fed(config, Budget(1.0, None, 0), layer=layer, heads=HEADS), 0
    for size in sizes or [keys.shape[2]]:
        part = slice(start, start + size)
        fed.write(keys[:, :, part], values[:, :, part], unrotated[:, :, part])
        start += size
    return fed


@pytest.fixture
def index(tmp_path):
    return make_index(tmp_path / "index", heads=HEADS, width=WIDTH, buckets=BUCKETS)


def classifier_of(learnt, head):
    first = None if learnt.first is None else learnt.first[head].T
    bias = None if learnt.first_bias is None else learnt.first_bias[head, 0]
    return saap.QueryClassifier(first, bias, learnt.second[head].T, learnt.second_bias[head, 0])


@pytest.mark.parametrize("hidden", [0, 12])
@pytest.mark.parametrize("probes", [1, 3])
def test_saap_in_a_layer_is_saap_in_each_head(tmp_path, hidden, probes):
    config = Saap(index=make_index(tmp_path / "i", heads=HEADS, width=WIDTH, hidden=hidden), probes=probes, staging=1)
    keys, values, unrotated = tokens(300)
    fed, asking = filled(config, keys, values, unrotated), some_queries()
    found = fed.ask(asking)
    learnt = config.learnt.layer(1)
    for head in range(HEADS):
        group = slice(head * GROUP, (head + 1) * GROUP)
        buckets = saap.assign(unrotated[0, head], learnt.centroids[head])
        classifier = classifier_of(learnt, head)
        visit = saap.visited(classifier.log_probabilities(asking.unrotated[0, group, 0]).exp(), probes)
        expected = saap.attend(asking.queries[0, group, 0], keys[0, head], values[0, head], buckets, visit, SCALE)
        torch.testing.assert_close(found.attended.out[:, group], expected.out)
        torch.testing.assert_close(found.attended.lse[:, group], expected.lse)
        assert found.read[0, head, 0] / 300 == pytest.approx(saap.selectivity(buckets, visit))


@pytest.mark.parametrize("rope", [False, True])
def test_kmeans_visits_the_nearest_centroids(index, rope):
    config = KMeans(index=index, probes=2, staging=1, rope=rope)
    keys, values, unrotated = tokens(300)
    fed, asking = filled(config, keys, values, unrotated), some_queries()
    learnt = config.learnt.layer(1)
    centroids = learnt.rotated_centroids if rope else learnt.centroids
    seen, asked = (keys, asking.queries) if rope else (unrotated, asking.unrotated)
    found = fed.ask(asking)
    for head in range(HEADS):
        group = slice(head * GROUP, (head + 1) * GROUP)
        buckets = saap.assign(seen[0, head], centroids[head])
        visit = (asked[0, group, 0] @ centroids[head].T).mean(0).topk(2).indices
        expected = saap.attend(asking.queries[0, group, 0], keys[0, head], values[0, head], buckets, visit, SCALE)
        torch.testing.assert_close(found.attended.out[:, group], expected.out)


@pytest.mark.parametrize("kind", ["kdeformer", "reformer", "magicpig"])
def test_lsh_in_a_layer_is_lsh_in_each_head(kind):
    """Sorted as one run; the queries of a group read what each of them finds."""
    config = LSH(kind=kind, bins=5, bits=4, tables=9, staging=256)
    keys, values, unrotated = tokens(256)
    fed, asking = filled(config, keys, values, unrotated), some_queries()
    found = fed.ask(asking)
    for head in range(HEADS):
        group = slice(head * GROUP, (head + 1) * GROUP)
        directions = fed.method.directions._of(HEADS, keys)[head]
        seen = {
            "kdeformer": lambda q, k, d: one_head.kdeformer(q, k, d, 5),
            "reformer": lambda q, k, d: one_head.reformer(q, k, d, 5),
            "magicpig": lambda q, k, d: one_head.magicpig(q, k, d.unflatten(0, (9, 4))),
        }[kind](asking.queries[0, group, 0], keys[0, head], directions)
        together = seen.any(0)
        part = exact_attention(
            asking.queries[:, group], keys[:, head : head + 1], values[:, head : head + 1], SCALE,
            visible=together[None, None, None],
        )  # fmt: skip
        assert found.read[0, head, 0] == together.sum()
        torch.testing.assert_close(found.attended.out[:, group], part.out)


def test_retrieval_reads_what_the_group_attends_to_most():
    keys, values, unrotated = tokens(300)
    fed, asking = filled(Retrieval(top=20), keys, values, unrotated), some_queries()
    found = fed.ask(asking)
    for head in range(HEADS):
        group = slice(head * GROUP, (head + 1) * GROUP)
        attention = torch.softmax(asking.queries[0, group, 0] @ keys[0, head].T * SCALE, 1)
        most = torch.zeros(300, dtype=torch.bool)
        most[attention.mean(0).topk(20).indices] = True
        expected = exact_attention(
            asking.queries[:, group], keys[:, head : head + 1], values[:, head : head + 1], SCALE,
            visible=most[None, None, None],
        )  # fmt: skip
        torch.testing.assert_close(found.attended.out[:, group], expected.out)
    assert (found.read == 20).all()


@pytest.mark.parametrize("config", [Retrieval(top=20), LSH(kind="magicpig", bits=4, tables=9)], ids=str)
def test_what_is_read_is_the_same_for_many_queries_some_at_a_time(config, monkeypatch):
    fed, asking = filled(config, *tokens(300)), some_queries(count=7)
    at_once = fed.ask(asking)
    monkeypatch.setattr(store_module, "MASK_AT_ONCE", 300 * HEADS * GROUP * 2)
    in_parts = fed.ask(asking)
    assert torch.equal(in_parts.read, at_once.read)
    torch.testing.assert_close(in_parts.attended.out, at_once.attended.out)


def test_nothing_that_reads_as_many_tokens_has_more_of_the_mass_than_retrieval(index):
    """With one query in a group: for several together the largest mean is not each one's largest."""
    keys, values, unrotated = tokens(600)
    queries = normal(1, HEADS, 1, WIDTH, seed=7)
    asking = Query(queries, SCALE, None, queries.flip(-1), torch.tensor([[600]]))
    for config in (Saap(index=index, probes=1, staging=1), RandomBuckets(buckets=8, probes=1, staging=1)):
        found = filled(config, keys, values, unrotated).ask(asking)
        for head in range(HEADS):
            best = filled(Retrieval(top=int(found.read[0, head, 0])), keys, values, unrotated).ask(asking)
            assert best.attended.lse[0, head, 0] >= found.attended.lse[0, head, 0]


def test_random_buckets_read_their_share_and_no_bucket_is_preferred():
    config = RandomBuckets(buckets=20, probes=5, staging=1)
    fed = filled(config, *tokens(2000))
    asked = fed.method.ask(some_queries(count=200), HEADS).topk(5, dim=3).indices
    counts = torch.bincount(asked.flatten(), minlength=20).double()
    expected = asked.numel() / 20
    error = math.sqrt(expected * (1 - 5 / 20))
    assert (counts - expected).abs().max() < 4 * error
    read = fed.ask(some_queries(count=200)).read.double().mean() / 2000
    # A bucket's size varies as a binomial; five of twenty are read for each of 400 lanes.
    assert abs(float(read) - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 2000)


@given(st.integers(0, 2**20), st.integers(1, 8), st.integers(1, 50))
@settings(max_examples=50, deadline=None)
def test_limits_hold_and_the_best_bucket_is_always_visited(seed, probes, most):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.softmax(3 * torch.randn(1, 2, 4, 8, generator=generator), 3)
    sizes = torch.randint(0, 20, (1, 2, 8), generator=generator)
    size = sizes[:, :, None].expand(-1, -1, 4, -1)

    def read(visited):
        return (size.gather(3, visited.buckets) * visited.taken).sum(3)

    free = choose(scores, sizes, Limits(probes))
    assert free.taken.all()
    capped = choose(scores, sizes, Limits(probes, visit=most))
    best = size.gather(3, capped.buckets[..., :1])[..., 0]
    assert (read(capped) <= torch.maximum(torch.tensor(most), best)).all()
    assert (size.gather(3, capped.buckets) * capped.taken).sum(3).ge(best).all()
    share = choose(scores, sizes, Limits(probes, visit=0.25))
    assert (read(share) <= torch.maximum(0.25 * size.sum(3), best)).all()
    heavy = choose(scores, sizes, Limits(8, mass=0.9))
    found = (scores.gather(3, heavy.buckets) * heavy.taken).sum(3)
    assert (found >= 0.9 - 1e-5).all()
    last = (scores.gather(3, heavy.buckets) * heavy.taken).masked_fill(~heavy.taken, 2).amin(3)
    assert (found - last < 0.9 + 1e-5).all(), "one bucket less would not have been enough"


def test_what_is_not_visited_stands_in_as_means(index):
    config = Saap(index=index, probes=3, staging=32, estimate=True)
    keys, values, unrotated = tokens(320)
    fed, asking = filled(config, keys, values, unrotated, [200, 7, 1, 112]), some_queries(count=4)
    found = fed.ask(asking)
    learnt = config.learnt.layer(1)
    for head in range(HEADS):
        group = slice(head * GROUP, (head + 1) * GROUP)
        buckets = saap.assign(unrotated[0, head], learnt.centroids[head])
        for at in range(4):
            logs = classifier_of(learnt, head).log_probabilities(asking.unrotated[0, group, at])
            visit = saap.visited(logs.exp(), 3).tolist()
            rest = [b for b in range(BUCKETS) if b not in visit and (buckets == b).any()]
            means = [torch.stack([x[0, head, buckets == b].mean(0) for b in rest])[None, None] for x in (keys, values)]
            counts = torch.tensor([float((buckets == b).sum()) for b in rest]).log()[None, None]
            expected = weighted_attention(asking.queries[:, group, at : at + 1], WeightedTokens(*means, counts), SCALE)
            torch.testing.assert_close(found.estimated.out[:, group, at : at + 1], expected.out, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found.estimated.lse[:, group, at : at + 1], expected.lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limits", [{}, {"probes": 0}, {"probes": 8}, {"visit": 0.3, "prefer": "density"}])
def test_a_step_reads_the_estimate_with_the_rest(index, limits, dtype):
    config = Saap(**{"index": index, "probes": 3, "staging": 32, "estimate": True, **limits})
    two_rows = [torch.cat([x, x.roll(7, 2)]).to(dtype) for x in tokens(320)]
    ranks = torch.arange(320).expand(2, -1).clone()
    ranks[1] -= 100  # a shorter row, in a bundle of its own
    fed = Fed(config, Budget(1.0, None, 0), layer=1, rows=2, heads=HEADS).write(*two_rows, ranks.clamp_min(-1))
    queries = normal(2, HEADS * GROUP, 1, WIDTH, seed=5).to(dtype)
    asking = Query(queries, SCALE, None, queries.flip(-1), torch.full((2, 1), 1000))
    apart = fed.ask(asking)
    found = fed.ask(replace(asking, apart=False))
    with native.off():
        plain = fed.ask(replace(asking, apart=False))
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    for answer in (apart, plain):
        other = merge(*(part for part in (answer.attended, answer.estimated) if part is not None))
        torch.testing.assert_close(found.attended.out.float(), other.out.float(), **close)
        torch.testing.assert_close(found.attended.lse, other.lse, **close)
    assert torch.equal(found.read, apart.read)
    assert (found.estimated is None) == (native.library() is not None)


def test_the_estimate_is_part_of_the_answer_and_not_of_the_recall(index):
    count = 400
    query = normal(1, HEADS * GROUP, count, WIDTH, seed=9)
    keys, values, unrotated = tokens(count)
    new = NewTokens(keys, values, None, Unrotated(query.flip(-1), unrotated))
    plain, estimated = (
        LayerCache(Saap(index=index, probes=1, window=40, staging=30, full_layers=0, estimate=estimate), 1)
        for estimate in (False, True)
    )
    for cache in (plain, estimated):
        cache.read(query, new, SCALE)
    torch.testing.assert_close(plain.recall, estimated.recall)
    assert (plain.recall < 0.9).all()
    assert estimated.error.mean() < plain.error.mean()
    asking = query[:, :, -1:]
    found = estimated.past.answer(Query(asking, SCALE, None, asking.flip(-1)))
    window = weighted_attention(asking, estimated.window.tokens(), SCALE)
    expected = merge(found.attended, window, found.estimated)
    got = estimated.attend(asking, SCALE, unrotated=asking.flip(-1))
    torch.testing.assert_close(got.out, expected.out)


def test_as_long_as_nothing_has_left_the_window_all_is_found_and_nothing_wrong(index):
    query = normal(1, HEADS * GROUP, 200, WIDTH, seed=9)
    keys, values, unrotated = tokens(200)
    for window, right in ((200, True), (40, False)):
        cache = LayerCache(Saap(index=index, probes=1, window=window, staging=10, full_layers=0), 1)
        cache.read(query, NewTokens(keys, values, None, Unrotated(query.flip(-1), unrotated)), SCALE)
        assert cache.measured_at == 200
        assert cache.error.shape == cache.recall.shape == (1, HEADS * GROUP)
        assert right == (not cache.error.any()) == bool((cache.recall == 1).all())


def test_recall_is_the_share_of_attention_in_what_is_read(index):
    count = 500
    query = normal(1, HEADS * GROUP, count, WIDTH, seed=9)
    keys, values, unrotated = tokens(count)
    config = Saap(index=index, probes=2, window=40, staging=1, full_layers=0)
    cache = LayerCache(config, 1)
    cache.read(query, NewTokens(keys, values, None, Unrotated(query.flip(-1), unrotated)), SCALE)
    learnt, left = config.learnt.layer(1), cache.left[0]
    for head in range(HEADS):
        group = slice(head * GROUP, (head + 1) * GROUP)
        buckets = saap.assign(unrotated[0, head], learnt.centroids[head])
        shares = []
        for at in range(count - 8, count):
            logs = classifier_of(learnt, head).log_probabilities(query.flip(-1)[0, group, at])
            seen = torch.isin(buckets, saap.visited(logs.exp(), 2))
            seen[:1], seen[left + 1 :] = True, True  # the sink and the window
            attention = torch.softmax(query[0, group, at] @ keys[0, head].T * SCALE, 1)  # as the probe sees it
            shares.append(attention[:, seen].sum(1))
        torch.testing.assert_close(cache.recall[0, group], torch.stack(shares).mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [[5000], [1] * 700, [1000, 32, 32, 500, 900, *[32] * 30], [32 * 1100]], ids=str)
def test_runs_are_sorted_few_and_hold_every_token_once(sizes):
    staging = 32
    config = RandomBuckets(buckets=10, probes=3, staging=staging)
    keys, values, _ = tokens(sum(sizes))
    fed = filled(config, keys, values, keys, sizes)
    store = fed.holding
    edges = [*store.runs, store.sorted_to]
    lengths = [(end - start) // staging for start, end in pairwise(edges)]
    assert store.count - store.sorted_to < staging
    assert sum(lengths) == sum(sizes) // staging
    assert len(lengths) <= math.log(max(lengths), BASE) + 2
    assert all(longer > shorter for longer, shorter in pairwise(lengths))
    for _, labels in store.labels_of_runs():
        assert (labels.diff(dim=1) >= 0).all()
    for held, came in ((store.keys, keys[0]), (store.values, values[0])):
        assert torch.equal(held.sort(1).values, came.sort(1).values)
    at = torch.arange(store.count)
    labels = fed.method.note(Seen(keys, None, at[None]))[0, :, :, 0]
    for head in range(HEADS):
        place = {tuple(key): number for number, key in enumerate(keys[0, head].tolist())}
        found = [place[tuple(key)] for key in store.keys[head].tolist()]
        assert torch.equal(store.labels.view[head, :, 0], labels[head][found]), "labels moved with their keys"


def test_a_token_is_moved_a_few_times_and_not_at_every_step(monkeypatch):
    moved = []
    config = RandomBuckets(buckets=10, probes=3, staging=32)
    keys, values, _ = tokens(32 * 300)
    sort = Store._sort
    monkeypatch.setattr(Store, "_sort", lambda self, a, b: (moved.append(b - a), sort(self, a, b)))
    filled(config, keys, values, keys, [32] * 300)
    assert moved
    # A digit is sorted again for each of its values, of which half are there on average, for each of log 300 digits.
    assert sum(moved) / keys.shape[2] < BASE / 2 * math.ceil(math.log(300, BASE))


def test_new_tokens_are_read_while_they_wait(index):
    config = Saap(index=index, probes=1, staging=100)
    keys, values, unrotated = tokens(199)
    fed = filled(config, keys, values, unrotated)
    asking = some_queries()
    found = fed.ask(asking)
    assert (found.read >= 99).all()
    store = fed.holding
    waiting = exact_attention(asking.queries, store.keys[None, :, 100:], store.values[None, :, 100:], SCALE)
    assert torch.equal(store.keys[:, 100:], keys[0, :, 100:])
    assert (found.attended.lse >= waiting.lse - 1e-5).all()


def test_no_probes_read_the_window_and_what_waits_alone(index):
    fed = filled(Saap(index=index, probes=0, staging=10), *tokens(205))
    assert (fed.ask(some_queries()).read == 5).all()


def test_without_probes_an_estimate_of_all_buckets_is_left(index):
    keys, values, unrotated = tokens(400)
    fed = filled(Saap(index=index, probes=0, staging=1, estimate=True), keys, values, unrotated)
    found = fed.ask(some_queries())
    assert (found.read == 0).all()
    every = filled(Saap(index=index, probes=BUCKETS, staging=1), keys, values, unrotated).ask(some_queries())
    assert (found.estimated.lse <= every.attended.lse + 1e-5).all(), (
        "means have too little mass, by Jensen's inequality"
    )
    assert (found.estimated.lse > every.attended.lse - 1).all()


def test_a_padded_row_reads_what_it_reads_alone_and_padding_is_not_counted():
    """Whatever is drawn is drawn for a token by its rank in its row; streaming, so that every query looks up."""
    config = RandomBuckets(buckets=8, probes=2, staging=20, window=30, full_layers=0, prefill="streaming", chunk=64)
    count, padding = 300, 90
    query, keys, values = (normal(2, heads, count, WIDTH, seed=heads) for heads in (HEADS * GROUP, HEADS, HEADS))
    valid = torch.ones(2, count, dtype=torch.bool)
    valid[0, :padding] = False
    together = LayerCache(config, 1)
    got = together.read(query, NewTokens(keys, values, valid), SCALE).out
    for row, skip in ((0, padding), (1, 0)):
        alone = LayerCache(config, 1)
        part = [x[row : row + 1, :, skip:] for x in (query, keys, values)]
        expected = alone.read(part[0], NewTokens(*part[1:]), SCALE).out
        torch.testing.assert_close(got[row : row + 1, :, skip:], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together.past.share_read()[row], alone.past.share_read()[0])


def test_what_is_read_is_counted_once_and_by_nobody_who_only_asks(index):
    """A forward pass counts; looking again does not."""
    config = Saap(index=index, probes=2, staging=1, window=30, full_layers=0)
    cache = LayerCache(config, 1)
    keys, values, unrotated = tokens(201)
    query = normal(1, HEADS * GROUP, 201, WIDTH, seed=9)
    cache.hold(
        NewTokens(keys[:, :, :200], values[:, :, :200], None, Unrotated(query[:, :, :200], unrotated[:, :, :200]))
    )
    asking = Query(query[:, :, 200:], SCALE, None, query[:, :, 200:].flip(-1), torch.tensor([[200]]))
    found = cache.past.answer(asking)
    cache.attend(asking.queries, SCALE, unrotated=asking.unrotated)
    assert cache.past.share_read() is None
    seen = Unrotated(asking.unrotated, unrotated[:, :, 200:])
    cache.read(asking.queries, NewTokens(keys[:, :, 200:], values[:, :, 200:], None, seen), SCALE)
    torch.testing.assert_close(cache.past.share_read(), found.read[:, :, 0] / cache.past.counts[0], check_dtype=False)


def test_labels_that_there_are_not_are_refused_whether_sorted_in_or_waiting(index):
    for staging in (10, 1000):
        config = Saap(index=index, staging=staging)
        for label in (-1, BUCKETS):
            lanes = filled(config, *tokens(205)).lanes
            tensors, numbers = lanes.tensors(), lanes.numbers()
            tensors["0.labels"][1, 3] = label
            with pytest.raises(ValueError, match=f"labels from .*{label}.* of {BUCKETS} buckets"):
                lanes.restore(tensors, numbers)


def test_every_step_draws_its_own_buckets():
    config = RandomBuckets(buckets=50, probes=3, staging=1, window=30, full_layers=0)
    cache = LayerCache(config, 1)
    keys, values, _ = tokens(200)
    cache.hold(NewTokens(keys, values))
    other = copy.deepcopy(cache)
    store, looked_at_last = (one.past.bundles[0].holding for one in (cache, other))
    reads = []
    for step in range(40):
        before = None if store.reads is None else store.reads.clone()
        query = normal(1, HEADS * GROUP, 1, WIDTH, seed=step)
        for one in (cache, other):
            one.read(query, NewTokens(*(normal(1, HEADS, 1, WIDTH, seed=100 + step) for _ in range(2))), SCALE)
        after = store.reads.clone()
        reads.append(tuple((after if before is None else after - before)[:, 0].tolist()))
    assert len(set(reads)) > 10
    assert torch.equal(looked_at_last.reads, store.reads)


def test_fewer_keys_than_buckets_and_all_keys_in_one_bucket(index):
    config = Saap(index=index, probes=3, staging=1)
    few = filled(config, *tokens(3))
    assert few.ask(some_queries()).attended.out.isfinite().all()
    keys, values, unrotated = tokens(100)
    same = filled(config, keys, values, unrotated[:, :, :1].expand(-1, -1, 100, -1))
    found = same.ask(some_queries(count=30))
    assert set(found.read.flatten().tolist()) <= {0, 100}, "the one bucket, or empty ones"
    empty = found.read.repeat_interleave(GROUP, 1) == 0
    assert (found.attended.lse[empty] == float("-inf")).all()
    assert found.attended.out.isfinite().all()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"probes": -1}, "probes must be a whole number of at least 0, got -1"),
        ({"visit": 0}, "visit must be a whole number of at least 1, got 0"),
        ({"visit": 1.5}, "visit must be a number of tokens such as 2048, or a share"),
        ({"visit": "many"}, "visit must be a number of tokens such as 2048, or a share"),
        ({"mass": 1.0}, "mass must be a positive number below 1, got 1.0"),
        ({"staging": 0}, "staging must be a whole number of at least 1, got 0"),
        ({"window": 0}, "window must be a whole number of at least 1, got 0"),
        ({"full_layers": -1}, "full_layers must be a whole number of at least 0, got -1"),
    ],
)
def test_bad_options_are_refused_by_name(spec, message):
    with pytest.raises(ValueError, match=message):
        Saap(**spec)


def test_a_limit_may_be_given_as_text():
    assert Saap(visit="2048").visit == 2048
    assert Saap(visit="0.05").visit == 0.05


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "minhash"}, "kind must be one of kdeformer, reformer, magicpig, got 'minhash'"),
        ({"bits": 63}, "bits of kdeformer must be at most 62, got 63"),
        ({"kind": "reformer", "bits": 21}, "bits of reformer must be at most 20, got 21"),
        ({"bins": 0}, "bins must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_options_of_lsh_are_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        LSH(**given)


def test_by_density_few_tokens_are_read_for_much_of_what_is_expected(index):
    """The buckets with most for each of their tokens first; no probe is spent on an empty one."""
    scores = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])[None, None, None]
    sizes = torch.tensor([400, 10, 100, 0, 1])[None, None]
    assert choose(scores, sizes, Limits(3)).buckets.tolist() == [[[[0, 1, 2]]]]
    assert choose(scores, sizes, Limits(3, per_token=True)).buckets.tolist() == [[[[4, 1, 2]]]]
    capped = choose(scores, sizes, Limits(5, visit=111, per_token=True))
    assert capped.taken.tolist() == [[[[True, True, True, False, False]]]]
    fed = filled(Saap(index=index, probes=2, staging=1, prefer="density"), *tokens(400))
    asking = some_queries()
    sizes = fed.holding.index.sizes[None]
    visited = choose(fed.method.ask(asking, HEADS), sizes, Limits(2, per_token=True))
    size = sizes[:, :, None].gather(3, visited.buckets)
    assert torch.equal(fed.ask(asking).read, size.sum(3))
    with pytest.raises(ValueError, match="prefer must be one of mass, density, got 'speed'"):
        Saap(prefer="speed")


def read_one_by_one(cache, count, seed=0):
    """Reads so many tokens, one a call; the keys of all of them, and those before rotation."""
    keys, values, unrotated = tokens(count, seed)
    query = normal(1, HEADS * GROUP, count, WIDTH, seed=40 + seed)
    for at in range(count):
        part = slice(at, at + 1)
        seen = Unrotated(query[:, :, part], unrotated[:, :, part])
        cache.read(query[:, :, part], NewTokens(keys[:, :, part], values[:, :, part], None, seen), SCALE)
    return keys, unrotated


def noted(cache):
    """The window's columns, all with their labels: those of the latest wait to be made together."""
    stream = cache.streams.only
    stream.take_notes()
    return stream.window.columns


@pytest.mark.parametrize("count", [1, 31, 32, 33, 75, 200])
def test_tokens_that_come_one_by_one_have_the_labels_of_those_that_come_together(index, count):
    config = Saap(index=index, probes=2, window=40, staging=16, full_layers=0)
    cache = LayerCache(config, 1)
    keys, unrotated = read_one_by_one(cache, count)
    expected = cache.past.method.note(Seen(unrotated, unrotated, torch.arange(count)[None]))
    held, left = noted(cache), cache.left[0]
    torch.testing.assert_close(held.notes[:, :, 0], expected[:, :, 0])  # the sink
    torch.testing.assert_close(held.notes[:, :, 1:], expected[:, :, 1 + left :])
    (store,) = (bundle.holding for bundle in cache.past.bundles)
    for head in range(HEADS if left else 0):
        label_of = dict(zip(map(tuple, keys[0, head].tolist()), expected[0, head], strict=True))
        found = [label_of[tuple(key)] for key in store.keys[head].tolist()]
        assert len(found) == left
        assert torch.equal(store.labels.view[head], torch.stack(found))


def test_labels_are_made_for_many_tokens_at_once_and_no_more_than_a_block_waits(index, monkeypatch):
    cache = LayerCache(Saap(index=index, probes=2, window=100, staging=16, full_layers=0), 1)
    labelled = []
    note = SaapLookup.note
    monkeypatch.setattr(SaapLookup, "note", lambda self, new: labelled.append(new.keys.shape[2]) or note(self, new))
    read_one_by_one(cache, 75)
    assert labelled == [32, 32]
    cache.crop(5)  # what waits has labels first
    assert labelled == [32, 32, 11]
    assert cache.window.columns.notes.shape[2] == 70


def test_a_copy_and_what_is_saved_have_the_labels_of_all_their_tokens(index):
    config = Saap(index=index, probes=2, window=40, staging=16, full_layers=0)
    cache = LayerCache(config, 1)
    read_one_by_one(cache, 80)
    twin, loaded = copy.deepcopy(cache), LayerCache(config, 1)
    loaded.restore(*cache.state())
    for each in (cache, twin, loaded):
        read_one_by_one(each, 90, seed=1)
    for other in (twin, loaded):
        assert torch.equal(noted(other).notes, noted(cache).notes)
        assert torch.equal(other.past.bundles[0].holding.labels.view, cache.past.bundles[0].holding.labels.view)
    stream, (bundle,) = twin.streams.only, twin.past.bundles
    assert stream.method is twin.past.method is bundle.holding.index.method is not cache.past.method


def test_what_a_version_with_other_runs_saved_is_sorted_anew(index, monkeypatch):
    """And what it was saved from stays as it is."""
    config = Saap(index=index, probes=2, window=40, staging=16, full_layers=0)
    old, now = LayerCache(config, 1), LayerCache(config, 1)
    for cache, base in ((now, BASE), (old, BEFORE)):
        monkeypatch.setattr(store_module, "BASE", base)
        read_one_by_one(cache, 16 * 11 + 50)
    assert len(old.past.bundles[0].holding.runs) > len(now.past.bundles[0].holding.runs)
    saved, numbers = old.state()
    before = {name: tensor.clone() for name, tensor in saved.items()}
    monkeypatch.setattr(store_module, "BASE", BASE)
    loaded = LayerCache(config, 1)
    loaded.restore(saved, numbers)
    assert all(torch.equal(tensor, before[name]) for name, tensor in saved.items())
    for held in ("keys", "values"):
        assert torch.equal(getattr(loaded.past.bundles[0].holding, held), getattr(now.past.bundles[0].holding, held))
    query = normal(1, HEADS * GROUP, 1, WIDTH, seed=3)
    found, expected = (cache.attend(query, SCALE, unrotated=query) for cache in (loaded, now))
    assert torch.equal(found.out, expected.out)


def do_something(cache, rows, choose):
    """One of the things that happen to a cache; the cache, and its rows."""
    kind = choose(["one", "one", "one", "some", "padded", "crop", "rows", "copy", "load"])
    if not cache.started or kind in ("one", "some", "padded"):
        count = 1 if kind == "one" else choose([2, 9, 60])
        query, keys, values = (normal(rows, heads, count, WIDTH, seed=choose(range(9**5))) for heads in (6, 2, 2))
        valid = None
        if kind == "padded":
            valid = torch.arange(count) >= torch.tensor([choose(range(count)) for _ in range(rows)])[:, None]
        cache.read(query, NewTokens(keys, values, valid), SCALE)
    elif kind == "crop":
        there = min(length - left - 1 for length, left in zip(cache.lengths, cache.left, strict=True))
        cache.crop(max(0, min(there, choose(range(1, 7)))))
    elif kind == "rows":
        new = [choose(range(rows)) for _ in range(choose([1, 2, 3]))]
        cache.map_rows(new)
        rows = len(new)
    elif kind == "copy":
        cache = copy.deepcopy(cache)
    else:
        loaded = LayerCache(cache.config, 1)
        tensors, numbers = cache.state()
        loaded.restore({name: tensor.clone() for name, tensor in tensors.items()}, numbers)
        cache = loaded
    return cache, rows


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_happens_every_token_has_the_label_of_its_key(data, tmp_path_factory):
    index = make_index(tmp_path_factory.mktemp("i") / "index", heads=HEADS, width=WIDTH, buckets=BUCKETS)
    cache = LayerCache(KMeans(index=index, probes=2, rope=True, window=20, staging=16, full_layers=0), 1)
    rows, choose = data.draw(st.sampled_from([1, 3])), lambda options: data.draw(st.sampled_from(options))

    def check(keys, labels, there):
        expected = cache.past.method.note(Seen(keys, None, torch.zeros(keys.shape[0], keys.shape[2]).long()))
        assert torch.equal(expected[there], labels[there])

    for _ in range(data.draw(st.integers(1, 60))):
        cache, rows = do_something(cache, rows, choose)
    held = noted(cache)
    check(held.keys, held.notes, (held.ranks >= 0)[:, None].expand(-1, HEADS, -1))
    for bundle in (bundle for bundle in cache.past.bundles if bundle.count):  # some rows may have written nothing yet
        keys, labels = (
            x.unflatten(0, (len(bundle.rows), HEADS)) for x in (bundle.holding.keys, bundle.holding.labels.view)
        )
        check(keys, labels, torch.ones_like(labels[..., 0], dtype=torch.bool))
