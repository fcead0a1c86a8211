"""Pages that need no other file, made from a template beside the code."""

from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from kvsketch.files import replacing


def write_html(path: Path, package: str, template: str, **content: object) -> Path:
    """Write a page, whole or not at all; content is text, never HTML, and must have all that the template names."""
    source = (files(package) / template).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(source).render(**content)
    with replacing(path) as file:
        file.write(text.encode())
    return path
