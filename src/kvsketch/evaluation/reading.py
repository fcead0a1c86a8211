"""Reading a text once, exactly, for all methods that can continue from that."""

from collections.abc import Iterable

from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.caches.core.asking import QUESTIONS
from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.exact import ASKINGS, NOTHING, Exact, noting_for
from kvsketch.huggingface import SketchCache, make_cache, prefill


class Text:
    """A text, or a batch of texts, and the caches of it; `methods` are those that will be asked for."""

    def __init__(
        self,
        model: PreTrainedModel,
        ids: Int64[Tensor, "b n"],
        real: Int64[Tensor, "b n"] | None = None,
        methods: Iterable[MethodConfig] = (),
    ) -> None:
        self.model, self.ids, self.real, self.methods = model, ids, real, tuple(methods)
        self._whole = dict[Exact, SketchCache]()

    def whole(self, config: MethodConfig) -> SketchCache | None:
        """The exact cache that a method can take over, read once; None if the method must read for itself."""
        shared = readable_for(config, self.methods)
        if shared is None:
            return None
        if shared not in self._whole:
            self._whole[shared] = self._read(shared)
        return self._whole[shared]

    def cache(self, config: MethodConfig) -> SketchCache:
        """The cache of a method that has read the text."""
        whole = self.whole(config)
        return self._read(config) if whole is None else whole.compress(config)

    def _read(self, config: MethodConfig) -> SketchCache:
        return prefill(self.model, self.ids, make_cache(self.model, config), attention_mask=self.real)


def readable_for(config: MethodConfig, beside: Iterable[MethodConfig] = ()) -> Exact | None:
    """The exact cache that a method can share with those `beside` it; None if it must read for itself."""
    own = _noting(config)
    if own is None or own == QUESTIONS:
        return None if own is None else Exact(noting=own)
    wanted = {own, *map(_noting, beside)}
    return Exact(noting=", ".join(name for name in ASKINGS if name in wanted - {QUESTIONS}) or NOTHING)


def _noting(config: MethodConfig) -> str | None:
    """What an exact cache must note for a method; None if the method cannot take over another cache's reading."""
    return None if config.prefill != "exact" or config.before_rotation else noting_for(config.asking)
