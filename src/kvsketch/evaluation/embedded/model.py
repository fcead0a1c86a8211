"""The model inside the package: a small Llama that was trained to find what it is asked for."""

from importlib.resources import as_file, files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def load_embedded(dtype: torch.dtype | str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer, read like any other checkpoint."""
    with as_file(files("kvsketch") / "assets") as folder:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        return model.eval(), load_tokenizer()


def load_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer alone."""
    with as_file(files("kvsketch") / "assets") as folder:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
