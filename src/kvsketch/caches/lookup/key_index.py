"""What was learnt about the keys and queries of a model: buckets and classifiers of every layer, in a folder.

    index.json               which model, what was learnt from what, how well that serves texts that were left out, and
                             a digest of every layer's file
    layer-03.safetensors     one for each layer

`kvsketch fit` makes it; `saap` and `kmeans` look tokens up by it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.caches.core.belonging import first_of_model
from kvsketch.caches.core.storage import made_of
from kvsketch.files import DamagedError, TensorFile, digest_of, read_json, user_cache, write_json
from kvsketch.kernels.sources import Classifier

FORMAT = 2
DESCRIPTION = "index.json"
SHIPPED = Path(__file__).parent.parent.parent / "assets" / "indexes"
HOW = (
    "kvsketch fit MODEL --corpus FILE --out FOLDER, in a new folder; for the model inside the package "
    "kvsketch fit --out FOLDER"
)
AGAIN = f"Or make one: {HOW}"
_known = WeakValueDictionary[tuple[Any, ...], "KeyIndex"]()  # by folder, and by the versions of its files
FILE = "file"  # in a layer's part of the description: the digest of the layer's file


@dataclass(frozen=True)
class LayerIndex:
    """What was learnt for one layer, its KV heads side by side."""

    centroids: Float[Tensor, "h c d"]  # of keys before rotation, each of length 1
    rotated_centroids: Float[Tensor, "h c d"]  # of keys after rotation
    second: Float[Tensor, "h k c"]  # the classifier of queries before rotation: its last layer
    second_bias: Float[Tensor, "h 1 c"]
    first: Float[Tensor, "h d k"] | None = None  # the layer before that, normalization folded in; None: it is linear
    first_bias: Float[Tensor, "h 1 k"] | None = None

    @cached_property
    def classifier(self) -> Classifier:
        """The classifier of queries: both of its layers, or its only one."""
        inner = None if self.first is None or self.first_bias is None else (self.first, self.first_bias)
        return Classifier(inner, (self.second, self.second_bias))

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerIndex":
        return self

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that there are, by name."""
        named = {name.name: getattr(self, name.name) for name in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def brought_to(self, device: torch.device | str, dtype: torch.dtype) -> "LayerIndex":
        """The same on a device, with the classifier in a model's precision: a step reads all of it."""
        weights = {name: x.to(device, x.dtype if "centroids" in name else dtype) for name, x in self.tensors().items()}
        return LayerIndex(**weights)

    def of_heads(self, first: int, heads: int) -> "LayerIndex":
        """The same for `heads` of its KV heads, from `first` on."""
        if heads == len(self.centroids):
            return self
        return LayerIndex(**{name: x[first : first + heads] for name, x in self.tensors().items()})


@dataclass(frozen=True)
class KeyIndex:
    """A folder's description, and its layers, read when they are asked for: copies of a cache share them."""

    folder: Path
    description: dict[str, Any]
    _written: dict[int, LayerIndex] = field(default_factory=dict, repr=False, compare=False)
    _layers: dict[tuple[Any, ...], LayerIndex] = field(default_factory=dict, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "KeyIndex":
        return self

    @property
    def digest(self) -> str:
        """A digest that differs for every fit, and whenever a layer's file is another."""
        return digest_of(self.description)[:16]

    @property
    def model(self) -> Mapping[str, Any]:
        """The facts about the model that the index was fitted to."""
        found: Mapping[str, Any] = self.description["model"]
        return found

    @property
    def buckets(self) -> int:
        """Buckets of every KV head."""
        return int(self.description["buckets"])

    @property
    def layers(self) -> list[int]:
        """The layers that were fitted."""
        return sorted(map(int, self.description["layers"]))

    def layer(
        self,
        number: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        heads: tuple[int, int] | None = None,
    ) -> LayerIndex:
        """What was learnt for a layer, on a device, with the classifier in the precision of the queries.

        `heads`: the first KV head that is wanted, and how many; None is all.
        """
        known = (number, str(device), dtype, heads)
        if known not in self._layers:
            if heads is None:
                self._layers[known] = self._read(number).brought_to(device, dtype)
            else:
                self._layers[known] = self.layer(number, device, dtype).of_heads(*heads)
        return self._layers[known]

    def _read(self, number: int) -> LayerIndex:
        """A layer as it was written; read once, so that it does not matter if the folder is removed half-way."""
        if number not in self.layers:
            raise ValueError(
                f"the index {self.folder} has layers {self.layers}, but layer {number} is asked for: fit that "
                "layer too, or leave it to be read in full (full_layers=)"
            )
        if number not in self._written:
            with self._file(number) as file:
                self._written[number] = self._checked(number, file.read())
        return self._written[number]

    def _checked(self, number: int, learnt: dict[str, Tensor]) -> LayerIndex:
        """What a layer's file holds; refused if tokens cannot be looked up by it."""
        what = f"the index {self.folder} has something else in {layer_file(number)}, fit it again: "
        try:
            found = made_of(LayerIndex, learnt)
        except ValueError as error:
            raise ValueError(f"{what}{error}") from error
        fitted = self.model
        for name, size in (("kv_heads", 0), ("head_width", 2)):
            wanted = fitted.get(name)
            wanted = wanted[number] if isinstance(wanted, list) else wanted
            if wanted not in (None, found.centroids.shape[size]):
                raise ValueError(f"{what}{name} {found.centroids.shape[size]} and not {wanted}")
        if found.centroids.shape[1] != self.buckets or not all(bool(x.isfinite().all()) for x in learnt.values()):
            raise ValueError(f"{what}not {self.buckets} buckets, or numbers that are not finite")
        return found

    def check_files(self) -> None:
        """Read all layers; refuse a folder that has lost one, or has another in its place."""
        for number in self.layers:
            with self._file(number):
                self._read(number)

    def _file(self, number: int) -> TensorFile:
        """A layer's file, opened; refused if it is not the one that the fit wrote."""
        path = self.folder / layer_file(number)
        if not path.is_file():
            raise ValueError(f"the index {self.folder} is incomplete: {path.name} is missing. Put it back. {AGAIN}")
        try:
            file = TensorFile(path)
        except DamagedError as error:
            raise ValueError(f"{error}. {AGAIN}") from error
        if file.digest != self.description["layers"][str(number)].get(FILE):
            file.__exit__()
            raise ValueError(
                f"the index {self.folder} was changed: {path.name} is not the file that was fitted. Put that back. "
                f"{AGAIN}"
            )
        return file

    def check_model(self, facts: Mapping[str, Any]) -> None:
        """Refuse a model that this was not fitted to, and a folder whose layers are not those that were fitted."""
        self.check_files()
        fitted = self.model
        for name in facts:
            if name != "fingerprint" and facts[name] != fitted.get(name):
                raise ValueError(
                    f"the index {self.folder} was fitted to another model: its {name} was {fitted.get(name)!r}, that "
                    f"of this model is {facts[name]!r}. Fit one to this model: kvsketch fit"
                )
        if facts["fingerprint"] != fitted["fingerprint"]:
            raise ValueError(
                f"the index {self.folder} was fitted to a model of this architecture with other weights "
                f"({fitted.get('id')!r}): fit one to this model: kvsketch fit. Weights of float32 look like "
                "others too where they are loaded in float16: load them as they were for the fit"
            )


def find_index(method: str, facts: dict[str, Any]) -> KeyIndex:
    """The index that there is for a model, the user's own or one that comes with kvsketch."""
    own = own_index(facts)
    return first_of_model(
        [own / DESCRIPTION, *sorted(SHIPPED.glob(f"*/{DESCRIPTION}"))],
        lambda path: read_index(path.parent),
        facts,
        f"{method} looks things up in an index of this model, and there is none, neither in kvsketch nor in {own}. "
        "Make one: kvsketch fit MODEL --corpus FILE, for the model inside the package kvsketch fit. It is found by "
        f'itself from then on; one that lies elsewhere, as with --out FOLDER, is named: {method}(index="FOLDER")',
    )


def own_index(facts: dict[str, Any]) -> Path:
    """Where a user's index of a model is, unless it was written elsewhere."""
    return user_cache() / "indexes" / str(facts["fingerprint"])[:32]


def read_index(folder: str | Path) -> KeyIndex:
    """The index in a folder, also after the program has changed its directory; layers are read when asked for.

    While somebody still holds the index and its files are the same, it is the same object: it is large, and so are its
    copies on devices.
    """
    folder = Path(folder).absolute()
    files_now = folder, *map(_version, [folder / DESCRIPTION, *sorted(folder.glob("layer-*.safetensors"))])
    found = _known.get(files_now)
    if found is None:
        found = _known[files_now] = _read_index(folder)
    return found


def _version(file: Path) -> tuple[Any, ...]:
    """A value that differs after every change of a file; a missing file has one too."""
    try:
        about = file.stat()
    except OSError:  # it has gone meanwhile
        return (file.name,)
    return file.name, about.st_mtime_ns, about.st_size, about.st_ino


def _read_index(folder: Path) -> KeyIndex:
    path = folder / DESCRIPTION
    if not path.is_file():
        raise ValueError(f"{folder} is no index: it has no {DESCRIPTION}. Make one: {HOW}")
    try:
        description = read_json(path)
    except DamagedError as error:
        raise ValueError(f"{error}. Put back the index that was there. {AGAIN}") from error
    if description.get("format") != FORMAT:
        raise ValueError(
            f"{folder} is an index of format {description.get('format')!r:.40}, this version reads {FORMAT}: fit it "
            "again, or install the version that made it"
        )
    buckets, layers, model = (description.get(name) for name in ("buckets", "layers", "model"))
    numbered = isinstance(layers, dict) and all(map(_numbers_a_layer, layers.items()))
    if not (type(buckets) is int and buckets > 0 and numbered and isinstance(model, dict) and "fingerprint" in model):
        raise ValueError(f"{path} does not describe an index: it lacks buckets, layers or the model. Fit it again")
    return KeyIndex(folder, description)


def _numbers_a_layer(item: tuple[str, object]) -> bool:
    name, about = item
    return len(name) < 6 and name.isdecimal() and name == str(int(name)) and isinstance(about, dict)


def write_index(folder: Path, description: Mapping[str, Any]) -> None:
    """Describe the layers in a folder, which makes it an index; their files are there already."""
    layers = dict[str, Any]()
    for number, about in description["layers"].items():
        with TensorFile(folder / layer_file(int(number))) as file:
            layers[number] = {**about, FILE: file.digest}
    write_json(folder / DESCRIPTION, {"format": FORMAT, **description, "layers": layers})


def layer_file(number: int) -> str:
    """The name of a layer's file."""
    return f"layer-{number:02}.safetensors"
