"""An index's folder: it loads as it was written, and refuses what it was not made for."""

import copy
import os

import pytest
import torch
from safetensors.torch import load_file

from kvsketch.caches.lookup.key_index import DESCRIPTION, FORMAT, layer_file, read_index
from kvsketch.files import read_json, write_json, write_tensors
from kvsketch.huggingface.identity import describe_model
from made_index import make_index
from zoo import build


def rewrite(folder, **changes):
    path = folder / DESCRIPTION
    write_json(path, read_json(path) | changes)


@pytest.mark.parametrize("hidden", [12, 0])
def test_layers_load_as_they_were_written(hidden, tmp_path):
    make_index(tmp_path, layers=[1, 3], hidden=hidden)
    index = read_index(tmp_path)
    assert (index.layers, index.buckets) == ([1, 3], 8)
    written = load_file(tmp_path / layer_file(3))
    layer = index.layer(3)
    assert layer.tensors().keys() == written.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in layer.tensors().items())
    assert (layer.first is None) == (hidden == 0)
    assert index.layer(3) is layer


def test_copies_share_their_layers(tmp_path):
    make_index(tmp_path)
    index = read_index(tmp_path)
    assert copy.deepcopy({"index": index})["index"] is index


def test_caches_that_are_there_together_share_an_index_until_it_is_fitted_anew(tmp_path):
    make_index(tmp_path, layers=[1])
    one = read_index(tmp_path)
    assert read_index(tmp_path) is one
    os.utime(tmp_path / DESCRIPTION, ns=(1, 1))
    assert read_index(tmp_path) is not one


def test_a_layer_that_was_not_fitted_or_is_lost_is_named(tmp_path):
    make_index(tmp_path, layers=[1, 3])
    index = read_index(tmp_path)
    with pytest.raises(ValueError, match=r"has layers \[1, 3\], but layer 0 is asked for: fit that layer too"):
        index.layer(0)
    (tmp_path / layer_file(1)).unlink()
    with pytest.raises(
        ValueError, match=r"is incomplete: layer-01.* is missing.* kvsketch fit MODEL --corpus FILE --out"
    ):
        index.layer(1)


def test_its_own_model_is_let_in_whatever_the_precision(tmp_path):
    model = build("llama", dtype=torch.bfloat16)
    make_index(tmp_path, model)
    index = read_index(tmp_path)
    index.check_model(describe_model(model))
    index.check_model(describe_model(model.float()))
    index.check_model(describe_model(model.half()))


def test_that_float16_may_be_the_reason_is_said(tmp_path):
    """Weights of float32 are rounded otherwise there."""
    model = build("llama")
    make_index(tmp_path, model)
    with pytest.raises(ValueError, match="loaded in float16: load them as they were for the fit"):
        read_index(tmp_path).check_model(describe_model(model.half()))


def test_another_model_is_refused_by_what_differs(tmp_path):
    make_index(tmp_path, build("llama"))
    index = read_index(tmp_path)
    for family, what in (("llama_mha", "kv_heads was 2, that of this model is 8"), ("qwen2", "model_type was 'llama'")):
        with pytest.raises(ValueError, match=f"was fitted to another model: its {what}"):
            index.check_model(describe_model(build(family)))
    with pytest.raises(ValueError, match=r"its rope was .*'default'.*, that of this model is .*'llama3'"):
        index.check_model(describe_model(build("llama_llama3_rope")))
    with pytest.raises(ValueError, match=r"of this architecture with other weights \('made up'\)"):
        index.check_model(describe_model(build("llama", seed=1)))


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is no index: it has no index.json. Make one: kvsketch fit"):
        read_index(tmp_path)
    make_index(tmp_path)
    rewrite(tmp_path, format=FORMAT + 1)
    with pytest.raises(ValueError, match=f"an index of format {FORMAT + 1}, this version reads {FORMAT}: fit it again"):
        read_index(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"format"', b"\xff\xfe"])
def test_a_description_that_is_broken_is_refused(content, tmp_path):
    make_index(tmp_path)
    (tmp_path / DESCRIPTION).write_bytes(content)
    with pytest.raises(
        ValueError, match=r"index.json cannot be read as what kvsketch wrote: .* Put back the index that was there"
    ):
        read_index(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"buckets": "8"}, {"buckets": 0}, {"layers": [1]}, {"layers": {"one": {}}}, {"layers": {"1": 3}}, {"model": {}}],
    ids=str,
)
def test_a_description_of_something_else_is_refused(changes, tmp_path):
    make_index(tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(ValueError, match="does not describe an index"):
        read_index(tmp_path)


def test_a_layer_that_was_put_in_anothers_place_is_refused(tmp_path):
    """Whole as a file, but not what was fitted; also where only the numbers are others."""
    make_index(tmp_path)
    index, digest = read_index(tmp_path), read_index(tmp_path).digest
    noise = {name: torch.full_like(tensor, torch.nan) for name, tensor in index.layer(1).tensors().items()}
    write_tensors(tmp_path / layer_file(1), noise, {})
    for ask in (lambda: index.check_model(index.description["model"]), lambda: read_index(tmp_path).layer(1)):
        with pytest.raises(ValueError, match=r"was changed: layer-01.safetensors is not the file that was fitted"):
            ask()
    make_index(tmp_path, seed=1)
    assert read_index(tmp_path).digest != digest
