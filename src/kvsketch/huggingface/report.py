"""What a cache holds, for people: `print(cache.report())`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsketch.caches.exact import Exact
from kvsketch.huggingface.layer import SketchLayer
from kvsketch.huggingface.layers import LayerStack, bytes_held
from kvsketch.kernels import few_queries


@dataclass(frozen=True)
class LayerReport:
    """One layer. `entries` and `error` are per head, averaged over rows; None where the layer is not kvsketch's."""

    layer: int
    entries: list[float] | None  # per KV head; empty before the first token
    nbytes: int
    full_nbytes: int  # of an uncompressed cache
    error: list[float] | None  # per query head: ‖answer - exact answer‖ / ‖exact answer‖
    measured_at: int  # tokens seen when the error was measured
    read: list[float] | None = None  # per KV head, if tokens are looked up: the share of tokens that queries read
    recall: list[float] | None = None  # per query head: the share of the attention's mass in what was read
    details: dict[str, float] = field(default_factory=dict)  # what the method says about itself
    warning: str | None = None


@dataclass(frozen=True)
class Report:
    """What all layers hold, against what an uncompressed cache would hold."""

    method: str
    seen: int
    layers: tuple[LayerReport, ...]
    protected: tuple[int, ...] = ()  # tokens of each row that are never dropped, if there are any
    kernels: str = "torch"  # what computes the attention of a step
    exact: bool = False  # whether everything is held, and read: then there is no error

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def full_nbytes(self) -> int:
        """Bytes that an uncompressed cache would hold."""
        return sum(layer.full_nbytes for layer in self.layers)

    @property
    def error(self) -> float | None:
        """Mean relative error of attention over layers and heads; None where it was not measured."""
        errors = [value for layer in self.layers for value in layer.error or []]
        return sum(errors) / len(errors) if errors else None

    @property
    def looked_up(self) -> float | None:
        """The share of the past that a query reads, mean over the layers and heads that look tokens up."""
        shares = [value for layer in self.layers for value in layer.read or []]
        return sum(shares) / len(shares) if shares else None

    def __str__(self) -> str:
        share = f" ({self.nbytes / self.full_nbytes:.1%})" if self.full_nbytes else ""
        lines = [f"{self.method}: {self.seen:,} tokens seen, {self.nbytes:,} of {self.full_nbytes:,} bytes{share}"]
        lines.append(f"steps are computed by {self.kernels}")
        if self.protected:
            lines.append(f"{_range(self.protected)} tokens of a row are protected")
        if self.error is not None:
            lines.append(f"mean attention error {self.error:.3f}, measured after {self._measured_at:,} tokens")
        elif any(layer.entries for layer in self.layers) and not self.exact:
            why = 'prefill="streaming", padding at its end, or made from another cache by compress'
            lines.append(f"error not measured: no call of this cache saw a whole prompt exactly ({why})")
        for warning in dict.fromkeys(layer.warning for layer in self.layers if layer.warning):
            where = ", ".join(str(layer.layer) for layer in self.layers if layer.warning == warning)
            lines.append(f"warning (layers {where}): {warning}")
        names = [name for name in ("read", "recall") if any(getattr(layer, name) for layer in self.layers)]
        names += dict.fromkeys(name for layer in self.layers for name in layer.details)
        heads = "".join(f" {name:>{_width(name)}}" for name in names)
        lines.append(f"{'layer':>5} {'entries per KV head':>22} {'bytes':>14} {'of full':>8} {'error':>7}{heads}")
        lines += [self._line(layer, names) for layer in self.layers]
        return "\n".join(lines)

    @property
    def _measured_at(self) -> int:
        return max(layer.measured_at for layer in self.layers)

    @staticmethod
    def _line(layer: LayerReport, names: list[str]) -> str:
        entries = "stock layer" if layer.entries is None else _range(layer.entries)
        share = f"{layer.nbytes / layer.full_nbytes:.1%}" if layer.full_nbytes else "-"
        error = f"{sum(layer.error) / len(layer.error):.3f}" if layer.error else "-"
        found = layer.details | {"read": _mean(layer.read), "recall": _mean(layer.recall)}
        details = "".join(f" {_number(found.get(name)):>{_width(name)}}" for name in names)
        return f"{layer.layer:>5} {entries:>22} {layer.nbytes:>14,} {share:>8} {error:>7}{details}"


def report_on(stack: LayerStack, group: int) -> Report:
    """What the layers of a cache hold now; the model has `group` query heads for each KV head."""
    layers = [
        _report_on_layer(index, layer)
        if isinstance(layer, SketchLayer)
        else LayerReport(index, None, bytes_held(layer), bytes_held(layer), None, 0)
        for index, layer in enumerate(stack.layers)
    ]
    held = [layer.held for layer in stack.sketch[:1]]
    protected = tuple(own.within(0, n) for one in held for own, n in zip(one.spans, one.lengths, strict=True))
    held_in = [layer.held.window for layer in stack.sketch if layer.held.started]
    names = {few_queries.name(x.keys.view.device, x.keys.view.dtype, group, x.width) for x in held_in}
    names = names or {few_queries.name(torch.device("cpu"))}
    kernels = " and ".join(sorted(names))
    exact = isinstance(stack.config, Exact)
    return Report(str(stack.config), stack.seen, tuple(layers), protected if any(protected) else (), kernels, exact)


def _report_on_layer(index: int, layer: SketchLayer) -> LayerReport:
    held, entries = layer.held, layer.held.count_entries()
    full = 0
    if entries is not None:
        keys, values = held.window.keys.view, held.window.values.view
        per_token = held.heads * (keys.shape[3] + values.shape[3]) * keys.element_size()
        full = held.seen * keys.shape[0] * per_token + layer.nbytes - held.nbytes
    details, warning, read = dict[str, float](), None, None
    if held.started:
        details, warning, read = held.streams.details(), held.streams.warning(), held.streams.share_read()
    return LayerReport(
        layer=index,
        entries=_per_head(entries) or [],
        nbytes=layer.nbytes,
        full_nbytes=full,
        error=_per_head(held.error),
        measured_at=held.measured_at,
        read=_per_head(read),
        recall=_per_head(held.recall),
        details=details,
        warning=warning,
    )


def _per_head(measured: Tensor | None) -> list[float] | None:
    """The mean over rows."""
    return None if measured is None else measured.double().mean(0).tolist()


def _range(entries: Sequence[float] | Sequence[int]) -> str:
    if not entries:
        return "0"
    low, high = min(entries), max(entries)
    return f"{low:,.0f}" if low == high else f"{low:,.0f}-{high:,.0f}"


def _mean(values: list[float] | None) -> float | None:
    return None if values is None else sum(values) / len(values)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"


def _width(name: str) -> int:
    return max(8, len(name))
