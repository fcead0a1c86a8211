"""Files are whole or refused, and what was read from one is a cache's own."""

import fcntl
import hashlib
import json
import os
import resource
import shutil
import sys
import threading
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kvsketch
import zoo
from kvsketch.files import (
    LARGEST_HEADER,
    UNFINISHED,
    TensorFile,
    read_about,
    read_json,
    read_tensors,
    replacing,
    write_json,
    write_tensors,
)
from made_index import make_index
from states import difference, state_of

pytestmark = pytest.mark.usefixtures("as_users_run_it")
SPECS = [
    "exact", "uniform(keep=0.25, window=16)", "uniform(keep='400KB', window=16)", "streaming_llm(keep=128)",
    "clustergen(keep=0.5)", "subgen(keep=180, window=16)", "balancekv(keep=0.5, window=16)",
    "balancekv(keep=0.5, window=16, mode='faithful')", "retrieval(top=0.1, window=32)",
]  # fmt: skip


def filled_cache(family, spec, *, rows=2):
    model = zoo.build(family)
    ids = zoo.tokens(rows, 300)
    mask = torch.ones_like(ids)
    mask[0, :77] = 0
    return model, kvsketch.prefill(model, ids, kvsketch.make_cache(model, spec), attention_mask=mask)


def ask(model, cache, rows=2):
    question = zoo.tokens(rows, 9, seed=3)
    return model.generate(**cache.new_tokens(question), past_key_values=cache, max_new_tokens=45, do_sample=False)


@pytest.fixture
def saved(tmp_path):
    """A model, a cache, and the file that it was saved in."""
    model, cache = filled_cache("llama", "uniform(keep=0.25, window=16)")
    cache.save(tmp_path / "c.safetensors")
    return model, cache, tmp_path / "c.safetensors"


# -- a saved cache


@pytest.mark.parametrize(
    ("family", "spec"),
    [*(("llama", spec) for spec in SPECS), *((family, SPECS[1]) for family in ("gemma3", "gpt_oss", "cohere2"))],
)
def test_a_saved_cache_gives_the_same_text_whatever_happens_to_the_file(family, spec, tmp_path):
    model, cache = filled_cache(family, spec)
    path = tmp_path / "text.safetensors"
    cache.save(path)
    expected = ask(model, cache.fork())
    again = zoo.build(family)  # as in another process
    loaded = kvsketch.load_cache(again, path)
    os.truncate(path, 0)  # of a mapped file nothing would be left now
    path.write_bytes(b"something else" * 10_000)
    assert str(loaded.config) == str(cache.config)
    assert loaded.get_seq_length() == 300
    assert loaded.report().error == cache.report().error
    assert difference(state_of(loaded), state_of(cache)) is None
    assert torch.equal(ask(again, loaded), expected)
    assert [p.name for p in tmp_path.iterdir()] == ["text.safetensors"]


def test_the_file_holds_what_the_cache_holds(saved):
    _, cache, path = saved
    assert path.stat().st_size < 1.1 * cache.nbytes + 16_384
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["kvsketch"])
    assert header["format"] == 7
    assert header["method"] == "uniform"
    assert header["options"]["keep"] == 0.25  # defaults too: they may be others when the file is read
    assert header["model_type"] == "llama"


def test_another_models_file_is_refused_and_the_model_left_alone(saved):
    others = [zoo.build("llama", seed=1), zoo.build("qwen3"), zoo.build("llama", dtype=torch.bfloat16)]
    fine_tuned = zoo.build("llama")
    with torch.no_grad():
        fine_tuned.model.layers[1].mlp.up_proj.weight.add_(1e-3)
    for other in [*others, fine_tuned]:
        with pytest.raises(ValueError, match=r"saved for another model \(a 'llama' of other weights"):
            kvsketch.load_cache(other, saved[2])
        assert other.config._attn_implementation == "sdpa"


def test_settings_that_keys_do_not_depend_on_may_differ(saved):
    model, cache, path = saved
    expected = ask(model, cache)
    again = zoo.build("llama")
    again.config.pad_token_id, again.config.use_cache, again.config.max_position_embeddings = 5, False, 4096
    assert torch.equal(ask(again, kvsketch.load_cache(again, path)), expected)


def test_a_cache_that_is_empty_or_broken_is_not_saved(tmp_path):
    model, cache = filled_cache("llama", "uniform")
    with pytest.raises(ValueError, match="nothing to save"):
        kvsketch.make_cache(model).save(tmp_path / "c.safetensors")
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        kvsketch.prefill(model, zoo.tokens(2, 5), cache)
    with pytest.raises(ValueError, match="failed half-way"):
        cache.save(tmp_path / "c.safetensors")
    assert list(tmp_path.iterdir()) == []


# -- files that are none, or of others


def test_files_that_are_none(tmp_path):
    model = zoo.build("llama")
    with pytest.raises(ValueError, match="there is no file"):
        kvsketch.load_cache(model, tmp_path / "nothing.safetensors")
    (tmp_path / "text.safetensors").write_text("not a tensor in sight")
    with pytest.raises(ValueError, match="is damaged: it is cut off, or no file of tensors"):
        kvsketch.load_cache(model, tmp_path / "text.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="was not written by kvsketch"):
        kvsketch.load_cache(model, tmp_path / "other.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "old.safetensors", {"kvsketch": json.dumps({"format": 1})})
    with pytest.raises(ValueError, match=r"by a version of kvsketch that kept no checksums.*make it anew"):
        kvsketch.load_cache(model, tmp_path / "old.safetensors")
    write_tensors(tmp_path / "shard.safetensors", {}, {"layer": 3})
    with pytest.raises(ValueError, match=r"was not written by cache\.save"):
        kvsketch.load_cache(model, tmp_path / "shard.safetensors")


def without(layers, name):
    return [{**layer, "state": {k: v for k, v in layer["state"].items() if k != name}} for layer in layers]


def changed(layers, **state):
    return [{**layer, "state": layer["state"] | state} for layer in layers]


def in_stream(layers, **state):
    return changed(layers, streams=[layers[0]["state"]["streams"][0] | state])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"format": 99},
            "has format 99, this version of kvsketch reads formats 6 to 7: have a new cache read the text",
        ),
        ({"format": None}, "has format None"),
        ({"method": "quantum"}, "a method 'quantum', which this version of kvsketch does not have; it has exact"),
        ({"method": 3}, "does not describe a cache: its method is 3"),
        ({"method": ["uniform"]}, "does not describe a cache: its method is"),
        ({"options": {"keep": 0.25, "colour": "red"}}, "options 'colour', which this version of kvsketch does not"),
        (
            {"options": {"keep": "much"}},
            "a cache of uniform with options that it cannot have: keep='much' is not a size",
        ),
        ({"options": []}, "its options is"),
        (
            {"format": 3},
            "has format 3, this version of kvsketch reads formats 6 to 7: have a new cache read",
        ),
        ({"source": 5}, "its source is 5"),
        ({"fingerprint": None}, "its fingerprint is None"),
        ({"layers": {}}, "its layers is"),
        ({"layers": []}, "does not hold the layers that this model has"),
        ({"layers": [1, 2, 3, 4]}, "one of its layers is 1"),
        (lambda known: {"layers": without(known["layers"], "seen")}, "holds a state of layer 0 that"),
        (lambda known: {"layers": changed(known["layers"], seen="many")}, "holds a state of layer 0 that"),
        (lambda known: {"layers": changed(known["layers"], seen=-5)}, "holds a state of layer 0 that"),
        (lambda known: {"layers": changed(known["layers"], lengths=[1])}, "holds a state of layer 0 that"),
        (lambda known: {"layers": in_stream(known["layers"], left=[0, 10**9])}, "holds a state of layer 0 that"),
        (lambda known: {"layers": changed(known["layers"], budgets=["a"])}, "holds a state of layer 0 that"),
        (lambda known: {"layers": in_stream(known["layers"], past={})}, "holds a state of layer 0 that"),
        (lambda known: {"layers": in_stream(known["layers"], heads=[0])}, "holds a state of layer 0 that"),
        (lambda known: {"layers": changed(known["layers"], offsets=7)}, "holds a state of layer 0 that"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_descriptions_that_no_cache_has(change, message, saved):
    """Whole as files, with a checksum that is right: as another version, or somebody else, might write them."""
    model, _, path = saved
    with TensorFile(path) as file:
        write_tensors(path, file.read(), file.about | (change(file.about) if callable(change) else change))
    with pytest.raises(ValueError, match=message):
        kvsketch.load_cache(model, path)


@pytest.mark.parametrize("name", ["0.0.keys", "1.0.ranks", "2.0.past.0.keys"])
@pytest.mark.parametrize("change", ["gone", "shape", "type"])
def test_tensors_that_no_cache_has(name, change, saved):
    model, _, path = saved
    with TensorFile(path) as file:
        tensors = file.read()
    if change == "gone":
        del tensors[name]
    elif change == "shape":
        tensors[name] = tensors[name][None]
    else:
        tensors[name] = tensors[name].to(torch.int16)
    write_tensors(path, tensors, file.about)
    with pytest.raises(ValueError, match=f"holds a state of layer {name[0]} that"):
        kvsketch.load_cache(model, path)


def header_of(text, path):
    """A file with this header, its checksum right."""

    from kvsketch.files import BEGIN, BLANK

    whole = BEGIN + BLANK + text
    length = len(whole).to_bytes(8, "little")
    path.write_bytes(length + BEGIN + hashlib.sha256(length + whole).hexdigest().encode() + text)


TENSOR = b'"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
DIGESTS = rb'","kvsketch":"{}","digests":"{\"x\":\"0\"}"},'


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b'"}}',
        b'","kvsketch":"[]","digests":"{}"}}',
        b'","kvsketch":"{","digests":"{}"}}',
        b'","kvsketch":"{}","digests":"{}"},' + TENSOR + b"}",
        DIGESTS + TENSOR.replace(b"F32", b"F33") + b"}",
        DIGESTS + TENSOR.replace(b"[1]", b"[-1]") + b"}",
        DIGESTS + TENSOR.replace(b"[1]", b"[true]") + b"}",
        DIGESTS + TENSOR.replace(b"[1]", b"[1" + b"0" * 30 + b"]") + b"}",
        DIGESTS + TENSOR.replace(b"[1]", b"[" + b"281474976710655," * 10**5 + b"0]").replace(b"4]", b"0]") + b"}",
        DIGESTS + TENSOR.replace(b"[1]", b"[0,281474976710655,281474976710655]").replace(b"4]", b"0]") + b"}",
        DIGESTS + TENSOR.replace(b"[0,4]", b"[4,8]") + b"}",
        DIGESTS + TENSOR.replace(b"[0,4]", b"[0]") + b"}",
        DIGESTS + TENSOR + b"}",  # and no data behind it
        b'","kvsketch":"' + b"[" * 100_000 + b'","digests":"{}"}}',
        b'","deep":' + b"[" * 100_000,
    ],
    ids=lambda text: repr(text[:50]),
)
def test_headers_that_make_no_sense(text, tmp_path):
    header_of(text, tmp_path / "x")
    began = time.monotonic()
    with pytest.raises(ValueError, match="is damaged: "):
        TensorFile(tmp_path / "x")
    assert time.monotonic() - began < 2


def test_a_header_that_would_fill_the_memory_is_not_read(tmp_path):
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write((LARGEST_HEADER + 1).to_bytes(8, "little"))
        file.truncate(1 << 36)  # it takes no room on the disk
    with pytest.raises(ValueError, match="is damaged"):
        TensorFile(path)
    with pytest.raises(ValueError, match="would have a header of"):
        write_tensors(path, {}, {"much": "x" * LARGEST_HEADER})
    with path.open("wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(ValueError, match="more than"):
        read_json(path)


def test_files_are_safetensors_and_parts_of_them_are_read_alone(tmp_path):
    tensors = {
        "a.keys": torch.randn(3, 4).bfloat16(), "a.count": torch.tensor(7), "b.flag": torch.tensor([True, False]),
        "b.none": torch.empty(0, 5), "b.view": torch.randn(6, 6)[:, ::2], "c": torch.randn(2).double(),
    }  # fmt: skip
    write_tensors(tmp_path / "x", tensors, {"n": 1})
    for found in (load_file(tmp_path / "x"), read_tensors(tmp_path / "x")):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(tensor, found[name]) for name, tensor in tensors.items())
    assert read_tensors(tmp_path / "x", prefix="a.").keys() == {"keys", "count"}
    assert read_about(tmp_path / "x") == {"n": 1}
    content = bytearray((tmp_path / "x").read_bytes())
    place = content.find(bytes(tensors["c"].view(torch.uint8).tolist()))
    content[place] ^= 1
    (tmp_path / "x").write_bytes(content)
    assert read_tensors(tmp_path / "x", prefix="a.")["count"] == 7  # what is asked for is checked, and nothing else
    with pytest.raises(ValueError, match="c is not what was written"):
        read_tensors(tmp_path / "x")


# -- writing


def test_a_failed_save_keeps_the_old_file_and_leaves_nothing(saved):
    """Here the file may not be as large as that; a full disk ends the same way."""
    model, cache, path = saved
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"nothing was written: '.*c\.safetensors'"):
            cache.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["c.safetensors"]
    assert torch.equal(ask(model, kvsketch.load_cache(model, path)), ask(model, cache))


def test_files_get_the_mode_that_the_umask_gives_and_keep_one_that_they_have(tmp_path):
    before = os.umask(0o027)
    try:
        write_tensors(tmp_path / "x", {}, {})
        write_json(tmp_path / "y", {})
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in "xy"] == [0o640, 0o640]
    (tmp_path / "x").chmod(0o604)
    write_tensors(tmp_path / "x", {}, {"n": 2})
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o604


def test_a_symbolic_link_is_followed_and_not_replaced(tmp_path):
    (tmp_path / "far").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "far" / "file")  # leads to nothing yet
    for number in (1, 2):
        write_json(link, {"n": number})
        assert link.is_symlink()
        assert read_json(tmp_path / "far" / "file") == {"n": number}
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["file"]


def test_links_in_a_circle_and_pipes_of_others_are_left_alone(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ValueError, match="a symbolic link that leads to itself"):
        write_json(tmp_path / "a", {})
    assert (tmp_path / "a").is_symlink()
    prefix = f"{UNFINISHED}{hashlib.sha256(b'x').hexdigest()[:12]}-"
    os.mkfifo(tmp_path / f"{prefix}pipe")
    write_json(tmp_path / "x", {})
    assert (tmp_path / f"{prefix}pipe").exists()
    with pytest.raises(ValueError, match=r"x is of torch.complex64, which a file cannot hold: expected one of F64"):
        write_tensors(tmp_path / "x", {"x": torch.zeros(1, dtype=torch.complex64)}, {})


def test_a_new_file_that_another_writer_looks_at_gets_another_name(tmp_path, monkeypatch):
    """Two writers where files have names: one looks for files that were left over when the other has made its own."""
    monkeypatch.delattr(os, "O_TMPFILE")
    opened, make = [], os.open

    def open_and_be_taken_for_left_over(path, flags, *mode):
        handle = make(path, flags, *mode)
        if flags & os.O_CREAT and not opened:
            opened.append(make(path, os.O_WRONLY))
            fcntl.flock(opened[0], fcntl.LOCK_EX)
        return handle

    monkeypatch.setattr(os, "open", open_and_be_taken_for_left_over)
    with replacing(tmp_path / "x") as file:
        for left in [one for one in tmp_path.iterdir() if os.path.samestat(one.stat(), os.fstat(opened[0]))]:
            left.unlink()  # what the other writer does next
        file.write(b"whole")
    os.close(opened[0])
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("x", b"whole")]


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/null"):
        with pytest.raises(ValueError, match="is no regular file"):
            write_json(path, {})
    with pytest.raises(ValueError, match="there is no folder"):
        write_json(tmp_path / "no" / "file", {})
    if sys.platform == "linux":
        with pytest.raises((ValueError, OSError), match=r"cannot be written to|no file can be made.*'/proc/x'"):
            write_json("/proc/x", {})
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize("unnamed", [True, False])
def test_what_a_killed_writer_left_goes_and_what_another_is_writing_stays(unnamed, tmp_path, monkeypatch):
    """Also on a file system where a file has a name from its beginning."""
    if not unnamed:
        monkeypatch.delattr(os, "O_TMPFILE")
    path = tmp_path / "x"
    with replacing(path) as first:
        first.write(b"first")
        names = [one.name for one in tmp_path.iterdir()]
        assert names == [] if unnamed else len(names) == 1
        with replacing(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert [one.name for one in tmp_path.iterdir()] == ["x"]
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write(_fail())
    assert path.read_bytes() == b"first"
    assert [one.name for one in tmp_path.iterdir()] == ["x"]
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    with replacing(path) as file:  # so that its name is known
        (unfinished,) = (one.name for one in tmp_path.iterdir() if one.name.startswith(UNFINISHED))
        file.write(b"again")
    left, locked, foreign = (tmp_path / f"{unfinished[:-1]}{end}" for end in "-_~")
    for one in (left, locked):
        one.write_bytes(b"of a writer that was killed")
    foreign = tmp_path / f"{UNFINISHED}another"
    foreign.write_bytes(b"of another file")
    with locked.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        write_json(path, {})
        assert (left.exists(), locked.exists(), foreign.exists()) == (False, True, True)


def _fail():
    raise RuntimeError


def test_two_savers_at_once_leave_one_of_both(tmp_path):
    path, tensors = tmp_path / "x", [{"x": torch.full((50_000,), float(number))} for number in range(2)]
    write_tensors(path, tensors[0], {})

    def save(number):
        for _ in range(20):
            write_tensors(path, tensors[number], {})

    savers = [threading.Thread(target=save, args=(number,)) for number in range(2)]
    for saver in savers:
        saver.start()
    while any(saver.is_alive() for saver in savers):
        assert read_tensors(path)["x"].unique().numel() == 1
    for saver in savers:
        saver.join()
    assert [one.name for one in tmp_path.iterdir()] == ["x"]


def test_a_file_that_is_copied_over_while_it_is_read_is_refused_or_one_of_both(tmp_path):
    path, other = tmp_path / "x", tmp_path / "other"
    write_tensors(path, {"x": torch.zeros(400_000)}, {})
    write_tensors(other, {"x": torch.ones(300_000)}, {})
    first, ended = shutil.copy(path, tmp_path / "first"), threading.Event()

    def copy():
        for number in range(30):
            shutil.copyfile(other if number % 2 else first, path)  # as cp does: in place
        ended.set()

    writer, refused = threading.Thread(target=copy), 0
    writer.start()
    while not ended.is_set():
        try:
            found = read_tensors(path)["x"]
        except ValueError as error:
            assert "damaged" in str(error)
            refused += 1
            continue
        assert (found.numel(), float(found.sum())) in ((400_000, 0.0), (300_000, 300_000.0))
    writer.join()
    assert refused, "the copies were too quick to be met"


def test_an_index_knows_its_path_from_where_it_was_named(tmp_path, monkeypatch):
    model = zoo.build("llama")
    make_index(tmp_path / "here" / "index", model)
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    config = kvsketch.parse_spec("saap(index='index', window=16)")
    monkeypatch.chdir(tmp_path / "there")
    cache = kvsketch.prefill(model, zoo.tokens(1, 60), kvsketch.make_cache(model, config))
    cache.save("cache.safetensors")
    monkeypatch.chdir(tmp_path)
    assert kvsketch.load_cache(model, "there/cache.safetensors").config.index == str(tmp_path / "here" / "index")
    assert str(config) == "saap(window=16, index='index')"


def test_a_file_that_is_no_cache_keeps_its_place(saved, tmp_path):
    """The name of a program, say, that was given by mistake."""
    model, cache, path = saved
    own = tmp_path / "program.py"
    own.write_text("print('mine')\n")
    with pytest.raises(ValueError, match="is there and is no saved cache: name another file"):
        cache.save(own)
    assert own.read_text() == "print('mine')\n"
    for file in (path, tmp_path / "new.safetensors"):
        cache.save(file)
        assert kvsketch.load_cache(model, file).seen == cache.seen
