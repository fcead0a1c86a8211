"""The model inside the package: a small Llama that was trained to find what it is asked for."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

# Names of its editions, and their folders. The first is there for measurements that were made with it.
EDITIONS: Mapping[str, str] = {"embedded": "second", "embedded-first": "first"}


def load_embedded(
    dtype: torch.dtype | str = "auto", name: str = "embedded"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """An edition of the model and its tokenizer, read like any other checkpoint."""
    with _files(name) as folder:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.eval(), load_tokenizer(name)


def load_tokenizer(name: str = "embedded") -> PreTrainedTokenizerBase:
    """The tokenizer alone."""
    with _files(name) as folder:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@contextmanager
def _files(name: str) -> Iterator[Path]:
    """The folder of an edition; what goes wrong with its files is said with what mends it."""
    if name not in EDITIONS:
        raise ValueError(f"the models inside the package are {', '.join(EDITIONS)}, got {name!r}")
    with as_file(files("kvsketch") / "assets" / EDITIONS[name]) as folder:
        try:
            yield folder
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # files can be broken in any way, and transformers says so in any words
            anew = f", or make it anew: kvsketch train-demo FOLDER, then copy FOLDER/model to {folder}"
            raise ValueError(
                f"{folder} should hold the embedded model, and cannot be loaded ({type(error).__name__}: "
                f"{' '.join(str(error).split()):.200}). Install kvsketch again{anew if name == 'embedded' else ''}"
            ) from error
