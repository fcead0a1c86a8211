"""The model inside the package: loaded here, made in `training`."""

from kvsketch.evaluation.embedded.model import EDITIONS, load_embedded, load_tokenizer

__all__ = ["EDITIONS", "load_embedded", "load_tokenizer"]
