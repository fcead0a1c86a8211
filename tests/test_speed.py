"""`kvsketch bench speed`: checked before it is timed, what is read is counted, runs go on, and what the rows say."""

import io
import json
import re

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import kvsketch
import zoo
from commands import refused
from commands import run as command
from kvsketch.caches.registry import parse_spec
from kvsketch.cli.bench_speed_tables import tables
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.evaluation.results.rows import RowsFile, key_of, read_rows
from kvsketch.evaluation.speed import layer, subjects, whole
from kvsketch.evaluation.speed.checks import check_dense
from kvsketch.evaluation.speed.clock import Memory, Turn, no_room, share_of_memory, summed_up
from kvsketch.evaluation.speed.made import keys_and_values, made_up, new_token
from kvsketch.evaluation.speed.plan import BUILD, KEY, LAYER, TORCH, C, Plan, every_method
from kvsketch.evaluation.speed.summary import break_even
from kvsketch.huggingface.free_memory import free_memory
from kvsketch.kernels import native

ABOUT = {"model": "made up", "fingerprint": "0", "dtype": "bfloat16", "kvsketch": "0"}
SMALL = {"kv_heads": 4, "group": 2, "width": 16, "rounds": 3, "between": 8000, "index": (8, 12), "end_to_end": ()}
METHODS = (
    "uniform(keep=0.25)",
    "keydiff(keep=0.25, heads='profile')",
    "streaming_llm(keep=0.25, heads='profile')",
    "subgen(keep=0.25)",
    "saap(window=64, probes=2, staging=64)",
    "saap(window=64, probes=2, staging=64, estimate=True)",
    "kmeans(window=64, probes=2, staging=64)",
    "retrieval(window=64)",
    "h2o(keep=0.25)",
)


def small(**changes):
    return Plan(**(SMALL | {"lengths": (300,), "methods": METHODS} | changes))


class Even(Memory):
    """Memory that is read equally fast each time."""

    def pass_over(self):
        super().pass_over()
        return 1e9


def measured(plan, folder, stop=None):
    """Rows of one layer, labels of what was done, and what was said."""
    rows, said = RowsFile(folder / "speed.jsonl", ABOUT, KEY), []
    steps = []
    for label, settled in layer.run(plan, rows, Even(plan.between), said.append):
        steps.append((label, settled))
        if stop is not None and len(rows.done) >= stop:
            break
    return read_rows(folder / "speed.jsonl", KEY)[1], steps, said


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_method_and_kernel_is_checked_and_timed(dtype, tmp_path):
    plan = small(dtype=dtype, methods=tuple(dict.fromkeys((*METHODS, *every_method()))))
    not_timed = {"exact", "expected_attention"}
    assert {config.name for config in plan.configs.values()} == set(kvsketch.methods()) - not_timed
    rows, steps, said = measured(plan, tmp_path)
    assert [(row["method"], row["kernel"]) for row in rows] == plan.forms()
    assert sum(settled for _, settled in steps) == len(plan.forms())
    assert not said
    assert all(row["right"] for row in rows), [row for row in rows if not row["right"]]
    for row in rows:
        assert 0 < row["low"] <= row["seconds"] <= row["high"]
        assert row["memory"] == 1e9
        assert row["share"] == pytest.approx(row["read"] / row["seconds"] / 1e9, abs=1e-4)
    exact = {row["kernel"]: row["seconds"] for row in rows if row["method"] == "exact"}
    assert {row["exact"] for row in rows if row["method"] in plan.configs} == set(exact.values())


def test_what_a_step_reads_is_counted(tmp_path):
    rows, _, _ = measured(small(), tmp_path)
    found = {row["method"]: row for row in rows}
    entry, tokens = 2 * 16 * 2, 4 * 300
    assert found["stock"]["read"] == found["exact"]["read"] == tokens * entry
    uneven = found["keydiff(keep=0.25, heads='profile')"]
    assert 0.2 * tokens < uneven["entries"] < 0.3 * tokens
    assert uneven["read"] == uneven["entries"] * entry
    looked_up = found[str(parse_spec(METHODS[4]))]
    router = 4 * 2 * (16 * 12 + 12 + 12 * 8 + 8)
    assert looked_up["entries"] < 0.8 * tokens
    assert looked_up["read"] == looked_up["entries"] * entry + router
    assert "router_error" in looked_up
    weighted = found["uniform(keep=0.25)"]
    assert weighted["read"] > weighted["entries"] * entry


def test_heads_with_a_profile_hold_unequal_numbers():
    with made_up(4, 16, [1], (8, 0)) as ready:
        config = ready(small().configs[METHODS[1]])
        cache = layer.filled(config, *keys_and_values(4, 300, 16, torch.float32, seed=0))
    held = cache.streams.all[0].count_entries()[0].tolist()
    assert held == sorted(held)
    assert held[3] > 3 * held[0]


def test_some_heads_hold_everything_where_a_method_has_them_do_so():
    with made_up(4, 16, [1], (8, 0)) as ready:
        config = ready(parse_spec("streaming_heads(keep=0.5)"))  # sinks and windows come first, so one of four
        cache = layer.filled(config, *keys_and_values(4, 300, 16, torch.float32, seed=0))
    held = [int(count) for stream in cache.streams.all for count in stream.count_entries().flatten()]
    assert max(held) == 300
    assert sum(held) < 300 + 3 * 32


def test_a_wrong_answer_has_no_time(tmp_path):
    """Nothing is as near as that."""
    plan = small(within=0.0, methods=METHODS[:1])
    rows, _, _ = measured(plan, tmp_path)
    assert not any(row["right"] for row in rows)
    assert not any("seconds" in row or "share" in row for row in rows)
    assert all(row["answer_error"] > 0 for row in rows)
    shown = Console(width=80, file=io.StringIO())
    shown.print(*tables(rows, plan))
    assert re.search(r"two products +torch wrong +\d\.\d × plain", shown.file.getvalue())


@pytest.mark.parametrize(("scaled", "right"), [(1.0, True), (1.001, False)])
def test_the_check_sees_a_thousandth_of_an_answer(scaled, right):
    keys, values = keys_and_values(4, 300, 16, torch.float32, seed=0)
    query, _ = new_token(4, 2, 16, torch.float32, 0)
    out = F.scaled_dot_product_attention(query, keys, values * scaled, scale=0.25, enable_gqa=True)
    checked = check_dense(out, query, keys, values, 0.25)
    assert checked.right(2.0) is right
    assert checked.errors["answer"][0] == pytest.approx(scaled - 1, rel=0.01, abs=1e-6)


def test_a_run_goes_on_with_the_lengths_that_are_missing(tmp_path):
    plan = small(lengths=(200, 300), methods=METHODS[:1])
    first, _, _ = measured(plan, tmp_path, stop=1)
    assert {row["tokens"] for row in first} == {200}
    rows, steps, _ = measured(plan, tmp_path)
    assert rows[: len(first)] == first
    assert {row["tokens"] for row in rows} == {200, 300}
    assert steps[0] == ("200 tokens", len(first))
    assert not any(label.startswith("200 tokens, ") for label, _ in steps)
    more, _, _ = measured(small(lengths=(200, 300), methods=METHODS[:2]), tmp_path)
    assert len({key_of(row, KEY) for row in more}) == len(more) == len(rows) + 2 * len(plan.kernels)


def test_what_does_not_fit_is_left_out_and_said(tmp_path):
    rows, steps, said = measured(small(lengths=(10**9,)), tmp_path)
    assert rows == []
    assert steps[-1][1] == len(small().forms())
    assert re.match(
        r"1,000,000,000 tokens of one layer are left out: it needs about \d+\.\d GB of memory, and", said[0]
    )
    free = free_memory(torch.device("cpu"))
    assert free is None or no_room(free / 2) is None


@pytest.mark.skipif(native.library() is None, reason="there is no compiler")
def test_kernels_in_c_can_be_turned_off_here_alone():
    x = torch.zeros(1)
    with native.off():
        assert (native.library(), native.name(), native.library_for(x)) == (None, "torch", None)
    assert native.library_for(x) is not None
    assert native.name().startswith("C")


def rows_of(method, faster, kernel=C):
    made = {"part": LAYER, "method": method, "kernel": kernel, "right": True, "exact": 1.0}
    return [made | {"tokens": tokens, "seconds": 0.5 if quick else 2.0} for tokens, quick in faster.items()]


def test_break_even_is_where_a_method_begins_to_stay_faster():
    rows = rows_of("a", {10: True, 20: False, 30: True, 40: True}) + rows_of("b", {10: True, 40: False})
    rows += [*rows_of("a", {10: True, 40: True}, TORCH), {**rows_of("c", {10: True})[0], "right": False}]
    found = {(one.method, one.kernel): (one.tokens, one.longest) for one in break_even(rows)}
    assert found == {("a", C): (30, 40), ("b", C): (None, 40), ("a", TORCH): (10, 40)}


def test_a_step_is_held_against_the_speed_right_before_it():
    turns = [Turn(seconds=1, memory=100), Turn(seconds=2, memory=50), Turn(seconds=4, memory=100)]
    assert share_of_memory(100, turns) == 1.0  # not .5, as by the medians of both


def test_the_middle_and_the_ends_of_times():
    found = summed_up([float(x) for x in range(101)])
    assert found == pytest.approx({"seconds": 50, "low": 5, "high": 95, "mean": 50})


@pytest.mark.parametrize("read", [True, False])
def test_whole_models_are_timed_beside_exact(read, tmp_path):
    plan = Plan(rounds=2, methods=("uniform(keep=0.25)", "snapkv(keep=0.25)", "saap"), lengths=())
    model, ids = zoo.build("llama"), zoo.tokens(1, 304, seed=5)
    rows, said = RowsFile(tmp_path / "speed.jsonl", ABOUT, KEY), []
    prompt, piece = (ids[:, :300], None) if read else (None, ids[:, :20])
    subject = whole.Subject("small", model, 300, ids[0, 300:], prompt, piece)
    steps = list(whole.run(subject, plan, rows, lambda config: config, said.append))
    assert sum(settled for _, settled in steps) == 5
    assert said[0].startswith("saap is left out of small: saap looks things up in an index of this model")
    found = {row["method"]: row for row in read_rows(tmp_path / "speed.jsonl", KEY)[1]}
    assert list(found) == ["stock", "exact", "uniform(keep=0.25)", "snapkv(keep=0.25)"]
    assert found["stock"]["error"] < 1e-3
    assert found["uniform(keep=0.25)"]["nbytes"] < 0.6 * found["exact"]["nbytes"]
    for row in found.values():
        assert row["right"]
        assert row["seconds"] > 0 < row["exact"]
        assert row["method"] == "stock" or row["in_row"] > 0
        assert ("reading" in row) is read
        assert read or (row["piece"] > 0 and row["piece_tokens"] == 20)
    assert model.config._attn_implementation != "kvsketch"
    assert next(whole.run(subject, plan, rows, lambda config: config, said.append)) == ("small, 300 tokens", 4)


def test_an_index_is_made_up_for_the_real_model_too(tmp_path, monkeypatch):
    """Its folder here is that of a small one, with another model's tokenizer."""
    tokenizer = load_embedded(torch.float32)[1]
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=400,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(subjects, "smollm2_folder", lambda say: tmp_path)
    plan = Plan(rounds=2, methods=("saap(window=64, probes=2, staging=64)",), lengths=(), index=(8, 12))
    rows, said = RowsFile(tmp_path / "speed.jsonl", ABOUT, KEY), []
    assert sum(settled for _, settled in subjects.run_real(plan, rows, said.append)) == 3
    found = read_rows(tmp_path / "speed.jsonl", KEY)[1]
    assert not said
    assert [row["right"] and row["seconds"] > 0 for row in found] == [True] * 3
    assert found[2]["tokens"] > 280
    assert found[2]["compressing"] == 0 < found[2]["reading"]  # it files keys while it reads


def test_a_whole_model_that_answers_otherwise_has_no_times(tmp_path):
    rows = RowsFile(tmp_path / "speed.jsonl", ABOUT, KEY)
    ids = zoo.tokens(1, 104, seed=5)
    subject = whole.Subject("small", zoo.build("llama"), 100, ids[0, 100:], ids[:, :100])
    plan = Plan(rounds=2, methods=("uniform",), lengths=(), apart=0.0)
    assert list(whole.run(subject, plan, rows, lambda config: config, print))
    found = read_rows(tmp_path / "speed.jsonl", KEY)[1]
    assert [row["right"] for row in found] == [False] * 3
    assert not any("seconds" in row or "reading" in row for row in found)


OPTIONS = {
    "--lengths": "200,300",
    "--methods": "uniform(keep=0.25); saap",
    "--kv-heads": 2,
    "--group": 2,
    "--width": 16,
    "--rounds": 2,
    "--between": "1MB",
    "--end-to-end": "150",
    "--layers": 2,
    "--buckets": 8,
    "--hidden": 8,
}


def speed(out, **changes):
    given = OPTIONS | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return command("bench", "speed", *(part for pair in given.items() for part in pair), "--no-real", "-o", out)


def test_the_command_measures_and_draws_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("CFLAGS", "-O0")  # what compiling takes is measured too, and need not take long
    done = speed(tmp_path)
    assert done.returncode == 0, done.stderr
    for said in ("one layer, 200 tokens, bfloat16", "break-even", "random Llama, 150 tokens", "stock, folded"):
        assert said in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    lines = (tmp_path / "speed.jsonl").read_text().splitlines()
    run = json.loads(lines[0])["run"]
    assert {"commit", "processor", "threads", "torch", "command"} <= run.keys()
    assert speed(tmp_path).returncode == 0
    assert (tmp_path / "speed.jsonl").read_text().splitlines()[: len(lines)] == lines
    rows = read_rows(tmp_path / "speed.jsonl", KEY)[1]
    assert len(rows) == len(lines) - 1
    assert native.library() is None or [row["seconds"] > 0 for row in rows if row["part"] == BUILD] == [True]
    refused(speed(tmp_path, width=32), "holds rows of another model: 2 KV heads × 2 query heads × 16, 8 buckets")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lengths": "10"}, "lengths must be at least 64 tokens each, got 10"),
        ({"end_to_end": "20"}, "end_to_end must be at least 64 tokens each, got 20"),
        ({"lengths": ""}, "--lengths must be numbers with commas between them"),
        ({"methods": "exact"}, "exact is what all others are compared with: leave it out"),
        ({"methods": "uniform; uniform(keep=0.25)"}, "uniform(keep=0.25) is named twice"),
        ({"methods": "uniform(keep='1MB')"}, "bytes are those of a whole model"),
        ({"methods": "expected_attention"}, "depends on how later tokens are rotated"),
        ({"methods": "unifrom"}, "did you mean uniform"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"width": "15"}, "width must be even"),
        ({"between": "much"}, "--between must be an amount of memory such as 640MB, got 'much'"),
        ({"rounds": "1"}, "Invalid value for '--rounds'"),
    ],
)
def test_what_cannot_be_timed_is_said_at_once(changes, said, tmp_path, as_users_run_it):
    refused(speed(tmp_path / "out", **changes), said)
    assert not (tmp_path / "out").exists()
