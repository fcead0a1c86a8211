"""kvsketch for transformers: the first part of the library that imports transformers; what it builds on does not.

What users call: `generation.py`, `attaching.py`, `loading.py`, `studying.py`, `templates.py`.

    attaching.py     gives a model our attention, and takes it away again; supported.py: which models
    attention.py     the attention function and the mask function; rotation.py: vectors before they are rotated
    model.py         the model that a cache was made for; identity.py: which weights; frequencies.py: which rotation
    cache.py         what transformers calls, and what users ask
    before_call.py   what is refused before any layer takes a part of it
    layers.py        all layers of a cache; layer.py: one of ours; stock.py: those that stay transformers' own
    positions.py     padding and positions of the text so far
    rows.py, taking_back.py, compressing.py, report.py, cache_file.py    what is done with all layers at once
    prompt.py        a prompt that is held whole until it is read; rereading.py: what is read after it
    templates.py     a text and a question in a chat template
    graphs.py        decode steps that are recorded and replayed
    capture.py       what layers see while a model reads
"""

from kvsketch.huggingface.attaching import attach, attached, detach
from kvsketch.huggingface.cache import SketchCache
from kvsketch.huggingface.generation import make_cache, prefill
from kvsketch.huggingface.graphs import cuda_graphs
from kvsketch.huggingface.loading import load_cache
from kvsketch.huggingface.report import LayerReport, Report
from kvsketch.huggingface.studying import study
from kvsketch.huggingface.templates import split_prompt

__all__ = [
    "LayerReport",
    "Report",
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
]
