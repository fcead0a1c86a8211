"""The model inside the package: a small Llama, trained to find in a text what it is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvsketch.editions import EDITIONS, EMBEDDED


def load_embedded(
    dtype: torch.dtype | str = "auto", name: str = EMBEDDED
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The small model inside the package, and its tokenizer; `name` is an edition of it.

    transformers reads it like any other checkpoint.
    """
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype must be auto or one of torch, such as float32, got {dtype!r}")
    with _files(name) as folder:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.eval(), load_tokenizer(name)


def load_tokenizer(name: str = EMBEDDED) -> PreTrainedTokenizerBase:
    """The tokenizer alone."""
    with _files(name) as folder:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@contextmanager
def _files(name: str) -> Iterator[Path]:
    """The folder of an edition; an error that its files cause is raised again with advice on how to mend it."""
    if name not in EDITIONS:
        raise ValueError(f"the models inside the package are {', '.join(EDITIONS)}, got {name!r}")
    with as_file(files("kvsketch") / "assets" / EDITIONS[name]) as folder:
        try:
            yield folder
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # files can be broken in any way, and transformers raises any exception for it
            anew = (
                ", or make it anew: kvsketch train-demo FOLDER (seven minutes of a GPU, or two to three hours), then "
                f"copy the files in FOLDER/model to {folder}, and run kvsketch fit and kvsketch profile"
            )
            raise ValueError(
                f"{folder} should hold the model {name!r}, and cannot be loaded ({type(error).__name__}: "
                f"{' '.join(str(error).split()):.200}). Install kvsketch again{anew if name == EMBEDDED else ''}"
            ) from error
