"""What a cache holds, for people: `print(cache.report())`."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LayerReport:
    """One layer. `entries` and `error` are per head, averaged over rows; None where the layer is not kvsketch's."""

    layer: int
    entries: list[float] | None  # per KV head
    nbytes: int
    full_nbytes: int  # of an uncompressed cache
    error: list[float] | None  # per query head: ‖answer - exact answer‖ / ‖exact answer‖
    measured_at: int  # tokens seen when the error was measured
    read: list[float] | None = None  # per KV head, where tokens are looked up: the share that queries read
    recall: list[float] | None = None  # per query head: the share of the attention's mass in what was read
    details: dict[str, float] = field(default_factory=dict)  # what the method says about itself
    warning: str | None = None


@dataclass(frozen=True)
class Report:
    """What all layers hold, against what an uncompressed cache would hold."""

    method: str
    seen: int
    layers: tuple[LayerReport, ...]

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
        """Mean relative error of the answers over layers and heads; None where it was not measured."""
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
        if self.error is not None:
            lines.append(f"mean error of the answers {self.error:.3f}, measured after {self._measured_at:,} tokens")
        elif any(layer.entries for layer in self.layers) and self.method != "exact":
            lines.append("error not measured: no call saw its whole prompt exactly (streaming prefill)")
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


def _range(entries: list[float]) -> str:
    low, high = min(entries), max(entries)
    return f"{low:,.0f}" if low == high else f"{low:,.0f}-{high:,.0f}"


def _mean(values: list[float] | None) -> float | None:
    return None if values is None else sum(values) / len(values)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"


def _width(name: str) -> int:
    return max(8, len(name))
