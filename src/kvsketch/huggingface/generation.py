"""The two lines a user writes, and reading a long prompt in chunks."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsketch.caches.core.budget import Keep
from kvsketch.caches.core.checks import check_count
from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.core.spans import Given, read_spans
from kvsketch.caches.core.tokens import chunks
from kvsketch.caches.registry import chosen_method
from kvsketch.huggingface.attaching import attach
from kvsketch.huggingface.before_call import check_ids, check_own_mask, check_tokens
from kvsketch.huggingface.cache import SketchCache
from kvsketch.huggingface.identity import Identity
from kvsketch.huggingface.naming import as_argument
from kvsketch.huggingface.prompt import NO_QUESTIONS
from kvsketch.huggingface.protecting import check_room, lengths_of, protecting
from kvsketch.huggingface.supported import unwrapped


def make_cache(
    model: nn.Module,
    method: str | MethodConfig | None = None,
    *,
    keep: Keep | None = None,
    questions: Sequence[Tensor] | Mapping[str, Tensor] = (),
    protect: Given = (),
) -> SketchCache:
    """An empty cache for `model.generate(..., cache=cache)`; also attaches the model.

    `keep` is how much it may hold: a fraction of the tokens (0.25), entries per head (4096) or bytes ("512MB"); the
    recommended method decides what. `method` names another one: a spec such as "uniform(keep=0.25)" (see
    `kvsketch.methods()`), or a config such as `kvsketch.Uniform(keep=0.25)`. Without both, the cache is exact.
    `questions` say what matters in prompts, for a method that goes by questions ("kvzip(queries='questions')"): the
    token ids of each, as they would follow a prompt; `kvsketch.study` has the model write some. `protect` are spans of
    the prompt that are never dropped: (start, stop) pairs for all rows, or a list of such pairs for each row, padding
    not counted. `kvsketch.detach(model)` undoes the attaching.
    """
    config = chosen_method(method, keep)
    asked, protected = checked_questions(config, questions), read_spans(protect)
    check_room(config, protected)
    inner = unwrapped(model)
    config = Identity(inner).fitted(config)
    for ids in asked:
        check_tokens(inner, ids)
    return SketchCache(config, attach(model, before_rotation=config.before_rotation), asked, protected)


def checked_questions(config: MethodConfig, questions: Sequence[Tensor] | Mapping[str, Tensor]) -> list[Tensor]:
    """Questions as rows of ids; refuses anything else, and questions that the method does not use or that it lacks."""
    wanted = config.askings.by_questions
    if wanted != bool(len(questions)):
        if wanted:
            raise ValueError(NO_QUESTIONS.format(config))
        raise ValueError(f"{config} does not go by questions: leave them out, or use kvzip(queries='questions')")
    each = questions.values() if isinstance(questions, Mapping) else questions
    asked = []
    for ids in each:
        check_ids(ids, "a question is token ids, 1 × tokens")
        row = ids[None] if ids.ndim == 1 else ids
        if row.ndim != 2 or row.shape[0] != 1 or row.shape[1] == 0:
            raise ValueError(f"a question is token ids, 1 × tokens, got {ids.dtype} of shape {tuple(ids.shape)}")
        asked.append(row)
    return asked


@torch.no_grad()
def prefill(
    model: nn.Module,
    input_ids: Tensor,
    cache: SketchCache,
    *,
    attention_mask: Tensor | None = None,
    chunk: int | None = None,
    progress: Callable[[int], None] | None = None,
    protect: Given = (),
) -> SketchCache:
    """Have the cache read a prompt, without generating; then ask with `cache.new_tokens`.

    Reads all tokens in one call, or `chunk` at a time so that the model's own activations stay small; by default in
    chunks if the method says `prefill="streaming"`. After each chunk `progress` is called with the number of tokens
    read, including those of a second reading if the method wants one. After an interruption, the same call again
    completes it. `attention_mask` covers only the new tokens. `protect` is as for `make_cache`, for a cache that was
    made without it.
    """
    inner: PreTrainedModel = unwrapped(model)
    _check_prompt(input_ids, attention_mask, chunk, cache)
    if cache.prompt.complete(cache, input_ids, progress):
        return cache
    whole, already = (input_ids, attention_mask), cache.prompt.read_already(input_ids, attention_mask)
    if already:  # by the same call, which was interrupted
        input_ids, protect = input_ids[:, already:], ()
        attention_mask = None if attention_mask is None else attention_mask[:, already:]
    if input_ids.shape[1] == 0:  # all of it was read already
        cache.prompt.end(cache, progress)
        return cache
    (rows, count), mask = input_ids.shape, attention_mask
    if chunk is None:
        chunk = cache.config.chunk if cache.config.prefill == "streaming" else count
    if cache.seen:
        mask = cache.new_tokens(input_ids, mask)["attention_mask"]
    mask = None if mask is None or bool(mask.all()) else mask
    with protecting(cache.stack, protect, lengths_of(rows, count, attention_mask)), cache.prompt.reading(*whole):
        cache.prompt.check_context(inner, count)
        for stop in _read(inner, input_ids, mask, cache, chunk):
            if progress is not None:
                progress(already + stop)
    cache.prompt.end(cache, progress)
    return cache


def _read(
    model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None, cache: SketchCache, chunk: int
) -> Iterator[int]:
    """Give the model one chunk after the other; yields each time how many tokens were read."""
    # Only the cache matters, so logits are computed for a single token if the model can leave out the others.
    fewer = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    seen = cache.seen
    for start, stop in chunks(input_ids.shape[1], chunk):
        ids = input_ids[:, start:stop]
        known = None if mask is None else mask[:, : seen + stop]
        positions = None if known is None else (known.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        given = {"input_ids": ids, "attention_mask": known, "position_ids": positions}
        model(**given, **as_argument(model.forward, cache), use_cache=True, **fewer)
        yield stop


def _check_prompt(input_ids: Tensor, attention_mask: Tensor | None, chunk: int | None, cache: SketchCache) -> None:
    """Refuse what cannot be a prompt for this cache, before any of it is read."""
    if not isinstance(cache, SketchCache):
        raise ValueError(f"prefill fills a cache of kvsketch.make_cache(model, ...), got {type(cache).__name__}")
    check_ids(input_ids, "a prompt is token ids, rows × tokens")
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"a prompt is rows × tokens with at least one token, got shape {tuple(input_ids.shape)}")
    if chunk is not None:
        check_count("chunk", chunk, least=1)
    check_own_mask(attention_mask, input_ids)
