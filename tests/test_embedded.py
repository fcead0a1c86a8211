"""The model inside the package: plain, small, and able to find what it is asked for."""

from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvsketch.evaluation.answers.plan import Plan
from kvsketch.evaluation.answers.runner import Runner
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.evaluation.embedded.training.tokenizer import build_tokenizer

ASSETS = Path(str(files("kvsketch") / "assets"))


def test_any_llama_code_can_load_it():
    config = AutoConfig.from_pretrained(ASSETS)
    assert config.model_type == "llama"
    assert config.num_hidden_layers >= 3
    assert config.head_dim in (32, 64)
    assert config.num_key_value_heads < config.num_attention_heads
    model = AutoModelForCausalLM.from_pretrained(ASSETS, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 6e6
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    assert tokenizer.backend_tokenizer.to_str() == build_tokenizer().backend_tokenizer.to_str()


def test_it_is_small_and_safe():
    found = [path for path in ASSETS.rglob("*") if path.is_file()]
    index = [path for path in found if "indexes" in path.parts]
    assert sum(path.stat().st_size for path in index) <= 6_000_000
    assert sum(path.stat().st_size for path in found if path not in index) <= 12_000_000
    assert {path.suffix for path in found} <= {".safetensors", ".json", ".md"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "dtype"),
    [
        ("lines", torch.float32),
        pytest.param("kv", torch.float32, marks=pytest.mark.once),
        pytest.param("niah_multikey", torch.float32, marks=pytest.mark.once),
        pytest.param("niah_multiquery", torch.bfloat16, marks=pytest.mark.once),
    ],
)
def test_it_answers(task, dtype):
    """12 prompts of 1,000 tokens; over 200 it is right in at least 98 % (docs/embedded.md)."""
    model, tokenizer = load_embedded(dtype)
    plan = Plan(tasks=(task,), methods=("exact",), lengths=(1000,), samples=12, wording="compact", asked=("before",))
    rows = [row for step in Runner(model, tokenizer, plan).run(set(), lambda row: ()) for row in step.rows]
    assert len(rows) == 12
    assert sum(row["score"] for row in rows) >= 11


@pytest.mark.once
@pytest.mark.slow
def test_it_answers_longevals_own_wording():
    model, tokenizer = load_embedded(torch.float32)
    plan = Plan(tasks=("lines",), methods=("exact",), lengths=(1500,), samples=10, asked=("before",))
    rows = [row for step in Runner(model, tokenizer, plan).run(set(), lambda row: ()) for row in step.rows]
    assert sum(row["score"] for row in rows) >= 9
