"""The model inside the package: loaded here, made in `training`."""

from kvsketch.evaluation.embedded.model import NAME, load_embedded, load_tokenizer

__all__ = ["NAME", "load_embedded", "load_tokenizer"]
