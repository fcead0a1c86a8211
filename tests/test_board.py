"""`kvsketch bench all`: what is compared, what counts at equal bytes, who is level with the best, and one page."""

import html
import math
from collections import Counter

import pytest
import torch

import kvsketch
import zoo
from commands import refused, run
from kvsketch.caches.registry import METHODS
from kvsketch.evaluation.board import timed
from kvsketch.evaluation.board.content import content
from kvsketch.evaluation.board.equal import Fitter
from kvsketch.evaluation.board.gathering import Rows, Wanted
from kvsketch.evaluation.board.lines import Line, line_of
from kvsketch.evaluation.board.names import FITTED_KEY, SAME_PROMPT, SPEED_KEY
from kvsketch.evaluation.board.page import About, write_board
from kvsketch.evaluation.board.peak import peak_bytes
from kvsketch.evaluation.board.plan import Choice, chosen
from kvsketch.evaluation.embedded.training.tokenizer import build_tokenizer
from kvsketch.evaluation.results.names import ANSWERS, FITTED, PROMPTS, SPEED, TEXTS
from kvsketch.evaluation.results.pairs import EXACTLY, chance
from kvsketch.evaluation.results.rows import KEY, RowsFile, key_of, read_rows
from kvsketch.evaluation.texts.plan import KEY as TEXT_KEY
from kvsketch.huggingface.identity import describe_model

PROSE = "It was a bright cold day in April, and the clocks were striking thirteen. " * 40


# -- the command


@pytest.fixture
def small(tmp_path):
    """A model's folder: its tokenizer is that of the embedded one."""
    model, tokenizer = zoo.build("llama"), build_tokenizer()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "book.txt").write_text(PROSE)
    return tmp_path


def command(folder, *more):
    given = ["bench", "all", folder / "model", "--quick", "-m", "keydiff; tova", "--heads", "equal"]
    given += ["--tasks", "niah_single", "--lengths", 300, "--samples", 2, "--able", 0, "--max-new-tokens", 2]
    given += ["--haystack", folder / "book.txt", "--texts", folder / "book.txt", "--windows", 1, "--turns", 1, "--fit"]
    return run(*given, "--asked", "after", "-o", folder / "out", *more, columns=200)


def test_one_run_makes_one_page_and_goes_on_where_it_stopped(small):
    done = command(small)
    assert done.returncode == 0, done.stderr
    keys = {FITTED: FITTED_KEY, ANSWERS: KEY, TEXTS: TEXT_KEY, SPEED: SPEED_KEY}
    whole = {name: read_rows(small / "out" / name, key)[1] for name, key in keys.items()}
    assert [row["method"] for row in whole[FITTED]] == ["keydiff(keep=0.25)", "tova(keep=0.25)"]
    specs = [row["fitted"] for row in whole[FITTED]]
    assert Counter(row["method"] for row in whole[ANSWERS]) == dict.fromkeys(("exact", *specs), 4)
    assert {row["haystack"].partition("#")[0] for row in whole[ANSWERS]} == {"grammar", "book.txt"}
    assert [row["method"] for row in whole[TEXTS]] == list(specs)
    assert [row["method"] for row in whole[SPEED]] == ["exact", *specs]
    for row in whole[SPEED]:
        assert row["peak_nbytes"] > row["nbytes"] > 0
        assert min(row["step"] + row["exact_step"] + row["reading"]) > 0
    asked = read_rows(small / "out" / PROMPTS, SAME_PROMPT)[1]
    assert {key_of(row, SAME_PROMPT) for row in asked} == {key_of(row, SAME_PROMPT) for row in whole[ANSWERS]}
    written = [(small / "out" / name).stat().st_mtime_ns for name in (PROMPTS, ANSWERS)]
    assert written == sorted(written)  # another package need not wait for our answers
    page = (small / "out" / "board.html").read_text()
    for said in ("KL on text", "peak memory", "to compress", "decode", "prose", "kvsketch bench all"):
        assert said in page
    assert "http" not in page
    for name in keys:  # cut off in the middle of a row, as a killed process leaves it
        content = (small / "out" / name).read_bytes()
        (small / "out" / name).write_bytes(content[: content.rstrip().rfind(b"\n") + 40])
    again = command(small)
    assert again.returncode == 0, again.stderr
    for name, key in keys.items():
        rows = read_rows(small / "out" / name, key)[1]
        assert rows[:-1] == whole[name][:-1]  # what was there stays
        assert len(rows) == len(whole[name])
    assert rows[-1]["method"] == whole[SPEED][-1]["method"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "2"], "a board compares fractions of a full cache, above 0 and up to 1, got 2"),
        (["-m", "keydiff(keep=512)"], "a board compares fractions of a full cache, got keydiff(keep=512)"),
        (["-m", "exact"], "exact is what all others are compared with: leave it out"),
        (["--heads", "fair"], "heads must be among equal, profile, threshold, pyramid, or a profile, got 'fair'"),
        (["--heads", ","], "name at least one fraction to keep and one way to share it"),
        (["--tasks", "niah"], "unknown task 'niah'"),
        (["--tasks", "lines", "--haystack", "{book}"], "none of lines hides anything in a text: leave out --haystack"),
        (["--texts", "{book}"], "book.txt has 882 tokens, and a window needs 2,128"),
        (["--lengths", "32600"], "a prompt and what is read again of it at a time have 32,920 tokens"),
        (["--beside", "nowhere"], "--beside must name a folder with rows.jsonl of another package, got nowhere"),
        (["-m", "keydiff; keydiff(keep=0.25)", "--quick"], "keydiff(keep=0.25) is named twice"),
    ],
)
def test_mistakes_are_told_at_once(arguments, message, tmp_path):
    (tmp_path / "book.txt").write_text(PROSE)
    filled = [argument.format(book=tmp_path / "book.txt") for argument in arguments]
    refused(run("bench", "all", "embedded", "-o", tmp_path / "out", *filled), message)
    assert not (tmp_path / "out").exists()


# -- what is compared


def test_every_method_has_every_way_to_share_that_it_can_have():
    facts = describe_model(zoo.build("llama"))
    found = chosen(Choice(keeps=(0.25,), heads=("equal", "threshold")), lambda: facts)
    lines = {(line.name, line.heads) for line in map(line_of, found.specs)}
    methods = {name for name, config in METHODS.items() if hasattr(config, "heads") and name != "streaming_heads"}
    assert {name for name, _ in lines} == methods | {"kvzip(window=0.25)"}  # which is recommended for a quarter
    little = [line_of(spec).name for spec in chosen(Choice(keeps=(0.125,), heads=("threshold",)), lambda: facts).specs]
    assert little.count("kvzip") == 1
    assert "kvzip(window=0.25)" not in little
    assert {heads for name, heads in lines if name == "snapkv"} == {"equal", "threshold"}
    assert {heads for name, heads in lines if name == "keydiff"} == {"equal"}  # scores that cannot be compared
    assert {heads for name, heads in lines if name == "pyramidkv"} == {"pyramid"}  # else it is snapkv
    assert not found.left_out
    profiled = chosen(Choice(methods=["uniform", "streaming_heads"], keeps=(0.5,), heads=("profile",)), lambda: facts)
    assert profiled.specs == []
    assert len(profiled.left_out) == 2
    with pytest.raises(ValueError, match="wants a profile of this model, and there is none"):
        chosen(Choice(methods=["uniform(heads='profile')"], keeps=(0.5,)), lambda: facts)
    own = Choice(methods=["snapkv(keep=0.3, heads='equal')"], keeps=(0.5,), index="i")
    assert chosen(own, lambda: facts).specs[:2] == [
        "snapkv(keep=0.3)",
        "saap(window=255, probes=128, visit=0.5, estimate=True, index='i', prefer='density')",
    ]
    assert line_of("KVzipPress(keep=0.5, heads='threshold', n=3)", "kvpress") == Line(
        "KVzipPress(n=3)", "threshold", 0.5, "kvpress"
    )


@pytest.mark.parametrize("shorter", [[0], [0, 5, 11]])
def test_a_method_is_given_what_holds_its_budget(shorter, tmp_path):
    """And not much less; one that cannot hold so little stays as it is. Rows of unequal lengths hold more than one."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 800, seed=3).repeat(len(shorter), 1)
    fitter = Fitter(model, ids[:1], len(shorter))
    real = torch.stack([torch.arange(800) >= less for less in shorter]).long()
    whole = kvsketch.prefill(model, ids, kvsketch.make_cache(model), attention_mask=real).nbytes
    for spec in ("uniform(keep=0.5)", "tova(keep=0.25)"):
        found = fitter.fitted(spec)
        held = kvsketch.prefill(model, ids, kvsketch.make_cache(model, found), attention_mask=real).nbytes / whole
        line = line_of(found, budget=line_of(spec).keep)
        assert (line.keep, line.given) == (line_of(spec).keep, line_of(found).keep)
        assert 0.95 * line.keep < held <= line.keep
        assert line.given < line.keep
    for same in ("uniform(keep=0.01)", "retrieval(window=32)"):
        assert fitter.fitted(same) == same
    about, specs = {"kvsketch": "1"}, ["uniform(keep=0.5)", "tova(keep=0.25)"]
    file = RowsFile(tmp_path / FITTED, about, FITTED_KEY)
    assert [settled for _, settled in fitter.run(specs, file)] == [0, 1, 1]
    for other, settled in ((Fitter(model, ids[:1], len(shorter)), [2]), (Fitter(model, ids[:1], 4), [0, 1, 1])):
        assert [number for _, number in other.run(specs, file)] == settled  # what is noted was found for this text
        assert other.found(file) == {spec: other.fitted(spec) for spec in specs}


# -- who is best


def test_chance_is_that_of_signs_drawn_at_random():
    assert chance([]) == chance([0.0, 0.0]) == 1.0
    assert chance([0.5] * 5) == 2 / 2**5  # which is above 1 in 20, however large the differences are
    assert chance([0.5] * 6 + [0.0] * 9) == 2 / 2**6
    heads = sum(math.comb(10, k) for k in (0, 1, 9, 10)) / 2**10
    assert chance([1.0] * 9 + [-1.0]) == pytest.approx(heads)
    assert chance([3.0, 1.0, -1.0]) == 6 / 8  # of ±3 ±1 ±1 all but 1 and -1 are as far from 0
    counted = chance([1.0] * (EXACTLY - 3) + [-1.0] * 3)
    assert chance([1.0] * (EXACTLY - 3) + [-1.0] * 3 + [1e-9]) == pytest.approx(counted, abs=0.08)


def answer_rows(method, scores, share, **changes):
    row = {"task": "lines", "wording": "compact", "haystack": "noise", "cases": None, "template": False}
    row |= {"asked": "after", "length": 900, "depth": None, "new_tokens": 9, "method": method, "output": "1"}
    row |= {"nbytes": round(share * 10_000), "full_nbytes": 10_000} | changes
    return [row | {"sample": sample, "score": float(score)} for sample, score in enumerate(scores)]


def lined(rows, package=""):
    return [(line_of(row["method"], package), row) for row in rows]


def marks(rows):
    """By method."""
    (section,) = content(rows).sections
    return {f"{one.line.name} {one.line.heads}": one.cells[0].mark for one in section.lines}


def test_a_cell_counts_only_within_its_budget_and_the_best_are_told_by_pairs():
    rows, half = Rows(), [1, 0] * 10
    found = {
        "keydiff(keep=0.25)": ([1] * 20, 0.2731),  # more than 1.05 × a quarter of what exact holds
        "kvzip(keep=0.25)": ([1] * 18 + [0, 1], 0.2730),
        "uniform(keep=0.25)": ([1] * 18 + [1, 0], 0.1),  # as many, others
        "snapkv(keep=0.25)": ([1] * 15 + [0] * 5, 0.25),  # six differ: five to one, which may be chance
        "tova(keep=0.25)": (half, 0.25),
    }
    for method, (scores, share) in found.items():
        rows.found[ANSWERS] += lined(answer_rows(method, scores, share))
    rows.found[ANSWERS] += lined(answer_rows("exact", [1] * 20, 1.04))
    assert marks(rows) == {
        "kvzip threshold": "best",
        "uniform equal": "level",
        "snapkv equal": "level",
        "tova equal": "",
        "keydiff equal": "over",  # and at the end, though it knows most
    }
    (section,) = content(rows).sections
    best, level = section.winners(0)
    assert (best.line.name, [line.name for line in level]) == ("kvzip", ["uniform", "snapkv"])
    assert best.cells[0].figure.text == "0.950"
    assert [one.line.name for one in content(rows).whole] == ["exact"]


def test_tasks_weigh_the_same_and_a_method_without_one_has_no_mean():
    rows = Rows()
    every = [
        *answer_rows("keydiff(keep=0.5)", [1] * 30, 0.5),
        *answer_rows("keydiff(keep=0.5)", [0] * 3, 0.5, task="kv"),
    ]
    every += answer_rows("uniform(keep=0.5)", [1] * 30, 0.5)
    rows.found[ANSWERS] += lined(every)
    board = content(rows)
    ((line, figure),) = board.columns[0].figures.items()
    assert (line.name, figure.value, figure.count) == ("keydiff", 0.5, 33)
    assert [column.title for column in board.tasks] == ["lines", "kv"]
    assert len(board.tasks[0].figures) == 2


def test_seconds_and_memory_are_level_where_their_ranges_overlap():
    row = {"text": "lines", "tokens": 9, "steps": 3, "turns": 3, "nbytes": 25, "full_nbytes": 100, "peak_nbytes": 50}
    row |= {"exact_reading": [1.0, 1.2, 1.4], "reading": [1.0, 1.2, 1.4], "step": [0.1] * 9, "exact_step": [0.2] * 9}
    kinds = {"keydiff": [0.1, 0.2, 0.3], "snapkv": [0.3, 0.4, 0.5], "h2o": [0.31, 0.32, 0.33]}
    found = [row | {"method": f"{name}(keep=0.25)", "compressing": times} for name, times in kinds.items()]
    found[1] |= {"peak_nbytes": 51, "reading": [1.0, 1.1, 1.4]}  # quicker than exact once, by chance
    found[2] |= {"reading": [1.5, 1.7, 1.9], "step": [0.1] * 8 + [0.2]}
    rows = Rows()
    rows.found[SPEED] += lined([row | {"method": "exact", "compressing": [], "nbytes": 100}, *found])
    board = content(rows)
    assert [column.title for column in board.columns] == ["peak memory", "to compress", "decode"]
    cells = {one.line.name: one.cells for one in board.sections[0].lines}
    assert {name: [cell.mark for cell in own] for name, own in cells.items()} == {
        "keydiff": ["best", "best", "best"],
        "h2o": ["level", "", "level"],
        "snapkv": ["", "level", "level"],
    }
    assert [cells[name][1].figure.text for name in kinds] == ["0.200 s", "0.400 s", "0.820 s"]
    assert cells["h2o"][1].figure.note == "0.810 to 0.830; prompt 1.68 ×"
    assert cells["keydiff"][2].figure.text == "10 /s"
    assert cells["keydiff"][2].figure.note == "2.00 × exact, 2.00 to 2.00"


# -- other packages, and the page

ODD = "</code><script>alert(1)</script>"
SPEC = "kvzip(keep=0.25)"


def test_another_package_stands_beside_ours_and_what_saves_nothing_is_marked(tmp_path):
    rows = Rows()
    rows.found[ANSWERS] += lined(answer_rows("exact", [1, 1], 1.0) + answer_rows(SPEC, [1, 1], 0.25))
    theirs = answer_rows("exact", [1, 1], 1.0) + answer_rows("KVzipPress(keep=0.25, heads='threshold')", [1, 1], 2.0)
    theirs[1]["output"] = "2"
    rows.found[ANSWERS] += lined(theirs, f"kvpress {ODD}")
    assert rows.agreement() == {f"kvpress {ODD}": (1, 2)}
    board = content(rows)
    assert [one.saves_nothing for one in board.sections[0].lines] == [False, True]
    assert [one.line.package for one in board.whole] == ["", f"kvpress {ODD}"]
    about = About(model=ODD, command=f"kvsketch {ODD}", runs=[{"commit": ODD}], able=0.8, left_out=[ODD])
    page = write_board(tmp_path / "board.html", board, about).read_text()
    assert ODD not in page
    assert page.count(html.escape(ODD)) >= 5
    assert page.count("saves no memory</span>") == 2  # in both tables
    assert "Not measured: no text was given" in page
    assert "there is noise only" in page


def test_rows_of_another_model_are_refused(tmp_path):
    about = {"model": "other", "fingerprint": "2", "dtype": "float32", "kvsketch": "0", "package": "kvpress"}
    RowsFile(tmp_path / ANSWERS, about).add(answer_rows("exact", [1], 1.0))
    wanted = Wanted(methods={}, keeps=(), answers=(), texts=(), speed=timed.Plan(methods=(), tokens=1))
    with pytest.raises(ValueError, match=r"rows\.jsonl holds rows of another model, 'other'"):
        Rows().add(tmp_path, wanted, "1", own=False)


def test_the_peak_is_the_most_that_is_held_at_once():
    def work():
        first = torch.ones(1 << 18)  # 1 MiB
        second = torch.ones(3 << 18)
        del second
        return torch.cat([first, first])

    peak, made = peak_bytes(work, torch.device("cpu"))
    assert (peak >> 10, made.numel()) == (4 << 10, 1 << 19)
