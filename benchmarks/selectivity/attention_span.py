"""How few of the keys get most of the attention: the paper's "attention span".

Paper: Saap (2025), section 3 and Figure 3. A text is cut as

    [ sinks | past | window | asking ]

and the last tokens ask: the query of each sees the tokens up to itself. Sinks and window are attended anyway, so what
matters is how the attention to the past is spread.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.attention import NO_MASS, logits_of
from kvsketch.caches.core.checks import check_count
from kvsketch.caches.core.config import BLOCK
from kvsketch.evaluation.results.rows import Row
from kvsketch.huggingface.capture import Captured

FIXED = 8  # keys to take that are the same for all queries, as sinks are


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which tokens of a text are attended anyway, and how many of the last ones ask."""

    sinks: int = 1
    window: int = 2047
    asking: int = 64

    def __post_init__(self) -> None:
        check_count("sinks", self.sinks, least=0)
        check_count("window", self.window, least=1)
        check_count("asking", self.asking, least=1)

    def past(self, tokens: int) -> slice:
        """The tokens that have left the window before the first asking token: whole blocks, as in a cache."""
        left = tokens - self.asking - self.sinks - self.window
        return slice(self.sinks, self.sinks + max(0, left) // BLOCK * BLOCK)

    @property
    def labels(self) -> dict[str, int]:
        """The three numbers by name."""
        return {"sinks": self.sinks, "window": self.window, "asking": self.asking}

    def check_text(self, name: str, tokens: int) -> None:
        """Refuse a text without a past."""
        past = self.past(tokens)
        if past.stop == past.start:
            least = self.sinks + BLOCK + self.window + self.asking
            raise ValueError(
                f"{name} has {tokens:,} tokens; the study needs at least {least:,}: {self.sinks} first ones, a window "
                f"of {self.window:,}, {self.asking} that ask, {BLOCK} between: give a longer text, or a smaller window"
            )


def span(seen: Captured, cut: Cut, top: int) -> Row:
    """Of each query head's attention to the past, the share of the `top` largest keys; a mean over queries.

    Also the share of the FIXED keys that are largest for all queries together: if that is nearly as much, the same keys
    are looked up whatever is asked, as with a sink. And the share that the past has of all attention.
    """
    past = cut.past(seen.keys.shape[1])
    top_shares, fixed_shares, past_shares = list[float](), list[float](), list[float]()
    for logits in logits_by_head(seen, cut.asking):
        all_mass, past_logits = logits.logsumexp(2), logits[..., past]
        past_mass = past_logits.logsumexp(2)
        largest = past_logits.topk(min(top, past_logits.shape[2]), 2).values.logsumexp(2)
        top_shares += (largest - past_mass).exp().mean(1).tolist()
        past_shares += (past_mass - all_mass).exp().mean(1).tolist()
        means = past_logits.softmax(2).mean(1)
        fixed_shares += means.topk(min(FIXED, means.shape[1]), 1).values.sum(1).tolist()
    shares = {"top_shares": top_shares, "fixed_shares": fixed_shares, "past_shares": past_shares}
    return {"past": past.stop - past.start, **shares}


def logits_by_head(seen: Captured, asking: int) -> Iterator[Float[Tensor, "g q n"]]:
    """Logits of the last tokens' queries with all keys up to their own, a KV head at a time."""
    heads, tokens, _ = seen.keys.shape
    group = len(seen.queries) // heads
    places = torch.arange(tokens, device=seen.keys.device)
    hidden = places > places[-asking:, None]
    for head in range(heads):
        queries = seen.queries[None, head * group : (head + 1) * group, -asking:]
        found = logits_of(queries, seen.keys[None, head : head + 1], seen.scale, seen.softcap)
        yield found.reshape(group, asking, tokens).masked_fill(hidden, NO_MASS)
