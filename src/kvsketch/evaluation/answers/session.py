"""Reading a prompt and answering from its cache, with times: what `generate` and `demo` have in common."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from kvsketch.huggingface import SketchCache, prefill
from kvsketch.huggingface.naming import as_argument


@dataclass(frozen=True)
class Timing:
    """A number of tokens and the seconds that they took."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class Stopwatch(BaseStreamer):
    """Passes tokens on to another streamer and times them, except the first: it comes with the question."""

    def __init__(self, inner: BaseStreamer | None = None) -> None:
        self.inner, self.times = inner, list[float]()

    def put(self, value: Tensor) -> None:
        """One more token; the first call brings the prompt."""
        self.times.append(time.perf_counter())
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        """The text is complete."""
        if self.inner is not None:
            self.inner.end()

    @property
    def timing(self) -> Timing:
        """The number and the seconds of the tokens after the first."""
        generated = self.times[1:]
        return (
            Timing(max(0, len(generated) - 1), generated[-1] - generated[0]) if len(generated) > 1 else Timing(0, 0.0)
        )


def read_prompt(
    model: PreTrainedModel,
    ids: Tensor,
    cache: SketchCache,
    *,
    chunk: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Timing:
    """Have the cache read a prompt; how many tokens, and how long it took."""
    start = time.perf_counter()
    prefill(model, ids, cache, chunk=chunk, progress=progress)
    return Timing(ids.numel(), time.perf_counter() - start)


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    ids: Tensor,
    cache: SketchCache,
    *,
    max_new_tokens: int,
    streamer: BaseStreamer | None = None,
    **options: object,
) -> tuple[Tensor, Timing]:
    """The tokens that the model generates after these new ones, and how fast."""
    watch = Stopwatch(streamer)
    inputs = cache.new_tokens(ids) if cache.get_seq_length() else {"input_ids": ids}
    out = model.generate(
        **inputs,
        **as_argument(model.forward, cache),
        max_new_tokens=max_new_tokens,
        streamer=watch,
        **{"do_sample": False, **options},
    )
    return out[:, ids.shape[1] :], watch.timing


def split_ids(
    tokenizer: PreTrainedTokenizerBase, before: str, after: str, *, special: bool
) -> tuple[list[int], list[int]]:
    """The tokens of two parts of a text, encoded together; a token across the border belongs to the second part."""
    if not tokenizer.is_fast:  # slow tokenizers do not say where their tokens lie
        first, second = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
        return (tokenizer.build_inputs_with_special_tokens(first) if special else first), second
    encoded = tokenizer(before + after, add_special_tokens=special, return_offsets_mapping=True)
    ids, ends = encoded["input_ids"], [end for _, end in encoded["offset_mapping"]]
    cut = next((i for i, end in enumerate(ends) if end > len(before)), len(ids))
    return ids[:cut], ids[cut:]


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Rows of tokens padded on the left, and a mask of the real ones."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
