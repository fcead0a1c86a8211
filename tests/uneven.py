"""Methods whose heads have unequal shares, for tests: head h of a layer gets the share h + 1."""

from dataclasses import dataclass, fields

from kvsketch.caches.registry import parse_spec


def uneven(spec):
    """The config of a spec, but for the shares of its heads."""
    config = parse_spec(spec)
    kind = type(f"Uneven{type(config).__name__}", (type(config),), {"shares": _shares})
    return dataclass(frozen=True, kw_only=True)(kind)(
        **{field.name: getattr(config, field.name) for field in fields(config)}
    )


def _shares(self, layer, heads):
    return tuple(1.0 + head for head in range(heads))
