"""What the fit in a folder is: which model, corpus and settings; and whether another run may go on there."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvsketch.caches.lookup.key_index import DESCRIPTION, write_index
from kvsketch.files import holds_files, read_json, ready, write_json
from kvsketch.fitting.corpus import Corpus
from kvsketch.fitting.settings import FitSettings

STATE = "fit.json"
EARLIER = {"settings.recipe.products": "float32"}  # what fits used before they had this setting


@dataclass(frozen=True)
class Run:
    """A fit and its folder; call `begin` before anything is written there."""

    out: Path
    model: dict[str, Any]  # what must be the same of a model for the index to fit it, and its id
    dtype: str
    settings: FitSettings
    corpus: Corpus

    @property
    def work(self) -> Path:
        """The folder of files that are of use until the fit is done."""
        return self.out / "work"

    def begin(self) -> bool:
        """Note down what this fit is, or refuse a folder of something else; whether all of it was done before."""
        for path in (self.out / DESCRIPTION, self.work / STATE):
            if path.is_file():
                self._check_same(path)
                return path.name == DESCRIPTION
        if holds_files(self.out):
            raise ValueError(f"{self.out} has files in it, and none of a fit: name a new folder, or that of a fit")
        ready(self.work)
        write_json(self.work / STATE, self.description())
        return False

    def description(self) -> dict[str, Any]:
        """All that the result depends on, in the form that JSON gives back."""
        described = {
            "model": self.model,
            "dtype": self.dtype,
            "settings": asdict(self.settings),
            "corpus": [asdict(source) for source in self.corpus.sources],
        }
        plain: dict[str, Any] = json.loads(json.dumps(described))
        return plain

    def finish(self, layers: Mapping[int, Any], about: Mapping[str, Any]) -> None:
        """Write the description, which makes the folder an index."""
        settings = self.settings
        description = {
            "buckets": settings.buckets,
            "hidden": settings.hidden,
            **self.description(),
            "made_with": dict(about),
            "measured": "long-range queries of held-out texts, each by itself",
            "layers": {str(number): report for number, report in layers.items()},
        }
        write_index(self.out, description)

    def _check_same(self, path: Path) -> None:
        there = read_json(path)
        new = self.description()
        earlier, this = EARLIER | _flat({name: there.get(name) for name in new}), _flat(new)
        other = [name for name in {**earlier, **this} if earlier.get(name) != this.get(name)]
        if other:
            named = ", ".join(f"{name} {earlier.get(name)!r}, now {this.get(name)!r}" for name in other[:3])
            raise ValueError(f"{self.out} holds another fit: {named}. Go on with that, or name another folder")


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """The numbers and strings in a description, by their full names."""
    if isinstance(value, list):
        value = {str(place): part for place, part in enumerate(value)}
    if not isinstance(value, dict):
        return {name: value}
    parts = (_flat(part, f"{name}.{key}" if name else key) for key, part in value.items())
    return {key: part for found in parts for key, part in found.items()}
