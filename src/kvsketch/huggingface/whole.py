"""What layers know of the cache they are in."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvsketch.caches.core.budget import parse_bytes
from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.core.spans import Protected, Spans
from kvsketch.huggingface.model import ModelLink
from kvsketch.huggingface.modules import heads_of, of_layer


@dataclass
class Whole:
    """What concerns all layers. It does not refer to them, so that a cache is freed as soon as nobody holds it."""

    config: MethodConfig
    model: ModelLink
    protected: Protected  # of the text that is read first
    dtype: torch.dtype | None = None  # that of autocast, or of the model, when the first tokens came
    sliding: Sequence[tuple[int, int]] = ()  # transformers' sliding layers, and how many tokens each holds
    ours: int = 0  # layers that share a budget

    def spans_of(self, rows: int) -> list[Spans]:
        """The protected spans of each row."""
        return self.protected.of(rows)

    def layer_bytes(self, rows: int, entry_bytes: int) -> int:
        """The share of each of our layers in a budget in bytes: what sliding layers leave, in equal parts."""
        total = parse_bytes(str(self.config.budget_given))
        needed = sum(window * rows * self.token_bytes(index) for index, window in self.sliding)
        if total <= needed:
            raise ValueError(
                f"keep={self.config.budget_given!r} is less than the sliding layers alone need: "
                f"{needed:,} bytes for {rows} rows"
            )
        return (total - needed) // self.ours

    def token_bytes(self, index: int, dtype: torch.dtype | None = None) -> int:
        """Bytes that a token's keys and values take in a layer, by the model's config."""
        heads, width = (of_layer(found, index) for found in heads_of(self.model.config))
        return 2 * heads * width * (dtype or self.dtype or torch.float32).itemsize
