"""What the study of selectivity says of keys and queries alone: spans of attention, buckets, where both lie."""

import math

import pytest
import torch
from benchmarks.selectivity import key_pictures as pictures
from benchmarks.selectivity.attention_span import FIXED, Cut, logits_by_head, span
from benchmarks.selectivity.bucket_sizes import (
    KINDS,
    bucket_sizes,
    deviation,
    deviations,
    distance,
    even_deviation,
    pools_of,
)
from benchmarks.selectivity.key_query_spread import (
    RECENT,
    evenly,
    key_query_spread,
    logit_histograms,
    principal_components,
    principal_map,
    shares,
)
from benchmarks.selectivity.own_buckets import cluster, folder_of, keys_of, make_buckets
from benchmarks.selectivity.separation import (
    distance_of_means,
    nearest_mean_accuracy,
    negative_products,
    separation,
)

import zoo
from kvsketch.algorithms import saap
from kvsketch.attention import NO_MASS
from kvsketch.caches.lookup.key_index import read_index
from kvsketch.evaluation.layers.plan import Prompt
from kvsketch.huggingface.capture import Captured, capture

HEADS, GROUP, WIDTH = 2, 3, 8
TOKENS = 230
CUT = Cut(sinks=2, window=40, asking=10)


def captured(tokens=TOKENS, layer=0, seed=0, softcap=None):
    generator = torch.Generator().manual_seed(seed)
    queries, queries_before = torch.randn(2, HEADS * GROUP, tokens, WIDTH, generator=generator)
    keys, values, keys_before = torch.randn(3, HEADS, tokens, WIDTH, generator=generator)
    return Captured(layer, queries, keys, values, 0.5, softcap, queries_before, keys_before)


def text(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Prompt(f"text {seed}", torch.randint(2, zoo.VOCABULARY, (1, tokens), generator=generator))


# -- spans of attention


@pytest.mark.parametrize("tokens", [84, 116, 117, 230])
def test_the_past_is_what_has_left_the_window_in_whole_blocks(tokens):
    past = CUT.past(tokens)
    assert past.start == 2
    assert (past.stop - past.start) % 32 == 0
    assert 0 <= tokens - 10 - 40 - past.stop < 32


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_span_is_that_of_the_definition(softcap):
    seen, past = captured(softcap=softcap), CUT.past(TOKENS)
    found = span(seen, CUT, top=5)
    assert found["past"] == past.stop - past.start
    for head in range(HEADS * GROUP):
        tops, pasts, each = [], [], []
        for query in range(TOKENS - 10, TOKENS):
            logits = seen.keys[head // GROUP, : query + 1] @ seen.queries[head, query] * 0.5
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            attention = torch.softmax(logits, 0)
            pasts.append(float(attention[past].sum()))
            each.append(attention[past] / attention[past].sum())
            tops.append(float(attention[past].sort().values[-5:].sum() / attention[past].sum()))
        assert found["top_shares"][head] == pytest.approx(sum(tops) / 10, rel=1e-4)
        assert found["past_shares"][head] == pytest.approx(sum(pasts) / 10, rel=1e-4)
        largest = torch.stack(each).mean(0).sort().values[-FIXED:].sum()
        assert found["fixed_shares"][head] == pytest.approx(float(largest), rel=1e-4)


def test_as_many_keys_as_there_are_have_all_of_the_attention():
    found = span(captured(), CUT, top=1000)
    assert found["top_shares"] == pytest.approx([1.0] * 6, abs=1e-5)


def test_queries_do_not_see_what_comes_after_them():
    for logits in logits_by_head(captured(), 10):
        later = torch.arange(TOKENS) > torch.arange(TOKENS - 10, TOKENS)[:, None]
        assert torch.equal(logits == NO_MASS, later.expand_as(logits))


def test_a_text_without_a_past_is_refused():
    CUT.check_text("book", 2 + 32 + 40 + 10)
    with pytest.raises(
        ValueError, match="book has 83 tokens; the study needs at least 84: 2 first ones, a window of 40"
    ):
        CUT.check_text("book", 83)


@pytest.mark.parametrize(
    ("changes", "message"), [({"sinks": -1}, "sinks"), ({"window": 0}, "window"), ({"asking": 0}, "ask")]
)
def test_cuts_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"{message}.* must be a whole number of at least"):
        Cut(**changes)


# -- sizes of buckets


def test_deviation_and_distance_of_known_buckets():
    buckets = torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]])
    assert torch.equal(bucket_sizes(buckets, 4), torch.tensor([[3, 1, 0, 0], [1, 1, 1, 1]]).double())
    assert deviation(buckets, 4).tolist() == pytest.approx([math.sqrt((4 + 0 + 1 + 1) / 4), 0])
    others = torch.tensor([[0, 1], [0, 1]])
    assert distance(buckets, others, 4).tolist() == pytest.approx([0.25, 0.5])
    assert distance(buckets, buckets, 4).tolist() == [0, 0]


def test_keys_drawn_evenly_deviate_as_much_as_chance_says():
    """The mean of squares over 400 draws, within four standard errors."""
    generator = torch.Generator().manual_seed(0)
    squares = deviation(torch.randint(0, 16, (400, 500), generator=generator), 16).square()
    error = float(squares.std() / math.sqrt(400))
    assert abs(float(squares.mean()) - even_deviation(500, 16) ** 2) < 4 * error


def test_all_kinds_of_samples_have_one_size_and_come_from_where_they_say():
    def made(first, tokens):
        return torch.arange(first, first + tokens)[None]  # every key is a bucket of its own

    training, others = [made(0, 100), made(100, 80)], [made(200, 60), made(300, 70)]
    pools = pools_of(training, others, draws=5)
    assert [len(drawn) for drawn in pools.values()] == [5] * 4
    assert torch.equal(pools[KINDS[0]][3], torch.arange(180)[None])
    assert torch.equal(pools[KINDS[1]][0], torch.cat([made(200, 60), made(300, 70)], 1))
    assert [pool[0, 0].item() for pool in pools[KINDS[2]]] == [200, 300, 200, 300, 200]
    assert torch.equal(pools[KINDS[3]][1], torch.cat([made(212, 12), made(312, 12)], 1))
    found = deviations(training, others, 400, draws=5)
    assert found["keys"] == 24
    # None is drawn twice: 24 buckets of one key each.
    expected = float(deviation(torch.arange(24)[None], 400))
    for kind in KINDS:
        assert found["kinds"][kind]["deviations"] == [[pytest.approx(expected)]] * 5


def test_a_place_in_texts_deviates_most_where_buckets_go_by_position():
    """Buckets by position, as those of rotated keys: a tenth of positions falls into a tenth of the buckets."""
    texts = [torch.arange(400)[None] // 40 for _ in range(4)]
    kinds = deviations(texts[:2], texts[2:], 10)["kinds"]
    means = {kind: sum(x[0] for x in found["deviations"]) / 10 for kind, found in kinds.items()}
    assert means["a tenth of positions"] == pytest.approx(3.0)  # one of ten buckets has all
    assert max(means[kind] for kind in KINDS[:3]) < 0.5
    assert all(x[0] == pytest.approx(0.9) for x in kinds["a tenth of positions"]["distances"])


# -- where keys and queries lie


def test_principal_components_are_the_directions_of_a_long_cloud():
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(5, 5, generator=generator)).Q
    points = torch.randn(500, 5, generator=generator) * torch.tensor([9.0, 3.0, 0.1, 0.1, 0.1]) @ turn + 7
    centre, directions = principal_components(points)
    torch.testing.assert_close(centre, points.mean(0))
    torch.testing.assert_close((directions @ turn[:2].T).abs(), torch.eye(2), atol=0.05, rtol=0)
    assert bool((directions.gather(1, directions.abs().argmax(1, keepdim=True)) > 0).all())


def test_a_map_is_a_projection_of_the_points_it_names():
    seen = captured()
    keys, queries = seen.keys[0], seen.queries[0]
    found = principal_map(keys, queries, sinks=2)
    centre, directions = principal_components(torch.cat([keys[2:], queries[2:]]))
    assert len(found["keys"]) == TOKENS - 2  # all of a short text
    torch.testing.assert_close(torch.tensor(found["queries"]), (queries[2:] - centre) @ directions.T)
    torch.testing.assert_close(torch.tensor(found["sink keys"]), (keys[:2] - centre) @ directions.T)


def test_histograms_count_every_pair_of_their_kind_once():
    seen = captured(tokens=120)
    queries, keys = seen.queries[1], seen.keys[0]
    found = logit_histograms(queries, keys, 0.5, sinks=2)
    edges = torch.tensor(found["edges"])
    expected = {"first keys": [], "keys between": [], "latest keys": []}
    for query in range(2 + RECENT, 120):
        for key in range(query + 1):
            kind = "first keys" if key < 2 else "latest keys" if key > query - RECENT else "keys between"
            expected[kind].append(float(queries[query] @ keys[key] * 0.5))
    for kind, logits in expected.items():
        assert sum(found["shares"][kind]) == pytest.approx(1, abs=1e-5)
        below = [float((torch.tensor(logits) < edge).double().mean()) for edge in edges[1:-1]]
        counted = torch.tensor(found["shares"][kind]).cumsum(0)[:-1]
        torch.testing.assert_close(counted, torch.tensor(below), atol=2.5 / len(logits), rtol=0)  # ties at edges


def test_shares_of_buckets_are_those_of_the_assignment():
    vectors, centroids = torch.eye(4)[[0, 0, 1, 3]], torch.eye(4)
    assert shares(vectors, centroids) == [0.5, 0.25, 0, 0.25]


def test_everything_of_a_head_comes_from_its_kv_head_and_before_rotation():
    seen = captured()
    centroids = torch.nn.functional.normalize(torch.randn(5, WIDTH), dim=1)
    found = key_query_spread(seen, 4, centroids, sinks=2)
    assert found["buckets"]["keys"] == shares(seen.keys_before[1, 2:], centroids)
    assert found["buckets"]["queries"] == shares(seen.queries_before[4, 2:], centroids)
    assert found["logits"] == logit_histograms(seen.queries[4], seen.keys[1], 0.5, 2)
    assert found["maps"]["after rotation"] == principal_map(seen.keys[1], seen.queries[4], 2)
    assert found["maps"]["before rotation"] == principal_map(seen.keys_before[1], seen.queries_before[4], 2)


def test_clouds_apart_are_told_apart_and_others_are_not():
    """2,000 vectors each: within four standard errors of a half, √(1/4/2000), where both are the same cloud."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(2, 2000, WIDTH, generator=generator)
    assert nearest_mean_accuracy(queries, keys) == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / 2000))
    assert distance_of_means(queries, keys) < 0.1
    apart = torch.zeros(WIDTH).index_fill_(0, torch.tensor(2), 5.0)
    assert nearest_mean_accuracy(queries + apart, keys - apart) > 0.99
    assert distance_of_means(queries + apart, keys - apart) == pytest.approx(10 / math.sqrt(2 * WIDTH), rel=0.05)
    assert negative_products(queries + apart, keys - apart, sinks=1) > 0.95


def test_a_separation_is_of_each_query_head_and_its_kv_head():
    seen = captured()
    centroids = torch.nn.functional.normalize(torch.randn(HEADS, 5, WIDTH), dim=2)
    found = separation(seen, centroids, sinks=2)
    head, kv_head = 4, 1
    queries, keys = seen.queries_before[head, 2:], seen.keys_before[kv_head, 2:]
    assert found["before rotation"]["accuracy"][head] == nearest_mean_accuracy(queries, keys)
    assert found["after rotation"]["distance"][head] == distance_of_means(
        seen.queries[head, 2:], seen.keys[kv_head, 2:]
    )
    of_queries, of_keys = (torch.tensor(shares(x, centroids[kv_head])) for x in (queries, keys))
    assert found["largest_share"][head] == pytest.approx(float(of_queries.max()))
    assert found["bucket_distance"][head] == pytest.approx(float((of_queries - of_keys).abs().sum() / 2), rel=1e-5)


def test_evenly_means_from_the_first_to_the_last():
    assert evenly(3, 8, 100).tolist() == [3, 4, 5, 6, 7]
    assert evenly(0, 101, 5).tolist() == [0, 25, 50, 75, 100]


# -- buckets of the study's own


def test_own_buckets_are_k_means_of_the_keys_of_all_texts(tmp_path):
    model, texts = zoo.build("llama"), [text(60), text(50, 1)]
    assert len(list(make_buckets(model, texts, [1, 2], [4, 6], tmp_path, sinks=1))) == 1 + 2 * 2
    index = read_index(folder_of(tmp_path, 6))
    assert (index.buckets, index.layers) == (6, [1, 2])
    before, after = keys_of(model, texts, [1, 2], 1)[2]
    assert before.shape == (2, 59 + 49, 16)
    seen = [capture(model, one.ids, [2], before_rotation=True)[0] for one in texts]
    assert torch.equal(before, torch.cat([x.keys_before[:, 1:] for x in seen], 1))
    learnt = index.layer(2)
    for head in range(2):
        for keys, found in ((before[head], learnt.centroids[head]), (after[head], learnt.rotated_centroids[head])):
            # k-means has settled, or nearly: a further step moves little
            again = torch.stack([keys[saap.assign(keys, found) == bucket].mean(0) for bucket in range(6)])
            torch.testing.assert_close(torch.nn.functional.normalize(again, dim=1), found, atol=0.2, rtol=0)
    assert torch.equal(learnt.second, learnt.centroids.mT)  # queries are assigned as keys are
    assert not learnt.second_bias.any()


def test_own_buckets_are_made_once_and_again_for_other_texts(tmp_path):
    model = zoo.build("llama")
    assert list(make_buckets(model, [text(60)], [1], [4], tmp_path, 1))
    assert not list(make_buckets(model, [text(60)], [1], [4], tmp_path, 1))
    (folder_of(tmp_path, 4) / "index.json").write_text("{")
    assert list(make_buckets(model, [text(60)], [1], [4], tmp_path, 1)), "what is damaged is made anew"
    first = read_index(folder_of(tmp_path, 4)).layer(1).centroids
    assert list(make_buckets(model, [text(60, 1)], [1], [4], tmp_path, 1))
    assert not torch.equal(first, read_index(folder_of(tmp_path, 4)).layer(1).centroids)


def test_more_buckets_than_keys_are_refused():
    keys = torch.randn(2, 5, WIDTH)
    with pytest.raises(ValueError, match="9 buckets need as many keys, the texts have 5: give more texts or fewer"):
        cluster(keys, keys, 9)


# -- pictures


def test_pictures_are_made_of_rows_alone():
    seen = captured()
    spans = [{"layer": layer, "top": 5} | span(seen, CUT, 5) for layer in range(3)]
    (axes,) = pictures.spans_picture(spans).axes
    assert len(axes.lines) == 6  # dots and a mean for each layer
    assert axes.lines[2].get_ydata() == pytest.approx(spans[1]["top_shares"])
    texts = [torch.randint(0, 4, (2, 100)) for _ in range(4)]
    sizes = [
        {"layer": layer, "buckets": 4, "rotated": rotated} | deviations(texts[:2], texts[2:], 4)
        for layer in range(2)
        for rotated in (False, True)
    ]
    panels = pictures.sizes_picture(sizes).axes
    assert [axes.get_title(loc="left") for axes in panels] == [
        "layer 0, 4 buckets, 20 keys",
        "layer 1, 4 buckets, 20 keys",
    ]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == list(KINDS)
    centroids = torch.nn.functional.normalize(torch.randn(5, WIDTH), dim=1)
    spreads = [{"layer": 1, "head": head} | key_query_spread(seen, head, centroids) for head in range(2)]
    assert len(pictures.spreads_picture(spreads).axes) == 8
    separations = [{"layer": layer} | separation(seen, centroids.expand(HEADS, -1, -1)) for layer in range(3)]
    accuracies, _ = pictures.separations_picture(separations).axes
    assert accuracies.lines[2].get_ydata() == pytest.approx(separations[1]["before rotation"]["accuracy"])
