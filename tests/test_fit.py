"""A fit: every layer as one head at a time by the paper, a folder that loads, and a stop anywhere costs nothing."""

import json
from dataclasses import replace

import pytest
import torch

from fitted import LAYERS, TOKENIZER, fitted, result_of, same, settings, tiny_model, write_corpus
from kvsketch.algorithms import saap
from kvsketch.caches.lookup.key_index import read_index
from kvsketch.files import read_json, write_json, write_tensors
from kvsketch.fitting.checkpoint import train_or_resume
from kvsketch.fitting.classifiers import train
from kvsketch.fitting.corpus import read_corpus
from kvsketch.fitting.fit import split
from kvsketch.fitting.layer import classifiers_for, index_of
from kvsketch.fitting.measure import measure
from kvsketch.fitting.pool import Clusters, Pool, cluster, fill_pool, sample_keys
from kvsketch.fitting.settings import FitSettings, Recipe, ShardSettings, generator
from kvsketch.fitting.shards import Reader, Shards, read_layer
from kvsketch.huggingface.identity import describe_model

LAYER = 1
CHOSEN = settings(keys_at_most=150, pool=40)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Shards of some texts, and their lengths."""
    folder = tmp_path_factory.mktemp("corpus")
    model, limits = tiny_model(), replace(CHOSEN.shards, layers=(LAYER,))
    corpus = read_corpus([write_corpus(folder)], TOKENIZER, tokens=120, least=limits.least_tokens, apart=limits.apart)
    shards = Shards(folder, {}, limits)
    for text in corpus.texts:
        Reader(lambda: model, shards)(text)
    return [shards.path(text) for text in corpus.texts], [len(text.ids) for text in corpus.texts]


# -- a layer, as one head at a time


def test_clusters_are_those_of_each_head_alone(paths):
    draw = generator(CHOSEN.seed, LAYER, "keys")
    before, after = sample_keys(*paths, LAYER, CHOSEN, draw)
    start = [torch.randperm(150, generator=draw)[: CHOSEN.buckets] for _ in range(2)]
    found = cluster(*paths, LAYER, CHOSEN, "cpu")
    for lane in range(2):
        alone = saap.spherical_k_means(before[lane], start[lane], CHOSEN.iterations)
        torch.testing.assert_close(found.before[lane], alone)
        rotated = saap.spherical_k_means(after[lane], start[lane], CHOSEN.iterations)
        torch.testing.assert_close(found.rotated[lane], rotated)


def test_keys_to_cluster_are_different_ones_from_all_texts_and_no_sinks(paths):
    before, after = sample_keys(*paths, LAYER, CHOSEN, generator(0))
    assert before.shape == after.shape == (2, 150, 16)
    layers = [read_layer(path, LAYER) for path in paths[0]]
    there = torch.cat([layer.keys[0, 1:] for layer in layers])  # of the first KV head, without the sinks
    same_key = (after[0][:, None] == there).all(2)
    assert same_key.any(1).all()
    assert len(after[0].unique(dim=0)) > 140  # texts that begin alike have the same keys there
    texts = torch.arange(len(layers)).repeat_interleave(torch.tensor([layer.keys.shape[1] - 1 for layer in layers]))
    assert len(texts[same_key.int().argmax(1)].unique()) == len(layers)
    everything = replace(CHOSEN, keys_at_most=10**6)
    assert sample_keys(*paths, LAYER, everything, generator(0))[1].shape[1] == len(there)


def test_the_pool_has_every_heads_shares_of_its_own_text(paths):
    centroids = cluster(*paths, LAYER, CHOSEN, "cpu")
    pool = fill_pool(paths[0], LAYER, centroids.before, CHOSEN, "cpu")
    each = CHOSEN.pool // len(paths[0])
    for lane in range(2):
        place = 0
        for path in paths[0]:
            shard = read_layer(path, LAYER)
            mine = (shard.query_heads == lane).nonzero()[:each, 0]
            assert len(mine) == each
            rows = slice(place, place + each)
            assert torch.equal(pool.queries[lane, rows], shard.queries_before[mine])
            buckets = saap.assign(shard.keys_before[lane], centroids.before[lane])
            visible = saap.to_learn_from(shard.query_positions[mine], shard.key_positions, CHOSEN.shards.apart)
            queries, keys = shard.queries[mine], shard.keys[lane]
            alone = saap.bucket_shares(queries, keys, buckets, CHOSEN.buckets, shard.scale, visible)
            torch.testing.assert_close(pool.shares[lane, rows], alone)
            place += each
    torch.testing.assert_close(pool.shares.sum(2), torch.ones(2, CHOSEN.pool))


def test_what_is_measured_is_what_single_queries_find(paths):
    """Recall and selectivity of four probes, by the paper's own functions, a query at a time."""
    chosen = replace(CHOSEN, buckets=16)
    centroids = cluster(*paths, LAYER, chosen, "cpu")
    pool = fill_pool(paths[0], LAYER, centroids.before, chosen, "cpu")
    classifiers = classifiers_for(centroids, pool, chosen, LAYER).eval()
    found = measure(paths[0][:1], LAYER, classifiers, centroids, chosen, "cpu")
    shard, recalls, read = read_layer(paths[0][0], LAYER), {}, {}
    for lane in range(2):
        before, rotated = (
            saap.assign(keys[lane], centres[lane])
            for keys, centres in ((shard.keys_before, centroids.before), (shard.keys, centroids.rotated))
        )
        for row in (shard.query_heads == lane).nonzero()[:, 0]:
            query, asked = shard.queries[row][None], shard.queries_before[row][None]
            far = saap.to_learn_from(shard.query_positions[row][None], shard.key_positions, chosen.shards.apart)
            ways = {
                "classifier": (classifiers.classifier_of(lane).log_probabilities(asked).exp(), before),
                "kmeans": (asked @ centroids.before[lane].T, before),
                "kmeans_rope": (query @ centroids.rotated[lane].T, rotated),
            }
            for name, (scores, buckets) in ways.items():
                visit = saap.visited(scores, 8)
                shares = saap.bucket_shares(query, shard.keys[lane], buckets, 16, shard.scale, far)
                recalls.setdefault((name, lane), []).append(float(shares[0, visit].sum()))
                read.setdefault(name, []).append(saap.selectivity(buckets[far[0]], visit))
    for name in ("classifier", "kmeans", "kmeans_rope"):
        row = found[name][-1]
        assert row["probes"] == 8
        heads = [sum(recalls[name, lane]) / len(recalls[name, lane]) for lane in range(2)]
        assert row["recall_of_heads"] == pytest.approx(heads, abs=1e-4)
        assert row["recall"] == pytest.approx(sum(heads) / 2, abs=1e-4)
        assert row["selectivity"] == pytest.approx(sum(read[name]) / len(read[name]), abs=1e-4)


def random_pool(buckets=8):
    """Queries with shares, and clusters that have nothing to do with them."""
    draw = generator("pool")
    pool = Pool(torch.randn(2, 40, 16, generator=draw) + 1, torch.rand(2, 40, buckets, generator=draw).softmax(2))
    shapes = ((2, buckets, 16), (2, buckets, 16), (2, 16, buckets), (2, 1, buckets))
    return pool, Clusters(*(torch.randn(*shape, generator=draw) for shape in shapes))


def test_what_clusters_say_of_a_query_is_the_logit_of_a_mean_key_and_how_many_there_are(paths):
    found = cluster(*paths, LAYER, CHOSEN, "cpu")
    keys, _ = sample_keys(*paths, LAYER, CHOSEN, generator(CHOSEN.seed, LAYER, "keys"))
    scale = read_layer(paths[0][0], LAYER).scale
    for lane in range(2):
        buckets = saap.assign(keys[lane], found.before[lane])
        for bucket in buckets.unique().tolist():
            members = keys[lane, buckets == bucket]
            torch.testing.assert_close(found.weight[lane, :, bucket], scale * members.mean(0))
            torch.testing.assert_close(found.bias[lane, 0, bucket].exp(), torch.tensor(len(members) / 150))


@pytest.mark.parametrize("hidden", [0, 32, 50])
def test_classifiers_begin_where_clusters_are(hidden):
    """Exactly, but for the units that are not needed for that; too narrow ones and the paper's begin at random."""
    pool, clusters = random_pool()
    classifiers = classifiers_for(clusters, pool, settings(hidden=hidden), 0).eval()
    expected = torch.log_softmax(pool.queries @ clusters.weight + clusters.bias, 2)
    with torch.no_grad():
        found = classifiers(pool.queries)
        if hidden == 50:
            assert not torch.equal(found, expected)
            classifiers.second[:, 32:] = 0.0
            found = classifiers(pool.queries)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)  # a millionth of variance is added
    at_random = classifiers_for(clusters, pool, settings(hidden=hidden, start="random"), 0).eval()
    assert not torch.allclose(at_random(pool.queries), expected, atol=0.1)


@pytest.mark.parametrize("hidden", [10, 0])
def test_an_index_says_what_the_classifiers_say(hidden):
    (pool, clusters), numbers = random_pool(), generator("batches")
    classifiers = classifiers_for(clusters, pool, settings(hidden=hidden), 0)
    batches = (torch.randint(40, (16,), generator=numbers) for _ in range(10))
    list(train(classifiers, pool.queries, pool.shares, batches, rate=1e-2))
    index = index_of(clusters, classifiers)
    assert (index.first is None) == (hidden == 0)
    inner = pool.queries
    if index.first is not None and index.first_bias is not None:
        inner = torch.relu(inner @ index.first + index.first_bias)
    with torch.no_grad():
        expected = classifiers(pool.queries)
    torch.testing.assert_close(torch.log_softmax(inner @ index.second + index.second_bias, 2), expected)


@pytest.mark.parametrize("hidden", [10, 0])
def test_rounded_products_train_nearly_the_same_and_answer_unrounded(hidden):
    pool, clusters = random_pool()

    def trained(products):
        classifiers = classifiers_for(clusters, pool, settings(hidden=hidden, products=products), 0)
        numbers = generator("batches")
        batches = (torch.randint(40, (16,), generator=numbers) for _ in range(30))
        losses = list(train(classifiers, pool.queries, pool.shares, batches, rate=1e-2))
        return classifiers, torch.stack(losses)

    (exact, losses), (rounded, others) = trained("float32"), trained("bfloat16")
    assert not torch.equal(losses, others), "nothing was rounded"
    assert float(others[-1].mean()) < 0.6 * float(others[0].mean())
    torch.testing.assert_close(others, losses, rtol=0.05, atol=0.02)
    for one in (exact, rounded):
        assert all(parameter.dtype == torch.float32 for parameter in one.parameters())
        found = torch.stack([one.classifier_of(lane).log_probabilities(pool.queries[lane]) for lane in range(2)])
        with torch.no_grad():
            torch.testing.assert_close(one(pool.queries), found)


# -- the whole


def test_a_fit_leaves_an_index_that_loads(tmp_path):
    model = tiny_model()
    index = fitted(tmp_path, model)
    assert index.layers == list(range(LAYERS))
    assert index.buckets == 8
    layer = index.layer(2)
    assert layer.centroids.shape == layer.rotated_centroids.shape == (2, 8, 16)
    torch.testing.assert_close(layer.centroids.norm(dim=2), torch.ones(2, 8))
    index.check_model(describe_model(model))
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == [
        "index.json", "layer-00.safetensors", "layer-01.safetensors", "layer-02.safetensors",
    ]  # fmt: skip
    assert len({path.stat().st_mode for path in (tmp_path / "index").iterdir()}) == 1, "who may read one may read all"
    about = index.description
    assert about["model"]["id"] == "tiny"
    assert about["settings"]["recipe"]["steps"] == 12
    assert [source["file"] for source in about["corpus"]] == ["corpus.jsonl"]
    sizes = about["made_with"]
    assert sizes["fitted_to"]["texts"] + sizes["held_out"]["texts"] == about["corpus"][0]["texts"]
    measured = about["layers"]["1"]["held_out"]
    assert [row["probes"] for row in measured["classifier"]] == [1, 2, 4]
    assert all(0 < row["recall"] < 1 and 0 < row["selectivity"] < 1 for row in measured["kmeans"])


def test_the_same_settings_give_the_same_index_and_another_seed_another(tmp_path):
    fitted(tmp_path, out=tmp_path / "one")
    fitted(tmp_path, out=tmp_path / "two")
    fitted(tmp_path, chosen=settings(seed=1), out=tmp_path / "three")
    first = result_of(tmp_path / "one")
    assert same(first, result_of(tmp_path / "two"))
    one, other = (tensors["layer-01.safetensors"]["second"] for _, tensors in (first, result_of(tmp_path / "three")))
    assert not torch.equal(one, other)


def test_an_interrupted_fit_ends_as_if_it_had_not_been(tmp_path):
    """It stops while reading, between two stages of a layer, and twice inside a training: saved just then, or not."""
    fitted(tmp_path, out=tmp_path / "whole")
    out = tmp_path / "parts"

    def stop_at(part, done):
        def show(progress):
            if progress.part == part and progress.done == done:
                raise KeyboardInterrupt

        return show

    reads = []
    for part, done, save_every in (
        ("reading", 2, 0.0),
        ("fitting", 0, 0.0),
        ("fitting", 5, 0.0),
        ("fitting", 9, 1e9),  # these steps were not saved
        ("fitting", 12 + 7, 0.0),
    ):
        with pytest.raises(KeyboardInterrupt):
            fitted(tmp_path, out=out, save_every=save_every, show=stop_at(part, done))
        reads.append({path: path.stat().st_mtime_ns for path in (out / "work" / "shards").glob("*")})
        assert not (out / "index.json").is_file()
        with pytest.raises(ValueError, match=r"is no index: it has no index.json"):
            read_index(out)
    assert len(reads[0]) == 2
    assert reads[1] == reads[-1], "no text was read again"
    assert reads[0].items() <= reads[1].items()
    fitted(tmp_path, out=out)
    assert same(result_of(tmp_path / "whole"), result_of(out))
    assert not (out / "work").exists()


def test_training_goes_on_where_it_was_saved(tmp_path):
    """Not only with the same end: steps that were saved are not done again."""
    pool, clusters = random_pool()
    recipe, steps = Recipe(steps=9, batch=8), []

    def stop(step, loss):
        steps.append(step)
        if step == 4:
            raise KeyboardInterrupt

    def trained(path, show=lambda step, loss: steps.append(step)):
        classifiers = classifiers_for(clusters, pool, settings(), 0)
        train_or_resume(path, classifiers, pool, recipe, generator("batches"), layer=0, save_every=0.0, show=show)
        return classifiers.state_dict()

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "stopped", stop)
    again = trained(tmp_path / "stopped")
    assert steps == list(range(1, 10))
    whole = trained(tmp_path / "whole")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in again.items())


@pytest.mark.parametrize("steps", [1, 12])
def test_a_training_that_diverges_is_refused_and_never_taken_for_finished(steps, tmp_path):
    """Also where the last step is the one that went too far: every loss was finite."""
    shards, recipe = tmp_path / "shards", Recipe(steps=steps, batch=16, rate=1e30)
    diverging = replace(settings(layers=(1,)), recipe=recipe)
    error = (
        rf"layer 1: expected a finite loss after 1 of {steps} steps, got (nan|-?inf): the training diverged at a rate "
        r"of 1e\+30. Choose a smaller --rate, and a new folder"
    )
    for _ in range(2):  # going on is no way out
        with pytest.raises(ValueError, match=error):
            fitted(tmp_path, chosen=diverging, out=tmp_path / "one", shards_folder=shards, save_every=0.0)
        assert not list((tmp_path / "one").glob("*.safetensors"))
    with pytest.raises(ValueError, match=r"it has no index.json"):
        read_index(tmp_path / "one")
    slower = replace(diverging, recipe=replace(recipe, rate=1e-3))
    assert fitted(tmp_path, chosen=slower, out=tmp_path / "two", shards_folder=shards).layers == [1]


def test_what_is_not_finite_to_begin_with_is_not_the_rates_fault(tmp_path):
    pool, clusters = random_pool()
    pool.queries[0] = torch.nan
    classifiers = classifiers_for(clusters, pool, settings(start="random"), 0)
    with pytest.raises(ValueError, match=r"layer 7: .* after 0 of 500 steps, got nan: the model's own queries or keys"):
        train_or_resume(
            tmp_path / "training", classifiers, pool, Recipe(), generator("batches"),
            layer=7, save_every=0.0, show=lambda step, loss: None,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [write_json, lambda path, about: write_tensors(path, {}, about)])
def test_no_description_holds_what_is_no_number(write, tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(tmp_path / "about", {"recall": float("nan")})
    assert not (tmp_path / "about").exists()


def test_a_finished_layer_keeps_no_work(tmp_path):
    """Nor one that was killed between its last two acts."""
    fitted(tmp_path, out=tmp_path / "whole")
    out, work = tmp_path / "parts", tmp_path / "parts" / "work"

    def stop(progress):
        if (progress.part, progress.done) == ("fitting", 12 + 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path, out=out, keep=True, save_every=0.0, show=stop)
    assert len(list(work.glob("layer-00.*"))) == len(list(work.glob("layer-01.*"))) == 3

    def look(progress):
        if progress.part == "fitting" and progress.done:
            finished = {path.stem for path in out.glob("layer-*")}
            assert not finished & {path.name.split(".")[0] for path in work.glob("layer-*")}

    fitted(tmp_path, out=out, show=look)
    assert same(result_of(tmp_path / "whole"), result_of(out))


def test_shards_in_a_folder_of_their_own_serve_another_fit(tmp_path):
    shards = tmp_path / "shards"
    fitted(tmp_path, shards_folder=shards, out=tmp_path / "one")
    made = {path: path.stat().st_mtime_ns for path in shards.iterdir()}
    assert len(made) == 5
    fitted(tmp_path, chosen=settings(buckets=4), shards_folder=shards, out=tmp_path / "two", keep=True)
    assert {path: path.stat().st_mtime_ns for path in shards.iterdir()} == made
    assert (tmp_path / "two" / "work" / "layer-00.pool.safetensors").is_file()


def test_layers_that_look_near_are_left_out_or_refused_by_name(tmp_path):
    far = settings(away=1000)
    with pytest.raises(ValueError, match=r"no query of layers \[0, 1, 2\] has its best key more than 1000 tokens away"):
        fitted(tmp_path, chosen=far)
    index = fitted(tmp_path, chosen=settings(layers=(2,)), out=tmp_path / "one")
    assert index.layers == [2]
    with pytest.raises(ValueError, match=r"has layers \[2\], but layer 1 is asked for"):
        index.layer(1)


def test_another_fit_in_the_same_folder_is_refused_by_name(tmp_path):
    fitted(tmp_path, chosen=settings(steps=2))
    notes = []
    fitted(tmp_path, chosen=settings(steps=2), note=notes.append)
    assert "finished already" in notes[-1]
    about = tmp_path / "index" / "index.json"
    known = read_json(about)
    assert known["settings"]["recipe"].pop("products") == "float32"
    write_json(about, known)  # as it was before there was a choice
    fitted(tmp_path, chosen=settings(steps=2), note=notes.append)
    assert "finished already" in notes[-1]
    with pytest.raises(ValueError, match=r"another fit: settings.recipe.products 'float32', now 'bfloat16'"):
        fitted(tmp_path, chosen=settings(steps=2, products="bfloat16"))
    with pytest.raises(ValueError, match=r"holds another fit: settings.recipe.steps 2, now 3. Go on with that, or"):
        fitted(tmp_path, chosen=settings(steps=3))
    with pytest.raises(ValueError, match=r"another fit: model.fingerprint"):
        fitted(tmp_path, tiny_model(1), settings(steps=2))
    write_corpus(tmp_path, texts=6)
    with pytest.raises(ValueError, match=r"another fit: corpus.0.sha256"):
        fitted(tmp_path, chosen=settings(steps=2))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "precious").touch()
    with pytest.raises(ValueError, match="has files in it, and none of a fit"):
        fitted(tmp_path, out=mine)
    assert [path.name for path in mine.iterdir()] == ["precious"]


def test_what_cannot_be_fitted_is_refused_by_name_before_anything_is_written(tmp_path):
    write_corpus(tmp_path, texts=1, words=30)
    with pytest.raises(ValueError, match="a fit needs two texts at least"):
        fitted(tmp_path)
    assert not (tmp_path / "index").exists(), "it can be tried again there"
    write_corpus(tmp_path, texts=2, words=30)
    with pytest.raises(ValueError, match=r"500 buckets need at least as many keys, and the texts to fit to have \d+:"):
        fitted(tmp_path, chosen=settings(buckets=500))
    with pytest.raises(ValueError, match=r"layers \[7\] are no full-attention layers"):
        fitted(tmp_path, chosen=settings(layers=(7,)))
    assert not (tmp_path / "index").exists()


def test_texts_are_held_out_at_random_and_at_least_one(tmp_path):
    corpus = read_corpus([write_corpus(tmp_path, 20)], TOKENIZER, tokens=120, least=30, apart=24)
    for share, count in ((0.01, 1), (0.25, 5), (0.99, 19)):
        train_texts, held_out = split(corpus, settings(held_out=share))
        assert len(held_out) == count
        assert {text.digest for text in [*train_texts, *held_out]} == {text.digest for text in corpus.texts}
    one, other = (split(corpus, settings(held_out=0.25, seed=seed))[1] for seed in (0, 1))
    assert [text.digest for text in one] != [text.digest for text in other]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: FitSettings(buckets=1), "buckets must be at least 2, got 1"),
        (lambda: FitSettings(hidden=-1), "hidden must be at least 0, got -1"),
        (lambda: FitSettings(keys_at_most=100), "keys_at_most must be the number of buckets at least, 1024, got 100"),
        (lambda: FitSettings(held_out=1.0), "held_out must be between 0 and 1, got 1.0"),
        (lambda: ShardSettings(apart=-1), "apart must be at least 0, got -1"),
        (lambda: Recipe(rate=0.0), "rate must be positive, got 0.0"),
        (lambda: Recipe(start="here"), "start must be clusters or random, got 'here'"),
        (lambda: Recipe(schedule="linear"), "schedule must be cosine or constant, got 'linear'"),
        (lambda: Recipe(products="float16"), "products must be float32 or bfloat16, got 'float16'"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(make, error):
    with pytest.raises(ValueError, match=error):
        make()


def test_the_rate_stays_or_falls_to_nothing():
    assert list(Recipe(steps=3, rate=1e-5, schedule="constant").rates(1)) == [1e-5, 1e-5]
    falling = list(Recipe(steps=100, rate=1e-3).rates())
    assert falling[0] == 1e-3
    assert falling[50] == pytest.approx(5e-4)
    assert falling[-1] < 1e-6
    assert list(Recipe(steps=100, rate=1e-3).rates(40)) == falling[40:]


# -- what a model is known by


def test_a_model_is_known_whatever_the_precision_it_is_loaded_in():
    model = tiny_model().bfloat16()
    known = describe_model(model)
    assert describe_model(model.float()) == known
    assert json.loads(json.dumps(known)) == known
    assert known["rope"]["rope_type"] == "default"
    assert (known["layers"], known["heads"], known["kv_heads"], known["head_width"]) == (LAYERS, 4, 2, 16)
    assert describe_model(tiny_model(1))["fingerprint"] != known["fingerprint"]


def test_a_model_is_known_in_float16_though_its_smallest_weights_lose_bits_there():
    model = tiny_model()
    with torch.no_grad():
        weights = model.model.layers[0].mlp.up_proj.weight
        weights.mul_(torch.logspace(-8, 0, weights.numel()).view_as(weights))
    known, before = describe_model(model.bfloat16()), weights.float()
    assert describe_model(model.half()) == known
    assert not torch.equal(weights.float(), before)


def test_a_model_of_float32_counts_as_another_in_float16():
    known = describe_model(tiny_model())
    assert describe_model(tiny_model().bfloat16()) == known
    halved = describe_model(tiny_model().half())
    assert halved["fingerprint"] != known["fingerprint"]
    assert {**halved, "fingerprint": ""} == {**known, "fingerprint": ""}
