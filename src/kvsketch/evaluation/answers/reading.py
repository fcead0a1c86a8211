"""Reading a batch of prompts once, exactly, for all methods that can take that over."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.exact import Exact
from kvsketch.evaluation.answers.plan import Asked
from kvsketch.huggingface import SketchCache, make_cache, prefill


@dataclass(frozen=True)
class Prompt:
    """A document and a question on it, as tokens."""

    context: list[int]
    question: list[int]
    answers: tuple[str, ...]
    depth: float | None


class Reading:
    """A batch of prompts: what was read of it exactly, and what methods make of that."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Prompt],
        pad: Callable[[list[list[int]]], tuple[Tensor, Tensor]],
    ) -> None:
        self.model, self.prompts, self.pad = model, prompts, pad
        self._exact = dict[Asked, SketchCache]()

    def compressed(self, asked: Asked, config: MethodConfig) -> SketchCache:
        """A cache that has read the documents, and all but the last token of the questions if they are known before."""
        if can_share_reading(config):
            return self.exact(asked).compress(config)
        cache = make_cache(self.model, config)
        if asked == "after":
            return self._read([p.context for p in self.prompts], cache)
        return self._read([p.context + p.question[:-1] for p in self.prompts], cache)

    def exact(self, asked: Asked) -> SketchCache:
        """The exact cache of the documents, and of the questions if they are known before; read once."""
        if "after" not in self._exact:
            self._exact["after"] = self._read([p.context for p in self.prompts], make_cache(self.model, Exact()))
        if asked not in self._exact:
            questions = [p.question[:-1] for p in self.prompts]
            self._exact[asked] = self._read(questions, self._exact["after"].fork())
        return self._exact[asked]

    def _read(self, rows: list[list[int]], cache: SketchCache) -> SketchCache:
        ids, mask = self.pad(rows)
        return prefill(self.model, ids, cache, attention_mask=mask) if ids.shape[1] else cache


def can_share_reading(config: MethodConfig) -> bool:
    """Whether a method can take over what an exact cache has read."""
    return config.prefill == "exact" and not config.before_rotation
