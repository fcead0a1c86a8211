"""kvsketch: language models with long contexts and a small KV cache.

Importing this package loads nothing; what you use loads what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsketch.attention import Partial, WeightedTokens, exact_attention, merge, weighted_attention
    from kvsketch.caches.registry import (
        H2O,
        LSH,
        BalanceKV,
        ClusterGen,
        Exact,
        ExpectedAttention,
        KeyDiff,
        KMeans,
        KVzip,
        PyramidKV,
        RandomBuckets,
        Retrieval,
        Saap,
        SnapKV,
        StreamingHeads,
        StreamingLLM,
        SubGen,
        Tova,
        Uniform,
        methods,
        parse_spec,
    )
    from kvsketch.evaluation.embedded import load_embedded
    from kvsketch.huggingface import (
        SketchCache,
        attach,
        attached,
        cuda_graphs,
        detach,
        load_cache,
        make_cache,
        prefill,
        split_prompt,
        study,
    )

__version__ = "0.3.0"

_HOMES = {
    "kvsketch.attention": ("Partial", "WeightedTokens", "exact_attention", "merge", "weighted_attention"),
    "kvsketch.caches.registry": (
        "BalanceKV",
        "ClusterGen",
        "Exact",
        "ExpectedAttention",
        "H2O",
        "KMeans",
        "KVzip",
        "KeyDiff",
        "LSH",
        "PyramidKV",
        "RandomBuckets",
        "Retrieval",
        "Saap",
        "SnapKV",
        "StreamingHeads",
        "StreamingLLM",
        "SubGen",
        "Tova",
        "Uniform",
        "methods",
        "parse_spec",
    ),
    "kvsketch.evaluation.embedded": ("load_embedded",),
    "kvsketch.huggingface": (
        "SketchCache",
        "attach",
        "attached",
        "cuda_graphs",
        "detach",
        "load_cache",
        "make_cache",
        "prefill",
        "split_prompt",
        "study",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "H2O",
    "LSH",
    "BalanceKV",
    "ClusterGen",
    "Exact",
    "ExpectedAttention",
    "KMeans",
    "KVzip",
    "KeyDiff",
    "Partial",
    "PyramidKV",
    "RandomBuckets",
    "Retrieval",
    "Saap",
    "SketchCache",
    "SnapKV",
    "StreamingHeads",
    "StreamingLLM",
    "SubGen",
    "Tova",
    "Uniform",
    "WeightedTokens",
    "__version__",
    "attach",
    "attached",
    "cuda_graphs",
    "detach",
    "exact_attention",
    "load_cache",
    "load_embedded",
    "make_cache",
    "merge",
    "methods",
    "parse_spec",
    "prefill",
    "split_prompt",
    "study",
    "weighted_attention",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'kvsketch' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
