"""A thousand damaged files are refused, or do no harm; and nothing is lost by kill -9, whenever it comes."""

import copy
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvsketch
import zoo
from commands import SOURCE
from histories import VOCABULARY, model
from kvsketch.caches.lookup.key_index import read_index
from kvsketch.evaluation.results.rows import RowsFile, read_rows
from kvsketch.files import TensorFile, write_tensors
from made_index import make_index
from states import difference, state_of
from test_rows import RUN, row

pytestmark = pytest.mark.usefixtures("as_users_run_it")
CACHES = ("exact", "uniform(keep=0.25, window=16)", "clustergen(keep=0.5)", "subgen(keep=180, window=16)")


def damaged(content, times, seed):
    """So many forms of a file with a byte changed, or cut off."""
    draw = random.Random(seed)
    for number in range(times):
        place = draw.randrange(len(content))
        if number % 4 == 3:
            yield content[:place]
        else:
            yield content[:place] + bytes([content[place] ^ draw.randrange(1, 256)]) + content[place + 1 :]


def a_sentence(error):
    """What was said is one sentence for people, and says where."""
    text = str(error)
    assert "\n" not in text
    assert "Traceback" not in text
    assert len(text) < 600
    return text


@pytest.mark.parametrize("spec", CACHES)
def test_damaged_caches(spec, tmp_path):
    model, path = zoo.build("gemma3"), tmp_path / "cache"
    cache = kvsketch.prefill(model, zoo.tokens(2, 250), kvsketch.make_cache(model, spec))
    cache.save(path)
    whole, refused = path.read_bytes(), 0
    for content in damaged(whole, 125, spec):
        path.write_bytes(content)
        try:
            loaded = kvsketch.load_cache(model, path)
        except ValueError as error:
            assert str(path) in a_sentence(error)
            refused += 1
            continue
        assert difference(state_of(loaded), state_of(cache)) is None
    assert refused == 125, "every byte of a cache counts"


FORGED = (
    "uniform(keep=120, window=16)",
    "keydiff(keep=120, heads='pyramid')",
    "clustergen(keep=150)",
    "subgen(keep=150, window=16, t=2)",
    "balancekv(keep=0.25, window=16)",
    "balancekv(keep=150, window=16, mode='faithful', block=64)",
    "random_buckets(buckets=8, probes=2, staging=24, window=20, full_layers=0)",
)


def places_in(state, place=()):
    """Where there is something in a description, from the outside in."""
    yield place
    inside = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for name, part in inside:
        yield from places_in(part, (*place, name))


def with_other(state, place, value):
    """The same, with something else at this place."""
    if not place:
        return value
    other = copy.copy(state)
    other[place[0]] = with_other(state[place[0]], place[1:], value)
    return other


def test_labels_of_buckets_that_there_are_not_are_refused(tmp_path):
    """In the window and in what has left it."""
    ids = torch.randint(1, VOCABULARY, (1, 200))
    kvsketch.prefill(model(), ids, kvsketch.make_cache(model(), FORGED[-1])).save(tmp_path / "cache")
    with TensorFile(tmp_path / "cache") as file:
        tensors, about = file.read(), file.about
    labelled = [name for name in tensors if name.endswith(("labels", "notes"))]
    assert len(labelled) == 4, "two layers, each with a window and a past"
    for name in labelled:
        for label in (8, -1):
            other = tensors[name].clone()
            other[..., -1, 0] = label
            write_tensors(tmp_path / "cache", tensors | {name: other}, about)
            with pytest.raises(ValueError, match=rf"holds a state of layer .*labels from .*{label}.* of 8 buckets"):
                kvsketch.load_cache(model(), tmp_path / "cache")


@pytest.mark.parametrize("spec", FORGED)
def test_numbers_that_no_layer_has_are_refused_or_serve(spec, tmp_path):
    """In files that are whole, with right checksums. Nothing hangs, fills the memory or fails later."""
    ids, mask = torch.randint(1, VOCABULARY, (2, 200)), torch.ones(2, 200, dtype=torch.long)
    mask[0, :90] = 0
    cache = kvsketch.prefill(model(), ids * mask, kvsketch.make_cache(model(), spec), attention_mask=mask)
    cache.save(tmp_path / "cache")
    with TensorFile(tmp_path / "cache") as file:
        tensors, about = file.read(), file.about
    before, (first, layer) = about["layers"][1]["state"], about["layers"]
    served = set()
    for number, place in enumerate(places_in(before)):
        for value in (10**18, (-1, 0)[number % 2], (None, "x", [])[number % 3]):
            state = with_other(before, place, value)
            if state == before:
                continue
            write_tensors(tmp_path / "cache", tensors, about | {"layers": [first, {**layer, "state": state}]})
            try:
                loaded = kvsketch.load_cache(model(), tmp_path / "cache")
            except ValueError as error:
                a_sentence(error)
                continue
            served.add(place)
            for count in (40, 1):
                new = loaded.new_tokens(torch.ones(2, count, dtype=torch.long))
                kvsketch.prefill(model(), new["input_ids"], loaded)
            loaded.report()
    # What follows from nothing else: when errors were measured, and how often rows were halved (which draws come
    # next).
    assert all(place == ("measured_at",) or "halved" in place for place in served), served


def test_damaged_indexes(tmp_path):
    model = zoo.build("llama")
    folder = Path(make_index(tmp_path / "index", model))
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    expected = {layer: read_index(folder).layer(layer).tensors() for layer in read_index(folder).layers}
    refused, tried = 0, 0
    for path, content in whole.items():
        for other in damaged(content, 50, path.name):
            path.write_bytes(other)
            tried += 1
            try:
                kvsketch.make_cache(model, f"saap(index={str(folder)!r})")
                found = {layer: read_index(folder).layer(layer).tensors() for layer in read_index(folder).layers}
            except ValueError as error:
                assert str(folder) in a_sentence(error)
                refused += 1
                continue
            for layer, tensors in expected.items():
                assert all(torch.equal(tensor, found[layer][name]) for name, tensor in tensors.items())
        path.write_bytes(content)
    assert tried == 250
    assert refused >= 245  # of index.json some blanks do not matter


def test_damaged_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    file = RowsFile(path, RUN)
    file.add([row(number, score=number / 40, output=f"it is “{number}”") for number in range(40)])
    whole, expected = path.read_bytes(), read_rows(path)[1]
    refused = 0
    for content in damaged(whole, 250, "rows"):
        path.write_bytes(content)
        try:
            _, found = read_rows(path)
        except ValueError as error:
            assert str(path) in a_sentence(error)
            refused += 1
            continue
        assert found == expected[: len(found)], "what is read is what was written, from its beginning on"
        assert len(found) >= whole[: len(content)].count(b"\n") - 2
    assert refused > 150


def test_a_damaged_line_is_named_and_its_row_is_made_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    RowsFile(path, RUN).add([row(number) for number in range(3)])
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b'"score": 1.0', b'"score": 0.0')
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=r"line 3: damaged, it is not what was written\. Remove that line"):
        RowsFile(path, RUN)
    path.write_bytes(b"\n".join(lines[:2] + lines[3:]))
    RowsFile(path, RUN).add([row(number) for number in range(3)])
    assert sorted(found["sample"] for found in read_rows(path)[1]) == [0, 1, 2]


def test_twenty_five_kills_cost_nothing_and_leave_nothing(tmp_path):
    """Of saving, fitting, measuring and training; in a process that may fork, for this one may have threads."""
    here = Path(__file__).parent
    environment = os.environ | {
        "PYTHONPATH": f"{SOURCE}{os.pathsep}{here}", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, here / "kills.py", tmp_path], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sum(json.loads(done.stdout).values()) == 25
