"""The model inside the package: plain, small, and able to find what it is asked for."""

import random
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvsketch.cli.options import REPLY
from kvsketch.editions import EDITIONS
from kvsketch.evaluation.answers.plan import Plan
from kvsketch.evaluation.answers.runner import Runner
from kvsketch.evaluation.embedded import load_embedded, load_tokenizer
from kvsketch.evaluation.embedded import model as embedded_model
from kvsketch.evaluation.embedded.training.tokenizer import build_tokenizer
from kvsketch.evaluation.tasks import TASKS, WORDINGS, Setting
from kvsketch.evaluation.tasks.haystack import Grammar, Sentences

ASSETS = Path(str(files("kvsketch") / "assets"))


@pytest.mark.parametrize("edition", EDITIONS.values())
def test_any_llama_code_can_load_it(edition):
    config = AutoConfig.from_pretrained(ASSETS / edition)
    assert config.model_type == "llama"
    assert config.num_hidden_layers >= 3
    assert config.head_dim in (32, 64)
    assert config.num_key_value_heads < config.num_attention_heads
    model = AutoModelForCausalLM.from_pretrained(ASSETS / edition, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 6e6


def test_its_tokenizer_can_be_made_anew():
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / EDITIONS["embedded"])
    assert tokenizer.backend_tokenizer.to_str() == build_tokenizer().backend_tokenizer.to_str()


def test_editions_are_small_and_safe():
    found = [path for path in ASSETS.rglob("*") if path.is_file()]
    size = {
        part: sum(path.stat().st_size for path in found if part in path.relative_to(ASSETS).parts)
        for part in (*EDITIONS, *EDITIONS.values())
    }
    assert all(0 < size[name] <= 6_000_000 for name in EDITIONS)  # indexes
    assert all(0 < size[folder] <= 12_000_000 for folder in EDITIONS.values())
    assert {path.suffix for path in found} <= {".safetensors", ".json", ".md"}


@pytest.mark.parametrize(
    ("name", "mended"),
    [("embedded", "kvsketch train-demo FOLDER .* kvsketch fit"), ("embedded-first", "kvsketch again$")],
)
@pytest.mark.parametrize("damage", ["none there", "cut off"])
def test_files_that_are_missing_or_damaged_say_what_mends_them(tmp_path, monkeypatch, name, mended, damage):
    folder = tmp_path / "assets" / EDITIONS[name]
    if damage == "cut off":
        shutil.copytree(ASSETS / EDITIONS[name], folder)
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-5])
    monkeypatch.setattr(embedded_model, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match=rf"should hold the model '{name}', and cannot be loaded .*{mended}"):
        load_embedded(name=name)
    if damage == "cut off":  # the tokenizer is whole
        load_tokenizer(name)
        (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=rf"should hold the model '{name}', and cannot be loaded .*{mended}"):
        load_tokenizer(name)


def test_an_unknown_edition_is_refused():
    with pytest.raises(ValueError, match="inside the package are embedded, embedded-first, got 'third'"):
        load_embedded(name="third")
    with pytest.raises(ValueError, match="dtype must be auto or one of torch, such as float32, got 'flaot32'"):
        load_embedded("flaot32")


@pytest.mark.parametrize("task", sorted(set(TASKS) - {"cwe"}))
@pytest.mark.parametrize("wording", WORDINGS)
def test_answers_are_not_cut_off(task, wording):
    """The longest right replies fit REPLY; cwe is left out, as the model does not know it."""
    tokenizer = load_tokenizer()
    for seed in range(5):
        sample = TASKS[task].make(
            random.Random(seed), Setting(size=max(40, TASKS[task].smallest), wording=wording, questions=5)
        )
        for question in sample.questions:
            assert len(tokenizer(question.reply, add_special_tokens=False)["input_ids"]) < REPLY


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "wording", "dtype"),
    [
        ("lines", "official", torch.float32),
        pytest.param("kv", "compact", torch.float32, marks=pytest.mark.once),
        pytest.param("niah_multikey", "official", torch.float32, marks=pytest.mark.once),
        pytest.param("niah_multiquery", "compact", torch.bfloat16, marks=pytest.mark.once),
    ],
)
def test_it_answers(task, wording, dtype):
    """12 prompts of 1,000 tokens; docs/embedded.md has many more."""
    assert right(load_embedded(dtype), task, wording, Grammar(), samples=12) >= 11


@pytest.mark.once
@pytest.mark.slow
def test_the_first_edition_answers_in_its_own_wording_and_noise():
    assert (
        right(load_embedded(torch.float32, "embedded-first"), "niah_multikey", "compact", Sentences(), samples=6) >= 5
    )


def right(loaded, task, wording, haystack, samples):
    """How many points a model gets."""
    plan = Plan(
        tasks=(task,), methods=("exact",), lengths=(1000,), samples=samples, wording=wording, asked=("before",),
        haystack=haystack, max_new_tokens=48,
    )  # fmt: skip
    rows = [row for step in Runner(*loaded, plan).run(set(), lambda row: ()) for row in step.rows]
    assert len(rows) == samples
    return sum(row["score"] for row in rows)
