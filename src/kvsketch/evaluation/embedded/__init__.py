"""The model inside the package: it is loaded here and made in `training`."""

from kvsketch.evaluation.embedded.model import load_embedded, load_tokenizer

__all__ = ["load_embedded", "load_tokenizer"]
