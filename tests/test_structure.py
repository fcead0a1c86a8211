"""The folder tree is the architecture: imports run one way, and importing kvsketch loads nothing heavy."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "kvsketch"
ORDER = [
    "files",
    "attention",
    "algorithms",
    "kernels",
    "caches",
    "huggingface",
    "checkpoints",
    "editions",
    "fitting",
    "evaluation",
    "cli",
]
SCRIPT = """
import sys, threading
before = set(sys.modules)
import kvsketch
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
heavy = loaded & {"transformers", "triton", "matplotlib", "numpy", "typer", "rich", "safetensors"}
assert not heavy, heavy
kvsketch.methods(), kvsketch.parse_spec("uniform(keep=0.5)")
heavy = {name.split(".")[0] for name in sys.modules} & {"transformers", "matplotlib", "typer"}
assert not heavy, heavy
"""
UNCHANGED = """
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
from transformers.models.llama import modeling_llama

def world():
    modeling = {name: id(value) for name, value in vars(modeling_llama).items()}
    return (sorted(AttentionInterface().valid_keys()), sorted(AttentionMaskInterface().valid_keys()),
            dict(DYNAMIC_LAYER_TYPE_MAPPING), modeling, torch.get_default_dtype(), torch.get_num_threads(),
            torch.random.get_rng_state().sum().item())

before = world()
import kvsketch, kvsketch.huggingface, kvsketch.cli
assert world() == before
"""


def test_no_published_result_names_a_folder_of_a_machine():
    found = sorted((SOURCE.parent.parent / "docs" / "results").rglob("*.jsonl"))
    assert found
    for path in found:
        named = re.search(r"(?<![\w.~-])/(?:\w[\w.-]*/)+[\w.-]*", path.read_text(encoding="utf-8"))
        assert named is None, f"{path.name}: {named[0]}"


def module_of(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_run_one_way(path):
    here = module_of(path)
    if here == "__init__" or here == "__main__":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in getattr(node, "names", [])]
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for name in names:
            assert name is not None, f"{path}: relative import"
            parts = name.split(".")
            if parts[0] == "transformers":
                assert ORDER.index(here) >= ORDER.index("huggingface"), f"{here} imports transformers"
            if parts[0] == "kvsketch" and len(parts) > 1:
                assert ORDER.index(parts[1]) <= ORDER.index(here), f"{here} imports {name}"


def test_one_module_alone_knows_what_transformers_called_a_cache():
    """`past_key_values`, before 5.24: code that passes or reads it warns, and from 5.40 on it is nothing at all."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            said = [getattr(node, name, None) for name in ("arg", "attr", "value")]  # `x(name=...)`, `x.name`, "name"
            assert "past_key_values" not in said or path.name == "naming.py", f"{path}: line {node.lineno}"


def imports_of(path, modules):
    """The modules that a file names anywhere, also for type checkers alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvsketch"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)


def test_no_modules_import_one_another():
    """In a circle of whatever length: then none of them can be read first."""
    paths = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    named = {name: set(imports_of(path, paths)) - {name} for name, path in paths.items()}
    while free := [name for name, imported in named.items() if not imported & named.keys()]:
        for name in free:
            del named[name]
    assert not named, f"a circle is among {sorted(named)}"


def run(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_importing_kvsketch_loads_nothing_heavy():
    done = run(SCRIPT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_importing_kvsketch_changes_nothing_global():
    done = run(UNCHANGED)
    assert done.returncode == 0, done.stderr


def test_unknown_names_are_attribute_errors():
    import kvsketch

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvsketch.nothing
    for name in kvsketch.__all__:
        assert getattr(kvsketch, name) is not None


def test_type_checkers_see_what_is_loaded_when_it_is_used():
    import kvsketch

    tree = ast.parse(Path(kvsketch.__file__).read_text())
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith("kvsketch")]
    assert {alias.name: node.module for node in froms for alias in node.names} == kvsketch._HOME_OF
    assert set(kvsketch.__all__) == {"__version__", *kvsketch._HOME_OF}
