"""Caches on disk."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kvsketch
import zoo

SPECS = ["exact", "uniform(keep=0.25, window=16)", "uniform(keep='400KB', window=16)", "streaming_llm(keep=128)"]
SPECS += ["clustergen(keep=0.5)", "subgen(keep=180, window=16)", "balancekv(keep=0.5, window=16)"]


def filled_cache(family, spec, *, rows=2):
    model = zoo.build(family)
    ids = zoo.tokens(rows, 300)
    mask = torch.ones_like(ids)
    mask[0, :77] = 0
    return model, kvsketch.prefill(model, ids, kvsketch.make_cache(model, spec), attention_mask=mask)


def ask(model, cache, rows=2):
    question = zoo.tokens(rows, 9, seed=3)
    return model.generate(**cache.new_tokens(question), past_key_values=cache, max_new_tokens=45, do_sample=False)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "cohere2", "qwen3"])
def test_a_saved_cache_gives_the_same_text(family, spec, tmp_path):
    model, cache = filled_cache(family, spec)
    path = tmp_path / "text.safetensors"
    cache.save(path)
    expected = ask(model, cache.fork())
    again = zoo.build(family)  # as in another process
    loaded = kvsketch.load_cache(again, path)
    assert str(loaded.config) == str(cache.config)
    assert loaded.get_seq_length() == 300
    assert loaded.report().error == cache.report().error
    assert torch.equal(ask(again, loaded), expected)
    assert [p.name for p in tmp_path.iterdir()] == ["text.safetensors"]


def test_the_file_holds_what_the_cache_holds(tmp_path):
    _, cache = filled_cache("llama", "uniform(keep=0.25, window=16)")
    cache.save(tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").stat().st_size < 1.1 * cache.nbytes + 4096
    with safe_open(tmp_path / "c.safetensors", "pt") as file:
        header = json.loads(file.metadata()["kvsketch"])
    assert header["format"] == 1
    assert header["method"] == "uniform"
    assert header["options"]["keep"] == 0.25  # defaults too: they may be others when the file is read
    assert header["model_type"] == "llama"


def test_another_models_file_is_refused(tmp_path):
    _, cache = filled_cache("llama", "uniform")
    path = tmp_path / "c.safetensors"
    cache.save(path)
    others = [zoo.build("llama", seed=1), zoo.build("qwen3"), zoo.build("llama", dtype=torch.bfloat16)]
    fine_tuned = zoo.build("llama")
    with torch.no_grad():
        fine_tuned.model.layers[1].mlp.up_proj.weight.add_(1e-3)
    for other in [*others, fine_tuned]:
        with pytest.raises(ValueError, match=r"saved for another model \(a 'llama'\)"):
            kvsketch.load_cache(other, path)


def test_settings_that_keys_do_not_depend_on_may_differ(tmp_path):
    model, cache = filled_cache("llama", "uniform")
    cache.save(tmp_path / "c.safetensors")
    expected = ask(model, cache)
    again = zoo.build("llama")
    again.config.pad_token_id, again.config.use_cache, again.config.max_position_embeddings = 5, False, 4096
    assert torch.equal(ask(again, kvsketch.load_cache(again, tmp_path / "c.safetensors")), expected)


def test_a_cache_that_is_broken_is_not_saved(tmp_path):
    model, cache = filled_cache("llama", "uniform")
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        kvsketch.prefill(model, zoo.tokens(2, 5), cache)
    with pytest.raises(ValueError, match="failed half-way"):
        cache.save(tmp_path / "c.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_none(tmp_path):
    model = zoo.build("llama")
    with pytest.raises(ValueError, match="there is no file"):
        kvsketch.load_cache(model, tmp_path / "nothing.safetensors")
    (tmp_path / "text.safetensors").write_text("not a tensor in sight")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        kvsketch.load_cache(model, tmp_path / "text.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"not written by cache\.save"):
        kvsketch.load_cache(model, tmp_path / "other.safetensors")


def test_a_file_that_was_cut_off_is_refused(tmp_path):
    model, cache = filled_cache("llama", "uniform")
    path = tmp_path / "c.safetensors"
    cache.save(path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        kvsketch.load_cache(model, path)


def test_a_file_of_another_format_is_refused(tmp_path):
    model, cache = filled_cache("llama", "uniform")
    path = tmp_path / "c.safetensors"
    cache.save(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["kvsketch"])
    save_file({"x": torch.zeros(1)}, path, {"kvsketch": json.dumps(header | {"format": 99})})
    with pytest.raises(ValueError, match="has format 99, this version of kvsketch reads format 1"):
        kvsketch.load_cache(model, path)


def test_an_empty_cache_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="nothing to save"):
        kvsketch.make_cache(zoo.build("llama")).save(tmp_path / "c.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    from kvsketch.huggingface import files

    _, cache = filled_cache("llama", "uniform")
    path = tmp_path / "c.safetensors"
    cache.save(path)
    before = path.read_bytes()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(files, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        cache.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]
