"""Histories of a cache: whatever happens to it, in whatever order, what was promised holds.

    python -m histories --histories 2000 --seed 7        in this folder: so many, from this seed on

A history is a row of calls, copies, moves of rows, tokens taken back, files, and things that go wrong, each of them
twice and in any order. At its end each row of the batch is played again alone, and against attention in double
precision over all that it has read.
"""

import argparse
import copy
import random
import sys
import tempfile
import warnings
import zlib
from dataclasses import dataclass, field
from functools import cache as once
from pathlib import Path

import torch
import transformers
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import kvsketch
from kvsketch.caches.forgetting.scored import ScoredConfig
from kvsketch.caches.forgetting.subgen.holding import SubGenHolding
from kvsketch.caches.lookup.store import Store
from kvsketch.caches.registry import parse_spec
from kvsketch.huggingface.naming import as_argument
from kvsketch.huggingface.supported import unwrapped
from made_index import make_index
from states import difference, state_of

VOCABULARY, LAYERS, KV_HEADS, WIDTH, MOST_ROWS = 31, 2, 2, 8, 4
LONG = 150  # tokens of a first call of which some are protected
SLACK = 128  # entries per row, head and layer beyond 1.05 × the budget, on the average
EACH = 20  # histories of a seed
PROTECTED_TO = 30  # in a history with protected tokens they are among so many first ones, and a first call is longer
INDEX = "INDEX"  # stands for the folder of an index of the model
LOOK = "window=20, full_layers=0"
SPECS = (
    "exact",
    "streaming_llm(keep=0.25)",
    "streaming_llm(keep=140)",
    "uniform(keep=0.25, window=16)",
    "uniform(keep=120, window=16)",
    "uniform(keep='80KB', window=16)",
    "uniform(keep=0.25, window=16, prefill='streaming', chunk=40)",
    "uniform(keep=0.25, window=16, weights='none', sinks=0)",
    "clustergen(keep=0.25, window=16)",
    "clustergen(keep=150)",
    "subgen(keep=0.25, window=16)",
    "subgen(keep=150, window=16, t=2)",
    "balancekv(keep=0.25, window=16)",
    "balancekv(keep=130, window=16, block=64)",
    "balancekv(keep=0.25, window=16, augmented=False)",
    "balancekv(keep=150, window=16, mode='faithful', block=64)",
    "keydiff(keep=0.25)",
    "keydiff(keep=90, heads='pyramid')",
    "keydiff(keep=0.25, weights='mass')",
    "keydiff(keep=0.4, window=0.3, heads='pyramid')",
    "snapkv(keep=0.25, window=16)",
    "h2o(keep=90, weights='spread')",
    "tova(keep=0.25)",
    "expected_attention(keep=0.4)",
    "kvzip(keep=0.25)",
    "kvzip(keep=80, heads='equal', residual=0.2)",
    "kvzip(keep=0.4, window=0.3)",
    "uniform(keep=0.25, window=16, heads='pyramid')",
    f"saap(index='{INDEX}', probes=2, staging=24, {LOOK})",
    f"saap(index='{INDEX}', probes=3, staging=24, estimate=True, prefer='density', visit=0.3, {LOOK})",
    f"saap(index='{INDEX}', probes=3, staging=24, {LOOK}, prefill='streaming', chunk=40)",
    f"kmeans(index='{INDEX}', probes=2, staging=24, rope=True, {LOOK})",
    f"lsh(bins=6, staging=24, {LOOK})",
    f"lsh(kind='reformer', bits=4, bins=6, staging=24, {LOOK})",
    f"lsh(kind='magicpig', bits=4, tables=9, {LOOK})",
    f"random_buckets(buckets=8, probes=2, staging=24, {LOOK})",
    f"retrieval(top=0.1, {LOOK})",
)


@once
def model(dtype=torch.float32):
    """One model for all: random, its queries and keys sharpened."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=KV_HEADS, head_dim=WIDTH, max_position_embeddings=4096, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(25)
    return made.to(dtype)


@once
def in_double_precision():
    """The same, as transformers has it."""
    exact = copy.deepcopy(unwrapped(model(torch.float64)))
    kvsketch.detach(exact)
    return exact


@once
def index():
    """The folder of an index for it."""
    folder = Path(tempfile.mkdtemp(prefix="kvsketch-histories-"))
    return make_index(folder, model(), heads=KV_HEADS, width=WIDTH, layers=range(LAYERS))


@dataclass
class Call:
    """What a row was given in a call, and what came of it."""

    tokens: list[int]
    columns: list[bool]  # which places of the call are its own
    before: list[int]  # all that it had read
    logits: torch.Tensor
    exact: bool  # nothing may have been lost by then


@dataclass
class Row:
    """What happened to one row of the batch."""

    events: list[Call | int] = field(default_factory=list)  # an int: so many tokens were taken back
    tokens: list[int] = field(default_factory=list)
    columns: list[bool] = field(default_factory=list)
    exact: bool = True


def said(model, cache, ids, new):
    """Give new tokens to a cache as `generate` does; the logits of all places."""
    mask = new.long() if cache.seen == 0 else cache.new_tokens(ids, new.long())["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*took the first call for the whole prompt")  # two calls of one length
        return model(ids, attention_mask=mask, position_ids=positions, **as_argument(model.forward, cache)).logits


def refusal_of(work):
    """What was said against it; None if it was done."""
    try:
        work()
    except ValueError as error:
        return str(error)
    return None


class Interrupted(BaseException):
    """Not an error that anybody catches."""


def interrupt(work, lines):
    """Do something, and stop it when so many lines of the library have run; whether that came to be."""
    source, left = str(Path(kvsketch.__file__).parent), lines

    def inside(frame, event, argument):
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                raise Interrupted
        return inside

    def enter(frame, event, argument):
        return inside if frame.f_code.co_filename.startswith(source) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        work()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


class History(RuleBasedStateMachine):
    """What may happen to a cache of `spec`."""

    spec: str

    # What may happen. One rule draws from a shuffled list of it: of many rules hypothesis leaves most out of a history.
    ROWS, FILES = ("reorder_rows", "repeat_rows", "select_rows"), ("go_on_from_a_file", "meet_a_damaged_file")
    WRONG = ("ask_for_what_cannot_be", "be_interrupted")
    HAPPENS = ("call", "single_tokens", *ROWS, "take_back", "go_on_with_a_copy", *FILES, *WRONG)

    def __init__(self):
        super().__init__()
        self.config = parse_spec(self.spec.replace(INDEX, index()))
        # Rotated keys are equally far from one another wherever the places between them are as many. Which one is
        # farthest is then decided by the last bits of the model's products, and these differ between a batch and a row.
        distances = self.config.name in ("clustergen", "subgen")
        self.model = model(torch.float64 if distances else torch.float32)
        self.cache = kvsketch.make_cache(self.model, self.config)
        self.rows, self.spans = [], None
        self.left_behind = []  # caches that nobody may change any more, with what they hold
        self.folder = tempfile.TemporaryDirectory()

    @property
    def looks_up(self):
        return "staging" in self.spec or "retrieval" in self.spec or "magicpig" in self.spec

    @property
    def streams(self):
        return self.config.prefill == "streaming"

    # -- what happens

    @initialize(rows=st.sampled_from([3, 2, 1]), count=st.sampled_from([150, 260, 40, 5, 1]), data=st.data())
    def first_call(self, rows, count, data):
        self.rows = [Row() for _ in range(rows)]
        if count >= LONG and data.draw(st.booleans(), label="some tokens are protected"):
            self.spans = [[(3 + 5 * row, 7 + 5 * row), (25, 27 + row)] for row in range(rows)]
            self.cache = kvsketch.make_cache(self.model, self.config, protect=self.spans)
        self._call(count, data)
        self.to_come = list(self.HAPPENS * 2)
        random.Random(data.draw(st.integers(0, 2**20), label="seed of the order")).shuffle(self.to_come)

    @precondition(lambda self: self.to_come)
    @rule(data=st.data())
    def next(self, data):
        what = self.to_come.pop()
        getattr(self, what if self.cache.seen else "call")(data)  # all may have been taken back

    def call(self, data):
        self._call(data.draw(st.sampled_from([2, 3, 17, 33, 64, 130]), label="tokens"), data)

    def single_tokens(self, data):
        count = data.draw(st.sampled_from([1, 2, 7, 31, 40]), label="tokens")
        for _ in range(count):
            self._call(1, data, some_are_padding=count == 1)

    def reorder_rows(self, data):
        self._move_rows(self.cache.reorder_cache, self._some_rows(data, len(self.rows)))

    def repeat_rows(self, data):
        times = data.draw(st.integers(1, max(1, MOST_ROWS // len(self.rows))), label="times")
        rows = [row for row in range(len(self.rows)) for _ in range(times)]
        self._move_rows(lambda index: self.cache.batch_repeat_interleave(times), rows)

    def select_rows(self, data):
        self._move_rows(self.cache.batch_select_indices, self._some_rows(data, 1))

    def _some_rows(self, data, least):
        return data.draw(st.lists(st.sampled_from(range(len(self.rows))), min_size=least, max_size=len(self.rows)))

    def _move_rows(self, move, rows):
        move(torch.tensor(rows))
        self.rows = [copy.deepcopy(self.rows[row]) for row in rows]
        self.spans = self.spans and [self.spans[row] for row in rows]
        self._check_what_is_held()

    def take_back(self, data):
        count = data.draw(st.integers(1, 12), label="columns")
        before, refusal = state_of(self.cache), refusal_of(lambda: self.cache.crop(-count))
        if refusal is not None:
            assert "cannot take back" in refusal
            assert difference(state_of(self.cache), before) is None
            return
        for row in self.rows:
            lost = sum(row.columns[-count:])
            row.events.append(lost)
            row.tokens, row.columns = row.tokens[: len(row.tokens) - lost], row.columns[:-count]
        self._check_what_is_held()

    def go_on_with_a_copy(self, data):
        self.left_behind.append((self.cache, state_of(self.cache)))
        self.cache = self.cache.fork()

    def go_on_from_a_file(self, data):
        path = Path(self.folder.name) / "cache"
        path.unlink(missing_ok=True)  # it is no cache by now, and keeps its place
        self.cache.save(path)
        loaded = kvsketch.load_cache(self.model, path)
        path.write_bytes(b"something else")  # in its place: what was read is nobody's but the cache's
        assert difference(state_of(loaded), state_of(self.cache)) is None
        self.cache = loaded
        self._check_what_is_held()

    # -- what goes wrong

    def meet_a_damaged_file(self, data):
        path = Path(self.folder.name) / "cache"
        path.unlink(missing_ok=True)  # it is no cache by now, and keeps its place
        self.cache.save(path)
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1), label="place")
        content[at] ^= data.draw(st.integers(1, 255), label="flip")
        path.write_bytes(content[:at] if data.draw(st.booleans(), label="cut") else content)
        try:
            loaded = kvsketch.load_cache(self.model, path)
        except ValueError:
            return
        assert difference(state_of(loaded), state_of(self.cache)) is None

    def ask_for_what_cannot_be(self, data):
        ways = ["rows", "positions", "mask", "weights", "token", "row", "no row"]
        what = data.draw(st.sampled_from(ways), label="what")
        rows, seen, before = len(self.rows), self.cache.seen, state_of(self.cache)
        ids = torch.ones(rows, 3, dtype=torch.long)
        given = {
            "rows": {"input_ids": torch.ones(rows + 1, 3, dtype=torch.long)},
            "positions": {"input_ids": ids, "position_ids": torch.tensor([[seen + 7, 0, 1]])},
            "mask": {"input_ids": ids, "attention_mask": torch.ones(rows, seen + 2, dtype=torch.long)},
            "weights": {"input_ids": ids, "output_attentions": True},
            "token": {"input_ids": ids * VOCABULARY},
            "row": None,
            "no row": None,
        }[what]
        wrong = [rows] if what == "row" else []
        move = lambda: self.cache.batch_select_indices(torch.tensor(wrong, dtype=torch.long))  # noqa: E731
        ask = lambda: self.model(**given, **as_argument(self.model.forward, self.cache))  # noqa: E731
        assert refusal_of(move if given is None else ask) is not None
        assert difference(state_of(self.cache), before) is None

    def be_interrupted(self, data):
        """A call that is stopped anywhere leaves a cache as it was, or as it would have been, or one that says so."""
        ways = ["call", "token", "repeat", "select", "reorder", "take back", "save"]
        what = data.draw(st.sampled_from(ways), label="what")
        lines = data.draw(st.integers(1, 900), label="lines")
        before = state_of(self.cache)
        done, victim, path = self.cache.fork(), self.cache.fork(), Path(self.folder.name) / "interrupted"
        ids = torch.full((len(self.rows), 1 if what == "token" else 40), 5)
        work = {
            "call": lambda cache: said(self.model, cache, ids, torch.ones_like(ids).bool()),
            "token": lambda cache: said(self.model, cache, ids, torch.ones_like(ids).bool()),
            "repeat": lambda cache: cache.batch_repeat_interleave(2),
            "select": lambda cache: cache.batch_select_indices(torch.tensor([0])),
            "reorder": lambda cache: cache.reorder_cache(torch.arange(len(self.rows)).flip(0)),
            "take back": lambda cache: cache.crop(-1),
            "save": lambda cache: cache.save(path),
        }[what]
        if refusal_of(lambda: work(done)) is not None:
            return
        path.unlink(missing_ok=True)
        stopped = interrupt(lambda: work(victim), lines)
        assert difference(state_of(self.cache), before) is None, "copies share nothing that changes"
        if what == "save":
            assert not stopped or path.exists() or not list(Path(self.folder.name).glob(".*"))
        refusal = refusal_of(victim.stack.check_whole)
        if refusal is not None:
            assert stopped
            assert "failed half-way" in refusal
            return
        after = state_of(victim)
        assert None in (difference(after, before), difference(after, state_of(done)))

    # -- what holds at any time

    def _call(self, count, data, *, some_are_padding=True):
        rows, least = len(self.rows), 0
        if self.config.holds_back and self.cache.seen == 0:
            least = 1  # of a row that has none in the first call nothing says which heads need much
        if self.spans and self.cache.seen == 0:
            count, least = max(count, LONG), PROTECTED_TO
        drawn = data.draw(st.integers(0, 2**20), label="seed of the tokens")
        draw = random.Random(drawn)
        ways = ["none", "left"] if self.streams or self.cache.seen == 0 else ["none", "left", "right", "holes"]
        way = draw.choice(ways) if some_are_padding and rows > 1 else "none"
        ids = torch.tensor([[draw.randrange(1, VOCABULARY) for _ in range(count)] for _ in range(rows)])
        new = torch.ones(rows, count, dtype=torch.bool)
        for row in range(rows - 1):  # the last one has no padding
            empty = draw.randrange(count - least + 1)
            if way == "left":
                new[row, :empty] = False
            elif way == "right":
                new[row, count - empty :] = False
            elif way == "holes":
                new[row, draw.sample(range(count), empty)] = False
        nothing_lost = [
            all(layer.held.left[row] == 0 for layer in self.cache.sketch_layers) if self.cache.seen else True
            for row in range(rows)
        ]
        logits = said(self.model, self.cache, ids * new, new)
        assert logits[new].isfinite().all()
        for number, row in enumerate(self.rows):
            own = new[number]
            reads_all = self.looks_up and count > 1 and not self.streams  # a chunk that streams looks up too
            all_is_read = nothing_lost[number] or self.config.name == "exact" or reads_all
            in_one_piece = not self.streams or count <= self.config.chunk
            row.exact = row.exact and ((all_is_read and in_one_piece) or not bool(own.any()))
            tokens = ids[number][own].tolist()
            row.events.append(Call(tokens, own.tolist(), list(row.tokens), logits[number][own], row.exact))
            row.tokens += tokens
            row.columns += own.tolist()
        self._check_what_is_held()

    def _check_what_is_held(self):
        lengths = [len(row.tokens) for row in self.rows]
        assert self.cache.seen == len(self.rows[0].columns)
        for layer in self.cache.sketch_layers:
            held = layer.held
            assert held.lengths == lengths
            protected = [self._protected_beside_the_window(held, row) for row in range(len(self.rows))]
            mass = mass_of(held.past, self.config)
            if mass is not None:
                left = (torch.tensor(held.left) - torch.tensor(protected))[:, None].expand_as(mass).double()
                torch.testing.assert_close(mass, left, rtol=1e-5, atol=1e-4)
        if self.config.budget_given != 1.0:
            self._check_bytes(max(lengths))

    def _protected_beside_the_window(self, held, row):
        """How many there are; all others are in the window, or sinks."""
        if not self.spans:
            return 0
        counts = set()
        for stream in held.streams.all:
            there = stream.window.ranks.view[row].tolist()
            gone = [
                rank
                for start, stop in self.spans[row]
                for rank in range(max(start, self.config.sinks), min(stop, held.lengths[row]))
                if rank not in there
            ]
            bundles = [bundle for bundle in stream.kept.bundles if row in bundle.rows]
            assert {len(gone)} == {bundle.count for bundle in bundles} or not (gone or bundles)
            counts.add(len(gone))
        return counts.pop()

    def _check_bytes(self, longest):
        rows, keep = len(self.rows), self.config.budget_given
        entry = rows * KV_HEADS * 2 * WIDTH * self.model.dtype.itemsize + rows * 12
        if isinstance(keep, str):
            fixed = self.cache.sketch_layers[0].held.budgets[0].fixed
        else:
            fixed = keep if isinstance(keep, int) else max(keep * longest, self.config.least_entries())
        layers = self.cache.sketch_layers  # which may have unequal shares
        assert sum(layer.held.nbytes for layer in layers) <= len(layers) * (1.05 * fixed + SLACK) * entry

    # -- and at the end

    def teardown(self):
        try:
            if all(isinstance(row.events[-1:], list) for row in self.rows):
                for number, row in enumerate(self.rows):
                    self._play_again_alone(number, row)
                    self._compare_with_exact_attention(number, row)
            for cache, held in self.left_behind:
                assert difference(state_of(cache), held) is None, "a copy changed what it was copied from"
        finally:
            self.folder.cleanup()
            kvsketch.detach(self.model)  # nothing of it is watched any more

    def _play_again_alone(self, number, row):
        """A row answers as if it were alone, and as if there were no padding."""
        if isinstance(self.config.budget_given, str):
            return  # its share of the bytes was that of one of several rows
        protect = {"protect": self.spans[number]} if self.spans else {}
        alone, seen = kvsketch.make_cache(self.model, self.config, **protect), []
        for place, event in enumerate(row.events):
            if isinstance(event, int):
                last = next(count for count in range(len(seen) + 1) if sum(seen[len(seen) - count :]) == event)
                alone.crop(-last)
                del seen[len(seen) - last :]
                continue
            if not event.tokens:
                continue
            columns = [True] * len(event.tokens)
            if self.looks_up and len(event.tokens) == 1:
                columns = event.columns  # one token by itself looks up; one in a longer call sees everything
            new = torch.tensor([columns])
            ids = torch.zeros_like(new, dtype=torch.long)
            ids[new] = torch.tensor(event.tokens)
            got = said(self.model, alone, ids, new)[new]
            seen += columns
            what = f"row {number}, event {place}"
            torch.testing.assert_close(got, event.logits, rtol=1e-3, atol=1e-4, msg=lambda m, w=what: f"{w}: {m}")

    def _compare_with_exact_attention(self, number, row):
        for place, event in enumerate(row.events):
            if isinstance(event, Call) and event.exact and event.tokens:
                with torch.no_grad():
                    text = torch.tensor([event.before + event.tokens])
                    expected = in_double_precision()(text).logits[0, -len(event.tokens) :]
                what = f"row {number}, event {place}, exact"
                torch.testing.assert_close(
                    event.logits.double(), expected, rtol=1e-3, atol=1e-4, msg=lambda m, w=what: f"{w}: {m}"
                )


def mass_of(past, config):
    """How many tokens what is held stands for, per row and head; None where a method does not promise that."""
    if config.name == "balancekv" and config.mode == "faithful":
        return None
    if isinstance(config, ScoredConfig):
        if not config.residual:
            return None
    elif getattr(config, "weights", "count") == "none":
        return None
    if past is None or past.empty:
        return None
    found = torch.zeros(past.rows, past.heads, dtype=torch.float64)
    for bundle in past.bundles:
        mass = _mass_of_bundle(bundle)
        if mass is None:
            return None
        rows, heads = torch.tensor(bundle.rows)[:, None], torch.tensor(bundle.heads)
        found[rows, heads] = mass.double().expand(len(bundle.rows) * len(bundle.heads)).view(len(bundle.rows), -1)
    return found


def _mass_of_bundle(bundle):
    held = bundle.holding
    if not bundle.count or isinstance(held, Store):
        return torch.tensor([float(bundle.count)])
    if isinstance(held, SubGenHolding):
        if held.clusters is None:
            return torch.tensor([float(held.exact[0].length)])
        return held.clusters.sizes.sum(1).double()
    tokens = held.weighted
    if tokens is None:
        return torch.zeros(1)
    weights = torch.zeros(1, 1, tokens.count) if tokens.log_mass is None else tokens.log_mass
    return weights[0].double().exp().sum(1)


def play(spec, *, histories, number=None, shrink=True):
    """Play histories of a spec: those of a seed, or always the same ones, and not those of other specs."""
    machine = type("HistoryOf", (History,), {"spec": spec})
    chosen = settings(
        max_examples=histories, stateful_step_count=2 * len(History.HAPPENS), deadline=None, database=None,
        print_blob=False, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
    )  # fmt: skip
    machine = seed(zlib.crc32(spec.encode()) if number is None else number)(machine)
    run_state_machine_as_test(machine, settings=chosen)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help=f"of the first {EACH}; the others count on")
    parser.add_argument("--spec", help="this one alone, and the shortest history that fails")
    given = parser.parse_args()
    torch.set_num_threads(1)
    numbers = range(given.seed, given.seed + max(1, given.histories // EACH))
    failed = []
    for number in numbers:
        spec = given.spec or SPECS[number % len(SPECS)]
        try:
            play(spec, histories=EACH, number=number, shrink=given.spec is not None)
        except Exception as error:
            failed.append(number)
            print(f"seed {number}, {spec}: {type(error).__name__}: {error}")
            print(f"  again: python -m histories --histories {EACH} --seed {number} --spec {spec!r}")
        if sys.stderr.isatty():
            print(f"{number - given.seed + 1} of {len(numbers)} seeds, {len(failed)} failed", end="\r", file=sys.stderr)
    what = f"{EACH * len(numbers):,} histories, seeds {numbers[0]} to {numbers[-1]}"
    print(f"{what}: {f'failed with seeds {failed}' if failed else 'all as promised'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
