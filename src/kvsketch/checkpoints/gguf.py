"""A GGUF file as a folder that `from_pretrained` loads: its weights as plain numbers in safetensors, its tokenizer.

transformers reads such a file, but takes the result for a quantized model, which it does not save. So the same weights
are given to a model of the plain configuration. The folder that was written is loaded, and must answer as before.
"""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvsketch.files import digest_of_file, making, nearest, read_json, write_json

RECORD = "imported.json"  # beside the model: what it was made from
FORMAT = 1
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAGIC = b"GGUF"
ALONE = "model.gguf"
SPARE = 50_000_000  # bytes, for the tokenizer and whatever else is small
CHECKED = "The quick brown fox jumps over the lazy dog, and 48213 other things happened in the year 1897."


@dataclass(frozen=True)
class Imported:
    """What a folder was made from."""

    file: str
    sha256: str
    dtype: str
    architecture: str
    parameters: int
    format: int = FORMAT


def import_gguf(
    path: str | Path,
    folder: str | Path,
    dtype: str = "float32",
    say: Callable[[str], None] = lambda _: None,
    elsewhere: str = "choose another folder, or 16 bits (--dtype bfloat16)",
) -> Imported:
    """Make the folder of a GGUF file, in one piece or not at all; a folder that is there and whole stays as it is.

    In float32 the weights are exactly those that transformers makes of the file; 16 bits take half the room.
    `elsewhere` is the advice given if there is no room.
    """
    path, folder = Path(path), Path(folder)
    if dtype not in PRECISIONS:
        raise ValueError(f"dtype must be one of {', '.join(PRECISIONS)}, got {dtype!r}")
    architecture, parameters = _read_header(path)
    record = Imported(path.name, digest_of_file(path), dtype, architecture, parameters)
    if imported(folder) == record:
        say(f"{folder} holds {path.name} already")
        return record
    _check_room(folder, parameters * PRECISIONS[dtype].itemsize + SPARE, elsewhere)
    try:
        with making(folder) as unfinished:
            say(f"reading {path.name}: {parameters:,} numbers")
            model, tokenizer = _read(path, PRECISIONS[dtype])
            ids = tokenizer(CHECKED, return_tensors="pt")["input_ids"]
            expected = _answers(model, ids)
            say("writing them")
            _plain(model).save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            write_json(unfinished / RECORD, asdict(record))
            for file in unfinished.iterdir():  # safetensors makes files that nobody else may read
                file.chmod((unfinished / RECORD).stat().st_mode & 0o777)
            del model
            say("checking what was written")
            _check(unfinished, ids, expected)
    except Exception as error:
        if "No space left" in str(error):  # safetensors has an error of its own for that
            raise OSError(f"no room left for {folder}, and nothing was written") from error
        raise
    return record


def imported(folder: Path) -> Imported | None:
    """What a folder was made from, if `import_gguf` made it."""
    try:
        return Imported(**read_json(folder / RECORD))
    except (OSError, ValueError, TypeError):
        return None


def _read_header(path: Path) -> tuple[str, int]:
    """Architecture, and how many numbers there are; refuses all but a whole GGUF file that transformers can read."""
    with path.open("rb") as file:
        begin = file.read(len(MAGIC))
    if begin != MAGIC:
        raise ValueError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}")
    if find_spec("gguf") is None:
        raise ValueError("reading a GGUF file needs the package gguf: pip install gguf")
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    try:
        reader = GGUFReader(path)
        architecture = reader.fields["general.architecture"].contents()
        parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
    except Exception as error:  # the reader trusts the file, and may fail in any way
        raise ValueError(
            f"{path} is not a whole GGUF file ({type(error).__name__}: {' '.join(str(error).split()):.200}): "
            "fetch it again"
        ) from error
    known = {*GGUF_SUPPORTED_ARCHITECTURES, "gpt-oss", "qwen2moe", "qwen3moe", "minimax-m2"}
    if not isinstance(architecture, str) or architecture not in known:
        raise ValueError(
            f"{path} holds a model of the architecture {architecture!r}, which this transformers cannot read from a "
            f"GGUF file; it reads {', '.join(sorted(known))}"
        )
    if not parameters:
        raise ValueError(f"{path} holds no weights: expected a model, not a vocabulary alone")
    return architecture, parameters


def _check_room(folder: Path, needed: int, elsewhere: str) -> None:
    free = shutil.disk_usage(nearest(folder)).free
    if free < needed:
        raise ValueError(
            f"{folder} needs about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there: make room, or "
            f"{elsewhere}"
        )


def _read(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """What transformers makes of this file, and not of others that may lie beside it."""
    given: dict[str, Any] = {"gguf_file": ALONE, "local_files_only": True, "trust_remote_code": False}
    with TemporaryDirectory() as folder:
        (Path(folder) / ALONE).symlink_to(path.resolve())
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **given)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **given)
        except MemoryError:
            raise
        except Exception as error:  # whatever is wrong with a file, and however transformers reports it
            what = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
            raise ValueError(f"transformers cannot read {path} ({what})") from error
    return model.eval(), tokenizer


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that knows of no quantization; nothing is copied."""
    about = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        about.pop(name, None)
    with torch.device("meta"):
        plain: PreTrainedModel = type(model)(type(model.config)(**about))
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


@torch.no_grad()
def _answers(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


def _check(folder: Path, ids: Tensor, expected: Tensor) -> None:
    """Refuse a folder that does not hold what was read."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
    tokens = AutoTokenizer.from_pretrained(folder, local_files_only=True)(CHECKED, return_tensors="pt")["input_ids"]
    if not torch.equal(tokens, ids):
        raise ValueError("the tokenizer that was written gives other tokens than the file's own: nothing was kept")
    error = float((_answers(model, ids) - expected).norm() / expected.norm())
    if not error < 1e-5:
        raise ValueError(f"the model that was written answers {error:.1e} away from the file's own: nothing was kept")
