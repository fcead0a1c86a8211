"""kvsketch for transformers: the only part of the library that imports it."""

from kvsketch.huggingface.attaching import attach, attached, detach
from kvsketch.huggingface.cache import SketchCache
from kvsketch.huggingface.generation import make_cache, prefill
from kvsketch.huggingface.loading import load_cache
from kvsketch.huggingface.report import LayerReport, Report

__all__ = [
    "LayerReport",
    "Report",
    "SketchCache",
    "attach",
    "attached",
    "detach",
    "load_cache",
    "make_cache",
    "prefill",
]
