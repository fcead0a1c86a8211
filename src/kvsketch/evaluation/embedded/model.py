"""The model inside the package: a small Llama that was trained to find what it is asked for."""

from collections.abc import Mapping
from importlib.resources import as_file, files
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

# Names of its editions, and their folders. The first is there for measurements that were made with it.
EDITIONS: Mapping[str, str] = {"embedded": "second", "embedded-first": "first"}


def load_embedded(
    dtype: torch.dtype | str = "auto", name: str = "embedded"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """An edition of the model and its tokenizer, read like any other checkpoint."""
    with as_file(_folder(name)) as folder:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        return model.eval(), load_tokenizer(name)


def load_tokenizer(name: str = "embedded") -> PreTrainedTokenizerBase:
    """The tokenizer alone."""
    with as_file(_folder(name)) as folder:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _folder(name: str) -> Any:
    return files("kvsketch") / "assets" / EDITIONS[name]
