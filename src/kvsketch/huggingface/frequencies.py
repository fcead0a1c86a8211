"""Rotary frequencies that change when a text gets long, so that keys from before and after do not fit together."""

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

GUARD = "_kvsketch_guard"  # on attention modules of models that may drop a cache


@dataclass(frozen=True)
class ChangingFrequencies:
    """The rotary scaling of a model that rotates differently when the text gets longer than `limit`."""

    kind: str
    limit: int

    def check_can_follow(self, seen: int, count: int) -> None:
        """Refuse `count` tokens after `seen` others whose keys were rotated with different frequencies."""
        if seen == 0 or seen + count <= self.limit:
            return
        if self.kind == "dynamic" and count > 1:
            raise ValueError(
                f"this model rescales its rotary frequencies with the length beyond {self.limit} tokens, so keys of "
                f"different calls do not fit together: {seen} tokens are held and {count} came. Pass the whole prompt "
                "in one call, or stay below"
            )
        if self.kind == "longrope" and seen <= self.limit:
            raise ValueError(self.crossing(seen, seen + count))

    def crossing(self, seen: int, total: int) -> str:
        """The error message for a text that crosses the limit."""
        return (
            f"this model switches its rotary frequencies at {self.limit} tokens, and keys from both sides do not fit "
            f"together: the cache has seen {seen} tokens and the text has {total}. Stay below the switch, or read a "
            "longer prompt in one call with kvsketch.prefill(model, ids, cache) before generate"
        )


@dataclass
class DropGuard:
    """Notices when a model, at its rotary switch, has dropped the cache it was given (Phi-3 does, without a word)."""

    rope: ChangingFrequencies
    caches: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def watch(self, cache: Any) -> None:
        """Watch one of this model's caches, for as long as it exists."""
        with self.lock:
            self.caches.add(cache)

    def __reduce__(self) -> tuple[Any, ...]:
        return DropGuard, (self.rope,)  # a copy has no caches yet

    def check_not_dropped(self, total: int) -> None:
        """Called where attention runs without one of our caches."""
        with self.lock:
            caches = list(self.caches)
        for cache in caches:
            # `generate` asks the cache that it was given for its length before every call, dropped or not. It then
            # reads the whole text again; transformers 5.17 goes on with the last token alone.
            crossed = cache.seen <= self.rope.limit < total or cache.seen == self.rope.limit
            if cache.asked_for_length and crossed:
                cache.asked_for_length = False
                raise ValueError(self.rope.crossing(cache.seen, total))


def changing_frequencies(text: Any) -> ChangingFrequencies | None:
    """The rotary scaling in a text model's config, if it depends on the length of the text."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        kind = rope.get("rope_type")
        if kind in ("longrope", "dynamic"):
            limit = rope.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            return ChangingFrequencies(kind, int(limit or text.max_position_embeddings))
    return None
