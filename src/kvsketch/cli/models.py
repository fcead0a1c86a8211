"""Models by name: a folder or name that transformers knows, the embedded model, or a real one from a package."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsketch.cli.notes import notes, say
from kvsketch.cli.options import is_ours
from kvsketch.editions import EDITIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED_MODEL = (
    "This is the small model inside the package. It was trained to look things up in records and texts of a few "
    "thousand tokens; it cannot write prose."
)


def check_device(device: str | None) -> str:
    """The device to run on: the one named, if it is there; cuda or else cpu if none is named."""
    import torch

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=place).item()  # a device without memory, such as meta, is there but of no use
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {place!r} is not there: {str(error).splitlines()[0]}") from error
    return place


def load_model(name: str | None, dtype: str, device: str | None) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The model and its tokenizer; without a name the embedded model, with a note that says so."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvsketch.checkpoints import PRECISIONS
    from kvsketch.evaluation.embedded import load_embedded

    if dtype != "auto" and dtype not in PRECISIONS:
        raise ValueError(f"--dtype must be auto or one of {', '.join(PRECISIONS)}, got {dtype!r}")
    place = check_device(device)
    wanted = "auto" if dtype == "auto" else PRECISIONS[dtype]
    if name is None:
        notes.print(EMBEDDED_MODEL, style="yellow", soft_wrap=True)
        model, tokenizer = load_embedded(wanted)
    elif is_ours(name):
        model, tokenizer = load_embedded(wanted, name)
    else:
        name = _folder_of(name)
        try:
            # no code of a checkpoint is ever run, and no pickle is loaded
            safe: dict[str, Any] = {"trust_remote_code": False, "use_safetensors": True}
            model = AutoModelForCausalLM.from_pretrained(name, dtype=wanted, **safe)
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except MemoryError:
            raise
        except Exception as error:  # a folder can be broken in any way, and transformers raises any exception for it
            what = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
            known = "" if Path(name).is_dir() else f". There is no folder of this name; those of ours are {_ours()}"
            raise ValueError(f"{name} cannot be loaded as a model with its tokenizer ({what}){known}") from error
    return model.to(place).eval(), tokenizer


def _ours() -> str:
    from kvsketch.checkpoints import SMOLLM2

    return ", ".join([*EDITIONS, SMOLLM2])


def _folder_of(name: str) -> str:
    """The folder or name to load with transformers; for smollm2 our own folder."""
    from kvsketch.checkpoints import SMOLLM2, smollm2_folder

    if name == SMOLLM2 and not Path(name).exists():
        return str(smollm2_folder(say))
    if name.lower().endswith(".gguf"):
        raise ValueError(f"{name} is a GGUF file: make a folder of it first, with kvsketch import {name} -o FOLDER")
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():  # not a name that transformers could know
        raise ValueError(f"there is no folder {name}: name a model's folder, or leave it out for the embedded model")
    return name
