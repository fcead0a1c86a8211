"""A method that forgets: it chooses, for lanes that are alike, which entries they hold from now on.

It sees what the lanes hold and what arrives, and gives the numbers of those to keep, or makes keys and values of its
own. Whatever else it needs to know about an entry, a lane or all lanes, it declares by name; bytes, files, beams,
copies and reports follow from these declarations.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.attention import NO_MASS, WeightedTokens
from kvsketch.caches.core.asking import add_weights
from kvsketch.caches.core.budget import MOST, Budget
from kvsketch.caches.core.buffers import Growing, marks_of, rearrange, roomy, written
from kvsketch.caches.core.method import Holding, Method
from kvsketch.caches.core.query import Query
from kvsketch.caches.core.storage import storage_bytes, with_prefix
from kvsketch.caches.core.tokens import Arriving
from kvsketch.kernels import native
from kvsketch.kernels.native.weights import ADDED, INSTEAD, Noting
from kvsketch.kernels.places import chosen_of

MASS = "mass"  # the attention that an entry got from all queries so far, if a method declares it
NOTHING: Mapping[str, Tensor] = MappingProxyType({})
LARGE = 1 << 22  # bytes of keys: if there are fewer, room for more keys is made only when they come


@dataclass(frozen=True)
class Held:
    """What the lanes of a bundle hold, and what a method has declared about it."""

    keys: Float[Tensor, "l n d"]
    values: Float[Tensor, "l n e"]
    per_entry: dict[str, Tensor] = field(default_factory=dict)  # [l, n]
    per_lane: dict[str, Tensor] = field(default_factory=dict)  # [l, …]
    numbers: dict[str, Any] = field(default_factory=dict)  # the same for all lanes: JSON

    @property
    def count(self) -> int:
        """Entries of each lane."""
        return self.keys.shape[1]

    def part(self, start: int, stop: int) -> "Held":
        """Entries start…stop-1."""
        about = {name: x[:, start:stop] for name, x in self.per_entry.items()}
        return Held(self.keys[:, start:stop], self.values[:, start:stop], about, self.per_lane, self.numbers)

    def at(self, index: Int64[Tensor, "l k"]) -> tuple[Tensor, Tensor]:
        """Keys and values of the entries with these numbers."""
        keys, values = chosen_of((self.keys, self.values), index)
        return keys, values

    def with_new(self, new: Arriving, start: int = 0, about: Mapping[str, Tensor] = NOTHING) -> "Pool":
        """The entries from `start` on and the new tokens: what there is to choose from.

        `about` is what is declared about the new tokens; what it leaves out is 0.
        """
        return Pool(self, new, start, about)


class Pool:
    """Entries that are held, followed by new tokens.

    Their keys and values are put together only when somebody asks for them; while there is room for all, nobody does.
    """

    def __init__(self, held: Held, new: Arriving, start: int = 0, about: Mapping[str, Tensor] = NOTHING) -> None:
        self.held, self.new, self.start = held, new, start
        self.per_entry = dict[str, Tensor]()
        for name, x in held.per_entry.items():
            own = about[name].to(x.dtype) if name in about else x.new_zeros(len(x), new.count)
            self.per_entry[name] = torch.cat([x[:, start:], own], 1)
        self.joined: tuple[Tensor, Tensor] | None = None

    def behind(self, start: int) -> "Pool":
        """The pool from number `start` on."""
        if not start:
            return self
        rest = copy.copy(self)
        rest.start, rest.per_entry = self.start + start, {name: x[:, start:] for name, x in self.per_entry.items()}
        rest.joined = None if self.joined is None else (self.joined[0][:, start:], self.joined[1][:, start:])
        return rest

    @property
    def count(self) -> int:
        """Entries and new tokens of each lane, taken together."""
        return self.held.count - self.start + self.new.count

    @property
    def keys(self) -> Float[Tensor, "l n d"]:
        """Keys of all."""
        return self._joined()[0]

    @property
    def values(self) -> Float[Tensor, "l n e"]:
        """Values of all."""
        return self._joined()[1]

    def at(self, index: Int64[Tensor, "l k"]) -> tuple[Tensor, Tensor]:
        """Keys and values of the members with these numbers."""
        if not self._are_few(index):
            keys, values = chosen_of(self._joined(), index)
            return keys, values
        count = self.held.count - self.start
        found = chosen_of([x[:, self.start :] for x in (self.held.keys, self.held.values)], index.clamp_max(count - 1))
        lanes, places = (index >= count).nonzero(as_tuple=True)
        which = index[lanes, places] - count
        for x, new in zip(found, (self.new.keys, self.new.values), strict=True):
            x[lanes, places] = new[lanes, which]
        return found[0], found[1]

    def among(self, index: Int64[Tensor, "l k"]) -> tuple[Tensor, Tensor, Int64[Tensor, "l k"]]:
        """Keys and values that include those of `index`, and their numbers there; few of many are copied out."""
        if not self._are_few(index):
            return *self._joined(), index
        return *self.at(index), torch.arange(index.shape[1], device=index.device).expand(len(index), -1)

    def of_keys(self, what: Callable[[Float[Tensor, "l n d"]], Float[Tensor, "l n"]]) -> Float[Tensor, "l m"]:
        """`what` of every key by itself, of those that are held and of new ones."""
        if not self.stays_apart(self.new.keys):
            return what(self.keys)
        return torch.cat([what(self.held.keys[:, self.start :]), what(self.new.keys)], 1)

    def stays_apart(self, index: Tensor) -> bool:
        """Whether held entries and new tokens lie apart, and are read apart.

        Not on a GPU: there, putting them together costs less than a few more kernel launches.
        """
        there = self.joined is None and self.held.count > self.start
        on_cpu = type(index) is Tensor and index.device.type == "cpu"
        return there and on_cpu and not torch.compiler.is_compiling()

    def _are_few(self, index: Int64[Tensor, "l k"]) -> bool:
        """Whether these are few of many, so that the pool is not put together for them."""
        return 2 * index.shape[1] <= self.count and self.stays_apart(index)

    def _joined(self) -> tuple[Tensor, Tensor]:
        if self.joined is None:
            held, new = self.held.part(self.start, self.held.count), self.new
            both = (held.keys, new.keys), (held.values, new.values)
            keys, values = (torch.cat(parts, 1) if held.count else parts[1] for parts in both)
            self.joined = keys, values
        return self.joined


@dataclass(frozen=True)
class Kept:
    """The entries from `start` on of every lane, as they are from now on; those before `start` stay as they were.

    `index` counts the entries held from `start` on, and then the new tokens; None: all of them. Or `made` has keys and
    values that the method made.
    """

    index: Int64[Tensor, "l k"] | None
    start: int = 0
    log_mass: Float[Tensor, "#l k"] | None = None  # log of how many tokens each stands for; None: 1
    made: tuple[Float[Tensor, "l k d"], Float[Tensor, "l k e"]] | None = None
    pool: Pool | None = None  # what `index` counts in, from `start` on, if the chooser has it already
    per_entry: dict[str, Tensor] = field(default_factory=dict)
    per_lane: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)


class Chooser(Method):
    """A method that holds weighted entries, all of them read for every query."""

    per_entry: Mapping[str, torch.dtype] = {}
    per_lane: Mapping[str, torch.dtype] = {}
    shared: Sequence[str] = ()  # what is the same for all lanes, as JSON
    mass_of_last = False  # whether an entry's mass is what it got from the last query, not from all so far

    @abstractmethod
    def choose(self, held: Held, new: Arriving, budget: Budget) -> Kept:
        """What lanes with this budget hold once these tokens have come."""

    def check(self, held: Held, count: int, budget: Budget) -> None:
        """Refuse entries that cannot be what is held of `count` tokens."""

    def details(self, held: Held, count: int) -> dict[str, float]:
        """What a report should show beside entries and bytes."""
        return {}

    def new_holding(self, budget: Budget) -> Holding:
        return ChosenEntries(self, budget)


class ChosenEntries(Holding):
    """The entries that a chooser has chosen."""

    def __init__(self, chooser: Chooser, budget: Budget) -> None:
        self.chooser, self.budget = chooser, budget
        self.held = dict[str, Growing]()  # keys, values, weights, and what is declared per entry
        self.per_lane = dict[str, Tensor]()
        self.host = dict[str, Any]()
        self.room = 0  # for so many entries there has been room since steps were recorded, so that they stay in place
        self.is_open = False
        self.there: Tensor | None = None  # the logs of weights while this is open, if the method gives none

    def entries(self, like: Arriving | None = None) -> Held:
        """What is held; if nothing is yet, no entries, in the shape of these tokens."""
        if self.held:
            about = {name: self.held[f"entry.{name}"].view for name in self.chooser.per_entry}
            return Held(self.held["keys"].view, self.held["values"].view, about, self.per_lane, self.host)
        assert like is not None, "nothing is held"
        lanes, device = len(like.keys), like.keys.device
        none = {name: torch.zeros(lanes, 0, dtype=kind, device=device) for name, kind in self.chooser.per_entry.items()}
        return Held(like.keys[:, :0], like.values[:, :0], none)

    def write(self, new: Arriving) -> None:
        held = self.entries(new)
        self.keep(self.chooser.choose(held, new, self.budget), held, new)

    def keep(self, kept: Kept, held: Held, new: Arriving) -> None:
        """Hold what was chosen from what is held and the new tokens."""
        start = kept.start
        fresh = True  # nobody else refers to these parts
        pool, moved = kept.pool, frozenset[str]()  # names of tensors that are in place already
        parts: tuple[Tensor, Tensor] | None
        if kept.made is not None:
            parts = kept.made
        elif kept.index is not None:
            pool = held.with_new(new, start) if pool is None else pool
            moved = self._rearranged(pool, kept, new)
            parts = None if moved else pool.at(kept.index)
        else:  # entries that are held stay where they lie
            parts, start, fresh = (new.keys, new.values), held.count, False
        if parts is not None:
            for name, x in zip(("keys", "values"), parts, strict=True):
                self._replace(name, start, x, fresh=fresh)
        lanes, count = len(new.keys), self.held["keys"].length
        log_mass = kept.log_mass
        if log_mass is None and "log_mass" in self.held:
            log_mass = torch.zeros(1, count - kept.start, dtype=torch.float32, device=new.keys.device)
        if log_mass is not None:
            self._replace("log_mass", kept.start, log_mass)
        about = kept.per_entry
        missing = [name for name in self.chooser.per_entry if name not in about and f"entry.{name}" not in moved]
        if missing:  # what is known about each entry goes with it
            known = (held.with_new(new, kept.start) if pool is None else pool).per_entry
            about = {n: known[n] if kept.index is None else known[n].gather(1, kept.index) for n in missing} | about
        for name, x in about.items():
            self._replace(f"entry.{name}", kept.start, x.to(self.chooser.per_entry[name]), fresh=fresh)
        self.per_lane = {**self.per_lane, **kept.per_lane}
        self.host = kept.numbers
        assert all(x.lanes in (1, lanes) and x.length == count for x in self.held.values())
        self._weigh()

    def _rearranged(self, pool: Pool, kept: Kept, new: Arriving) -> frozenset[str]:
        """Names of tensors rearranged in place by `kept.index`: keys, values, and what `kept` does not give per entry.

        None of them, if `pool` is not of what is held here or was put together already, or if C cannot do it.
        """
        index, keys, mine = kept.index, pool.held.keys, self.held["keys"].buffer if self.held else None
        assert index is not None, "there are numbers"
        if (
            mine is None
            or not pool.stays_apart(index)
            or keys.data_ptr() != mine.data_ptr()
            or native.library() is None
        ):
            return frozenset()
        start, before = pool.start, pool.held.count - pool.start
        about = {name: x[:, before:] for name, x in pool.per_entry.items() if name not in kept.per_entry}
        every = {"keys": new.keys, "values": new.values} | {f"entry.{name}": x for name, x in about.items()}
        exactly = not start and self._fits_exactly and mine.nbytes < LARGE
        most = start + index.shape[1] if exactly else self.budget.capacity
        done = rearrange([self.held[name] for name in every], start, index, list(every.values()), most)
        return frozenset(every if done else ())

    @property
    def _fits_exactly(self) -> bool:
        """Whether what is chosen is stored with no room to spare."""
        return self.budget.fixed is None and not self.room

    def _replace(self, name: str, start: int, x: Tensor, *, fresh: bool = True) -> None:
        """Store `x` from place `start` on; `fresh`: nobody else refers to it."""
        grown = self.held.get(name)
        if not start and fresh and self._fits_exactly:
            self.held[name] = Growing(1, x)  # no copy, and no room to spare
            return
        if not start and (grown is None or grown.lanes != len(x)):
            grown = Growing(dim=1)
        elif grown is None:
            grown = Growing(1, x.new_zeros(len(x), start))  # nothing was said of earlier entries: they had the weight 1
        elif grown.lanes != len(x):  # what lanes shared now differs by lane, or the other way round
            lanes = max(grown.lanes, len(x))
            x, grown = x.expand(lanes, -1), Growing(1, grown.view.expand(lanes, -1).clone())
        self.held[name] = grown
        grown.replace_from(start, x, self.budget.capacity)

    def _weigh(self) -> None:
        """Set `weighted`: the entries as attention takes them, with empty slots after them while this is open."""
        count, self.weighted = self.held["keys"].length, None
        if not count:
            return
        if self.is_open:
            self.room = roomy(count, self.room, self.budget.capacity)

        def places(name: str, rest: float) -> Tensor:
            held = self.held[name]
            return (held.with_room(self.room, rest) if self.is_open else held.view)[None]

        log_mass = places("log_mass", NO_MASS) if "log_mass" in self.held else None
        if self.is_open and log_mass is None:
            mass = torch.zeros(1, self.room, device=self.held["keys"].view.device)
            mass[:, count:] = NO_MASS
            self.there = written(self.there, mass)
            log_mass = self.there[None]
        self.weighted = WeightedTokens(places("keys", 0.0), places("values", 0.0), log_mass)

    # -- while steps are recorded

    def open(self, *, anew: bool) -> None:
        self.is_open, self.room = True, 0 if anew else self.room
        self._weigh()

    def close(self) -> None:
        self.is_open = False
        self._weigh()

    def without_room(self) -> None:
        self.room, self.there = 0, None
        for grown in self.held.values():
            grown.without_room()
        self._weigh()

    def marks(self) -> object:
        tokens = self.weighted
        return None if tokens is None else marks_of(tokens.keys, tokens.values, tokens.log_mass)

    # -- reading

    def observe(self, query: Query, read: Tensor | None, lse: Float[Tensor, "1 lg q"] | None) -> None:
        """Add the attention that each entry got from the queries to its mass."""
        assert lse is not None, "a method that asks for mass is told the denominators"
        tokens, mass = self.weighted, self.held[f"entry.{MASS}"]
        if tokens is None:
            return
        mass.make_writable()
        if self.chooser.mass_of_last:
            asked = lse[0].view(len(mass.view), -1).isfinite().any(1)
            mass.view.masked_fill_(asked[:, None], 0)
        add_weights(mass.view, query, lse, tokens)

    def noting(self) -> Sequence[Noting] | None:
        if self.weighted is None:
            return ()
        if self.is_open:
            return None
        mass, tokens = self.held[f"entry.{MASS}"], self.weighted
        mass.make_writable()
        weights = None if tokens.log_mass is None else tokens.log_mass[0]
        return (Noting(mass.view, tokens.keys[0], weights, INSTEAD if self.chooser.mass_of_last else ADDED),)

    def count_entries(self) -> int:
        return self.held["keys"].length

    # -- state

    @property
    def nbytes(self) -> int:
        return storage_bytes([*(x.buffer for x in self.held.values()), *self.per_lane.values(), self.there])

    def details(self, count: int) -> dict[str, float]:
        return self.chooser.details(self.entries(), count)

    def tensors(self) -> dict[str, Tensor]:
        return {name: x.view for name, x in self.held.items()} | {f"lane.{n}": x for n, x in self.per_lane.items()}

    def numbers(self) -> dict[str, Any]:
        return self.host

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any], count: int) -> None:
        _check(tensors, self.chooser)
        if set(numbers) != set(self.chooser.shared):
            raise ValueError(f"{list(numbers)!s:.80} of lanes that share {list(self.chooser.shared)}")
        self.per_lane, self.host = with_prefix(tensors, "lane."), dict(numbers)
        self.held = {name: Growing(1, x) for name, x in tensors.items() if not name.startswith("lane.")}
        self._weigh()
        self.chooser.check(self.entries(), count, self.budget)


def check_vectors(held: Held, *names: str) -> None:
    """Refuse per-lane vectors (those with these names, or all) that are not as wide as keys, or not finite."""
    for name in names or held.per_lane:
        vectors = held.per_lane[name]
        if vectors.shape[1:] != held.keys.shape[2:] or not bool(vectors.isfinite().all()):
            raise ValueError(f"{name} of shape {tuple(vectors.shape)} for keys {tuple(held.keys.shape)}, or not finite")


def _check(tensors: dict[str, Tensor], chooser: Chooser) -> None:
    """Refuse tensors that are not what a chooser holds."""
    kinds = {f"entry.{name}": kind for name, kind in chooser.per_entry.items()}
    of_lanes = {f"lane.{name}": kind for name, kind in chooser.per_lane.items()}
    weights = {"log_mass"} & tensors.keys()
    kinds |= dict.fromkeys(weights, torch.float32)
    keys, values = tensors.get("keys"), tensors.get("values")
    right = keys is not None and values is not None and keys.ndim == values.ndim == 3
    if right and keys is not None and values is not None:
        lanes, count = keys.shape[:2]
        right = (
            tensors.keys() == {"keys", "values"} | kinds.keys() | of_lanes.keys()
            and values.shape[:2] == (lanes, count)
            and keys.is_floating_point()
            and count <= MOST
            and all(tensors[name].dtype == kind for name, kind in (kinds | of_lanes).items())
            and all(tensors[name].shape in ((lanes, count), (1, count)) for name in weights)
            and all(tensors[name].shape == (lanes, count) for name in kinds.keys() - weights)
            and all(tensors[name].ndim >= 1 and len(tensors[name]) == lanes for name in of_lanes)
        )
    if not right:
        shapes = {name: (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in tensors.items()}
        raise ValueError(f"entries of {shapes!s:.150}")
