"""What a compressed cache does to the prediction of the tokens that follow.

A window of a text is read once, exactly. Each method compresses what was read, as in `kvsketch bench`. Then the text
continues, a few tokens at a time, and the model predicts each next token with the exact cache and with the compressed
one. All but the last token of the window are compressed before the first prediction that counts:

    [ window of L tokens ........ ][ m next tokens ]
      L - 1 are read and compressed, then the last one and all but one of the next are fed
"""

import time
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.exact import Exact
from kvsketch.evaluation.layers.plan import Prompt
from kvsketch.evaluation.reading import Text
from kvsketch.evaluation.results.rows import Row, RowsFile, name_without_digest
from kvsketch.evaluation.texts.plan import Plan
from kvsketch.huggingface import SketchCache
from kvsketch.huggingface.naming import as_argument

FIRST = 16  # tokens whose divergence is noted apart: predictions after them rest more on tokens after the window


def run(model: PreTrainedModel, texts: Sequence[Prompt], plan: Plan, rows: RowsFile) -> Iterator[tuple[str, int]]:
    """Measure rows that the file lacks; yields what was just done, and how many rows that settled."""
    for text in texts:
        for first, starts, missing in plan.batches(text, rows.done):
            windows = f"window {first}" if len(starts) == 1 else f"windows {first} to {first + len(starts) - 1}"
            label = f"{name_without_digest(text.name)}, {windows}"
            yield f"{label}, read", len(starts) * (len(plan.configs) - len(missing))
            if not missing:
                continue
            ids = torch.cat([text.ids[:, start : start + plan.tokens + plan.next] for start in starts])
            case = Case(model, ids, plan, [plan.configs[method] for method in missing])
            for method in missing:
                found = case.measure(plan.configs[method])
                own = zip(starts, found, strict=True)
                rows.add([plan.labels(text, start, method) | row for start, row in own])
                yield f"{label}, {method}", len(starts)


class Case:
    """Windows that were read exactly, and what the model predicts with the exact cache of them."""

    def __init__(
        self, model: PreTrainedModel, ids: Int64[Tensor, "b n"], plan: Plan, methods: Sequence[MethodConfig]
    ) -> None:
        self.model, self.plan = model, plan
        self.text = Text(model, ids[:, : plan.tokens - 1], methods=methods)
        self.fed, self.follow = ids[:, plan.tokens - 1 : -1], ids[:, plan.tokens :]
        exact = self.text.cache(Exact())
        self.exact_nbytes = exact.nbytes // len(ids)
        self.exact = self._predictions(exact, plan.call)

    def measure(self, config: MethodConfig) -> list[Row]:
        """Divergence in nats a token, agreement on the likeliest token, and the loss, compressed and exact, by window.

        Bytes and seconds of the batch are divided equally among its windows; the share looked up is that of the batch.
        """
        self.text.whole(config)  # its time is not the method's
        began = time.perf_counter()
        cache = self.text.cache(config)
        seconds = time.perf_counter() - began
        report = cache.report()
        found = self._predictions(cache, self.plan.call_of(config))
        shared_by_all = {
            "nbytes": report.nbytes // len(found),
            "full_nbytes": report.full_nbytes // len(found),
            "exact_nbytes": self.exact_nbytes,
            "looked_up": cache.report().looked_up,
            "seconds": round(seconds / len(found), 4),  # to compress, or to read
            "batch": len(found),
        }
        own = zip(self.exact, found, self.follow, strict=True)
        return [_differences(*window) | shared_by_all for window in own]

    @torch.no_grad()
    def _predictions(self, cache: SketchCache, call: int) -> Float[Tensor, "b m v"]:
        """Log probabilities of all tokens that could come next."""
        seen, parts, given = self.text.ids.shape[1], [], as_argument(self.model.forward, cache)
        for part in self.fed.split(call, 1):
            positions = torch.arange(seen, seen + part.shape[1], device=part.device).expand(len(part), -1)
            parts.append(self.model(part, **given, position_ids=positions, use_cache=True).logits)
            seen += part.shape[1]
        return torch.cat(parts, 1).double().log_softmax(2)


def _differences(exact: Float[Tensor, "m v"], found: Float[Tensor, "m v"], follow: Int64[Tensor, " m"]) -> Row:
    """How one window's predictions differ from the exact ones."""
    divergence = (exact.exp() * (exact - found)).sum(1)
    agree = found.argmax(1) == exact.argmax(1)
    loss, loss_exact = (-float(one.gather(1, follow[:, None]).mean()) for one in (found, exact))
    return {
        "kl": float(divergence.mean()),
        "kl_first": float(divergence[:FIRST].mean()),
        "agree": float(agree.double().mean()),
        "nll": loss,
        "nll_exact": loss_exact,
    }
