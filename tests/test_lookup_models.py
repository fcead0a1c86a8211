"""Methods that look tokens up, in whole models: exact where they read everything, on every family, padded or not."""

import copy
import gc
import shutil

import pytest
import torch

import kvsketch
from kvsketch.caches.lookup import key_index
from kvsketch.caches.lookup.key_index import own_index
from kvsketch.caches.lookup.saap import SaapLookup
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.huggingface.identity import describe_model
from made_index import make_index
from zoo import FAMILIES, build, tokens

WANTED = ["llama", "qwen3", "gemma3", "phi3", "gpt_oss", "smollm3"]
SHORT = "window=32, full_layers=1, staging=40"


@pytest.fixture(autouse=True)
def _models_are_gone_with_their_watches():
    yield
    gc.collect()


def index_of(folder, model, **given):
    known = describe_model(model)
    return make_index(folder, model, heads=known["kv_heads"], width=known["head_width"], **given)


def everything(index):
    """Specs that visit every bucket, or every bin."""
    return {
        "saap": f"saap(index={index!r}, probes=8, {SHORT})",
        "kmeans": f"kmeans(index={index!r}, probes=8, {SHORT})",
        "kmeans, rotated": f"kmeans(index={index!r}, probes=8, rope=True, {SHORT})",
        "lsh": f"lsh(bins=1, {SHORT})",
        "random": f"random_buckets(buckets=8, probes=8, {SHORT})",
        "retrieval": "retrieval(top=1.0, window=32)",
    }


def written(model, ids, cache, count=20, **given):
    return model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **given,
    )


def go_on(model, ids, cache, count=20):
    """Answer new tokens from a filled cache."""
    given = cache.new_tokens(ids)
    return written(model, given.pop("input_ids"), cache, count, **given)


def same_logits(got, expected, rows=slice(None)):
    for one, other in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(one[rows], other[rows], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in WANTED or name.startswith("gpt")])
def test_visiting_every_bucket_is_exact_attention(family, tmp_path):
    model = build(family, layers=4 if family == "gpt_oss" else 2)
    ids = tokens(2, 150)
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    ids[0, :37] = 0
    expected = written(model, ids, kvsketch.make_cache(model, "exact"), attention_mask=mask)
    spec = everything(index_of(tmp_path / "index", model))["saap"]
    cache = kvsketch.make_cache(model, spec)
    same_logits(written(model, ids, cache, attention_mask=mask), expected)
    looked = [layer for layer in cache.report().layers if layer.read is not None]
    assert looked, "some layers looked tokens up"
    assert all(share == 1.0 for layer in looked for share in layer.read)


@pytest.mark.parametrize("method", ["kmeans", "kmeans, rotated", "lsh", "random", "retrieval"])
def test_so_it_is_for_what_saap_is_compared_with(method, tmp_path):
    model = build("llama", layers=2)
    ids = tokens(2, 150)
    expected = written(model, ids, kvsketch.make_cache(model, "exact"))
    spec = everything(index_of(tmp_path / "index", model))[method]
    same_logits(written(model, ids, kvsketch.make_cache(model, spec)), expected)


def test_a_prompt_read_in_chunks_is_exact_and_the_first_layers_are_read_in_full(tmp_path):
    model = build("llama")
    ids = tokens(1, 200)
    spec = f"saap(index={index_of(tmp_path / 'index', model)!r}, probes=1, window=16, staging=16, full_layers=2)"
    at_once, chunked = (kvsketch.make_cache(model, spec) for _ in range(2))
    kvsketch.prefill(model, ids, at_once)
    kvsketch.prefill(model, ids, chunked, chunk=33)
    more = tokens(1, 6, seed=3)
    for got, expected in zip(chunked.layers, at_once.layers, strict=True):
        one, other = got.held.window.columns, expected.held.window.columns
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-5)
        assert torch.equal(one.ranks, other.ranks)
    same_logits(go_on(model, more, chunked), go_on(model, more, at_once))
    reports = at_once.report().layers
    assert [layer.read is None for layer in reports] == [True, True, False, False]
    assert all(0 < share < 1 for layer in reports[2:] for share in layer.read)
    assert all(0 < share < 1 for layer in reports[2:] for share in layer.recall)


def test_a_padded_batch_answers_as_its_rows_alone(tmp_path):
    model = build("llama", layers=2)
    spec = f"saap(index={index_of(tmp_path / 'index', model)!r}, probes=2, window=16, staging=20)"
    ids = tokens(2, 160)
    mask = torch.ones_like(ids)
    mask[0, :41] = 0
    ids[0, :41] = 0
    together = written(model, ids, kvsketch.make_cache(model, spec), 60, attention_mask=mask)
    for row, skip in ((0, 41), (1, 0)):
        alone = written(model, ids[row : row + 1, skip:], kvsketch.make_cache(model, spec), 60)
        for got, expected in zip(together.logits, alone.logits, strict=True):
            torch.testing.assert_close(got[row], expected[0], rtol=1e-3, atol=2e-5)


def test_a_saved_cache_goes_on_as_the_one_in_memory(tmp_path):
    model = build("llama")
    spec = f"saap(index={index_of(tmp_path / 'index', model)!r}, probes=2, window=16, staging=20, estimate=True)"
    cache = kvsketch.prefill(model, tokens(1, 170), kvsketch.make_cache(model, spec))
    cache.save(tmp_path / "cache.safetensors")
    question = tokens(1, 5, seed=9)
    forked = cache.fork()
    kvsketch.detach(model)
    loaded = kvsketch.load_cache(model, tmp_path / "cache.safetensors")
    answers = [go_on(model, question, one, 50) for one in (cache, forked, loaded)]
    for other in answers[1:]:
        for got, expected in zip(other.logits, answers[0].logits, strict=True):
            assert torch.equal(got, expected)
    for one, other in zip(loaded.report().layers, cache.report().layers, strict=True):
        assert (one.entries, one.error, one.read, one.recall) == (other.entries, other.error, other.read, other.recall)


def test_copies_share_what_was_learnt(tmp_path):
    model = build("llama")
    spec = f"saap(index={index_of(tmp_path / 'index', model)!r}, probes=2, window=16)"
    cache = kvsketch.prefill(model, tokens(1, 100), kvsketch.make_cache(model, spec))
    assert cache.fork().config.learnt is cache.config.learnt
    assert copy.deepcopy(cache.config).learnt is cache.config.learnt


def test_an_index_of_another_model_is_refused(tmp_path):
    index = index_of(tmp_path / "index", build("llama"))
    with pytest.raises(ValueError, match="fitted to a model of this architecture with other weights"):
        kvsketch.make_cache(build("llama", seed=1), f"saap(index={index!r})")
    with pytest.raises(ValueError, match="its model_type was 'llama', that of this model is 'qwen3'"):
        kvsketch.make_cache(build("qwen3"), f"saap(index={index!r})")
    with pytest.raises(ValueError, match="its kv_heads was 2, that of this model is 8"):
        kvsketch.make_cache(build("llama_mha"), f"saap(index={index!r})")
    with pytest.raises(ValueError, match="its rope was"):
        kvsketch.make_cache(build("llama_yarn"), f"saap(index={index!r})")


def test_what_is_missing_is_said(tmp_path):
    model = build("llama")
    with pytest.raises(ValueError, match=r"index of this model, and there is none.* Make one: kvsketch fit MODEL"):
        kvsketch.make_cache(model, "saap")
    with pytest.raises(ValueError, match=r"nowhere is no index: it has no index\.json"):
        kvsketch.make_cache(model, f"saap(index={str(tmp_path / 'nowhere')!r})")
    index = index_of(tmp_path / "index", model)
    (tmp_path / "index" / "layer-02.safetensors").unlink()
    with pytest.raises(ValueError, match=r"index is incomplete: layer-02\.safetensors is missing"):
        kvsketch.make_cache(model, f"saap(index={index!r})")
    exact = kvsketch.prefill(model, tokens(1, 10), kvsketch.make_cache(model, "exact"))
    with pytest.raises(
        ValueError, match="saap goes by queries or keys as they are before rotation, and an exact cache holds"
    ):
        exact.compress(f"saap(index={index!r})")


def test_the_index_of_a_model_is_found_where_it_is_left(tmp_path, monkeypatch):
    """By caches of two models that share a config, by copies, and by a saved cache; answers are those of the folder."""
    monkeypatch.setenv("KVSKETCH_CACHE", str(tmp_path))
    models, ids, config = [build("llama"), build("qwen3")], tokens(1, 90), kvsketch.Saap(probes=3, window=20)
    folders = [own_index(describe_model(model)) for model in models]
    caches, answers = [], []
    for model, folder in zip(models, folders, strict=True):
        folder.mkdir(parents=True)
        index_of(folder, model)
        caches.append(kvsketch.prefill(model, ids, kvsketch.make_cache(model, config)))
        named = kvsketch.prefill(
            model, ids, kvsketch.make_cache(model, f"saap(index={str(folder)!r}, probes=3, window=20)")
        )
        answers.append(model(ids[:, :1], past_key_values=named).logits)
    assert [str(cache.config) for cache in caches] == 2 * ["saap(window=20, probes=3)"]
    caches[0].save(tmp_path / "cache.safetensors")
    asked = [(models[0], kvsketch.load_cache(models[0], tmp_path / "cache.safetensors"), answers[0])]
    asked += [(model, cache.fork(), right) for model, cache, right in zip(models, caches, answers, strict=True)]
    for model, cache, right in asked:
        assert torch.equal(model(ids[:, :1], past_key_values=cache).logits, right)


def test_the_embedded_model_has_an_index(tmp_path, monkeypatch):
    """Inside the package; where that is missing or damaged, what mends it is said, and other models have theirs."""
    monkeypatch.setenv("KVSKETCH_CACHE", str(tmp_path / "cache"))
    model, _ = load_embedded()
    learnt = kvsketch.make_cache(model, "kmeans(window=255)").config.learnt
    assert (learnt.folder, learnt.layers) == (key_index.SHIPPED / "embedded", [0, 1, 2, 3])
    monkeypatch.setattr(key_index, "SHIPPED", tmp_path / "indexes")
    with pytest.raises(
        ValueError, match=r"there is none.* for the model inside the package kvsketch fit\. It is found by itself"
    ):
        kvsketch.make_cache(model, "kmeans")
    for name in ("embedded", "embedded-first"):
        shutil.copytree(learnt.folder.parent / name, tmp_path / "indexes" / name)
    other = tmp_path / "indexes" / "embedded-first" / key_index.DESCRIPTION
    other.write_bytes(other.read_bytes()[:-50])
    assert kvsketch.make_cache(model, "kmeans").config.learnt.layers == [0, 1, 2, 3]
    own = tmp_path / "indexes" / "embedded"
    (own / "layer-01.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"for the model inside the package kvsketch fit --out FOLDER"):
        kvsketch.make_cache(model, "kmeans")
    (own / key_index.DESCRIPTION).write_text("{")
    with pytest.raises(ValueError, match=r"for the model inside the package kvsketch fit --out FOLDER"):
        kvsketch.make_cache(model, "kmeans")


def test_a_model_attached_without_what_saap_needs_is_refused_by_name(tmp_path):
    model = build("llama")
    cache = kvsketch.make_cache(model, f"saap(index={index_of(tmp_path / 'index', model)!r})")
    kvsketch.detach(model)
    kvsketch.attach(model)
    with pytest.raises(ValueError, match=r"kvsketch.attach\(model, before_rotation=True\)"):
        kvsketch.prefill(model, tokens(1, 10), cache)


def test_layers_that_nothing_was_learnt_for_are_read_in_full(tmp_path):
    """`kvsketch fit` leaves out layers whose queries do not look far, wherever they are."""
    model = build("llama")
    index = index_of(tmp_path / "index", model, layers=[1, 3])
    cache = kvsketch.make_cache(model, f"saap(index={index!r}, probes=1, window=16, staging=16)")
    written(model, tokens(1, 120), cache)
    assert [layer.read is None for layer in cache.report().layers] == [True, False, True, False]


def test_a_cache_is_not_loaded_with_another_index_than_it_was_saved_with(tmp_path, monkeypatch):
    model = build("llama")
    monkeypatch.chdir(tmp_path)
    index_of(tmp_path / "index", model)
    cache = kvsketch.prefill(model, tokens(1, 100), kvsketch.make_cache(model, "saap(index='index', window=16)"))
    cache.save("cache.safetensors")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    loaded = kvsketch.load_cache(model, tmp_path / "cache.safetensors")
    assert loaded.config.index == str(tmp_path / "index")
    description = tmp_path / "index" / "index.json"
    index_of(tmp_path / "index", model, seed=1)
    with pytest.raises(ValueError, match="what that names has changed since it was saved"):
        kvsketch.load_cache(model, tmp_path / "cache.safetensors")
    description.unlink()
    with pytest.raises(ValueError, match=r"cache\.safetensors holds a cache of saap\(.*is no index"):
        kvsketch.load_cache(model, tmp_path / "cache.safetensors")


def test_what_was_learnt_may_be_read_in_inference_mode_and_used_outside(tmp_path):
    model = build("llama")
    spec = f"saap(index={index_of(tmp_path / 'index', model)!r}, probes=2, window=16, staging=16)"
    cache = kvsketch.make_cache(model, spec)
    ids = tokens(1, 100)
    with torch.inference_mode():
        kvsketch.prefill(model, ids, cache)
        go_on(model, tokens(1, 3), cache.fork())
    cache.fork()
    model(tokens(1, 1), past_key_values=cache, attention_mask=torch.ones(1, 101))  # with gradients on


def test_a_model_that_writes_has_its_keys_labelled_a_block_at_a_time(tmp_path, monkeypatch):
    model = build("llama")
    spec = f"saap(index={index_of(tmp_path / 'index', model)!r}, probes=2, window=200, staging=20)"
    labelled, note = [], SaapLookup.note
    monkeypatch.setattr(SaapLookup, "note", lambda self, new: labelled.append(new.keys.shape[2]) or note(self, new))
    cache = kvsketch.make_cache(model, spec)
    written(model, tokens(1, 100), cache, 70)
    cache.report()
    looking = sum(layer.read is not None or layer.recall is not None for layer in cache.report().layers)
    assert labelled == [100] * looking + [32] * looking * 2
