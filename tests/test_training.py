"""How the embedded model is made."""

import importlib
import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AttentionInterface

from kvsketch.evaluation.embedded import load_embedded
from kvsketch.evaluation.embedded.training.documents import (
    ALSO_HIDDEN,
    IGNORED,
    PROSE,
    SHARES,
    TASK_NAMES,
    Documents,
    _ended,
    _make,
)
from kvsketch.evaluation.embedded.training.looks import CHOOSING, FOLLOWING, REACH, looks
from kvsketch.evaluation.embedded.training.loss import FUSED, attend, look_scores, loss_of, read
from kvsketch.evaluation.embedded.training.recipe import (
    FINISHED_AT,
    FINISHED_WITH,
    LENGTHS,
    SOLVED,
    WATCHED,
    Progress,
    Recipe,
)
from kvsketch.evaluation.embedded.training.shape import Shape
from kvsketch.evaluation.embedded.training.start import start_model
from kvsketch.evaluation.embedded.training.tokenizer import alike, build_tokenizer
from kvsketch.evaluation.embedded.training.train import _wanted, train
from kvsketch.evaluation.tasks import TASKS, WORDINGS, Question, Setting
from kvsketch.evaluation.tasks.base import random_uuid
from kvsketch.evaluation.tasks.haystack import Sentences
from kvsketch.files import UNFINISHED, read_json, write_json, write_tensors

TOKENIZER = build_tokenizer()
SMALL = {"tokens": 1_500, "batch": 256, "finish": 1.5}


def new_model(**shape):
    return start_model(TOKENIZER, shape=Shape(**shape))


@given(st.text())
def test_any_text_survives_the_tokenizer(text):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n", "<end> is text", "a\u2063b", "naïve 日本語 ☃ 👩‍🚀", "x\r\ny\tz", "3.14159 -foo"]
)
def test_odd_texts_survive_the_tokenizer(text):
    assert TOKENIZER.decode(TOKENIZER(text, add_special_tokens=False)["input_ids"]) == text


# A record and a question on it, where the answer begins: so many tokens from the name on are laid out alike.
ALIKE = {
    "line bold-otter: REGISTER_CONTENT is <12345>": "in line bold-otter? I need the number. ",
    "line bold-otter: <12345>": "in line bold-otter? <",
    "One of the special magic numbers for bold-otter is: 1234567.": (
        " The special magic number for bold-otter mentioned in the provided text is "
    ),
    "The magic number of bold-otter is 1234567.": " The magic number of bold-otter is ",
    'bold-otter": "a1b2c3"': 'bold-otter": "',
    'bold-otter": "0a1b2c3d-0a1b-4a1b-8a1b-0a1b2c3d4e5f"': (
        'bold-otter"\nThe value associated with the specified key is: '
    ),
}


@pytest.mark.parametrize(("record", "ask"), ALIKE.items())
def test_a_record_and_the_question_on_it_are_laid_out_alike(record, ask):
    stored, asked = TOKENIZER.tokenize(record), TOKENIZER.tokenize(ask)
    name = stored.index("-otter")
    assert asked[asked.index("-otter") - 1] == stored[name - 1]
    answer = next(place for place, piece in enumerate(stored) if place > name and re.match("[0-9a]", piece))
    assert answer - name == len(asked) - asked.index("-otter")


def test_pieces_that_do_the_same_are_one_token_each_and_start_with_one_code():
    codes = new_model(layers=3).model.embed_tokens.weight
    for group in alike(TOKENIZER):
        assert len(set(group)) > 1
        assert all(torch.equal(codes[token], codes[group[0]]) for token in group)
    assert not torch.equal(codes[alike(TOKENIZER)[0][0]], codes[alike(TOKENIZER)[1][0]])


@pytest.mark.parametrize("end", ["", " ", "\n"])
@pytest.mark.parametrize(("bare", "answer"), [("in line bold-otter? <", "12345>"), ('bold-otter": "', 'a1b2c3"')])
def test_white_space_behind_an_opening_mark_is_part_of_it(bare, answer, end):
    plain = TOKENIZER.tokenize(bare + answer)
    ended = TOKENIZER.tokenize(bare + end + answer)
    assert len(ended) == len(plain)
    other = [piece for piece, again in zip(plain, ended, strict=True) if piece != again]
    assert other == ([piece for piece in plain if piece in ("Ġ<", 'Ġ"')] if end else [])


@pytest.mark.parametrize("end", ["", " ", "\n"])
def test_white_space_between_question_and_number_is_one_token_of_its_own(end):
    bare = " The magic number of bold-otter is"
    number = "1234567" if end else " 1234567"
    assert TOKENIZER.tokenize(bare + end + number)[-4:] == [("Ċ" if end == "\n" else "Ġ"), "123", "456", "7"]


def test_a_uuid_is_pairs_of_digits():
    draw = random.Random(0)
    for _ in range(200):
        found = random_uuid(draw)
        pieces = TOKENIZER.tokenize(f"It is {found}.")[2:-1]
        assert len(pieces) == 21  # sixteen pairs, four dashes and the blank before them
        assert pieces[1:] == [piece for part in found.split("-") for piece in ["-", *re.findall("..", part)]][1:]
    assert TOKENIZER.tokenize("deadbeef-cafe") != ["de", "ad", "be", "ef", "-", "ca", "fe"]


def test_the_tokenizer_is_the_same_every_time():
    assert build_tokenizer.__wrapped__().backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()


def test_layer_0_starts_by_looking_back_one_more_token_in_every_head():
    model = new_model()
    model.set_attn_implementation("eager")
    ids = torch.randint(300, 2000, (1, 60), generator=torch.Generator().manual_seed(0))
    attention = model(ids, output_attentions=True).attentions[0][0]
    for head in range(Shape().offsets):
        looked_at = attention[head, 20:].argmax(-1)
        assert (torch.arange(20, 60) - looked_at == head + 1).all()
        assert attention[head, 20:].amax(-1).min() > 0.9


def test_layer_1_starts_by_finding_what_followed_before():
    """Untrained, the model continues a text that repeats itself."""
    model = new_model()
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(300, 2000, (16, 40), generator=generator)
    ids = torch.cat([text, text[:, :20]], 1)
    said = model(ids).logits[:, 48:59].argmax(-1)  # once the last 8 tokens repeat
    right = (said == ids[:, 49:60]).float().mean()
    assert right > 0.7  # by chance: 1 in 40


def test_it_starts_by_saying_the_values_of_a_name_in_the_order_of_the_text():
    """Untrained, all but the first mostly; by chance never, as there are a thousand pieces of numbers."""
    model, right = new_model(layers=3), list[bool]()
    for seed, wording in itertools.product(range(8), WORDINGS):
        sample = TASKS["niah_multivalue"].make(random.Random(seed), Setting(size=12, wording=wording))
        question = sample.questions[0]
        read = TOKENIZER(sample.context + question.prompt)["input_ids"]
        reply = TOKENIZER(question.reply, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            said = model(torch.tensor([read + reply])).logits[0, len(read) - 1 :].argmax(-1).tolist()
        begins = [TOKENIZER(f" {value}", add_special_tokens=False)["input_ids"][1] for value in question.answers]
        right += [said[reply.index(token)] == token for token in begins[1:]]
    assert len(right) == 48
    assert sum(right) > 0.8 * len(right)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"codes of 20 and 38 numbers.* take 274 dimensions where there are 256"):
        Shape(code=20)
    for sizes in ({"layers": 2}, {"kv_heads": 8}, {"offsets": 6}, {"heads": 4}):
        with pytest.raises(ValueError, match="needs 3 layers or more, 4 KV heads, 7 offsets and a head for each, got"):
            Shape(**sizes)


def test_a_batch_is_the_same_for_the_same_seed_and_step():
    first, again = (Documents(TOKENIZER, 3).batch(7, 512, 2048) for _ in range(2))
    assert first.names == again.names
    assert torch.equal(first.context, again.context)
    assert torch.equal(first.asked, again.asked)
    assert not torch.equal(
        first.context, Documents(TOKENIZER, 3).batch(8, 512, 2048).context[:, : first.context.shape[1]]
    )


def test_every_task_is_trained_and_documents_have_the_length_wanted():
    documents = Documents(TOKENIZER, 0)
    assert set(SHARES) == set(TASKS) - {"cwe"}
    shares = []
    for name in SHARES:
        for length in (768, 3072):
            for seed in range(3):
                sample = documents._sample(random.Random(f"{name}/{seed}"), name, length)
                shares.append(len(documents._ids(sample.context, special=True)) / length)
    assert sum(0.75 < share < 1.3 for share in shares) > 0.9 * len(shares)
    assert max(shares) < 1.6


@pytest.mark.parametrize(
    ("prompt", "reply", "end", "asked", "said"),
    [
        ("It is ", "123.", "", "It is ", "123."),
        ("It is ", "123.", " ", "It is", " 123."),
        ("It is ", "123.", "\n", "It is\n", "123."),
        ("It is", " 123.", " ", "It is ", "123."),
        ("They are", " able-acorn is: 5.", " ", "They are ", " able-acorn is: 5."),
        ("line? <", "123>", "\n", "line? <\n", "123>"),
    ],
)
def test_prompts_end_with_a_blank_a_newline_or_nothing(prompt, reply, end, asked, said):
    assert _ended(Question("", ("123",), reply, opening=prompt), end) == (asked, said)


TIMES_SAID = {"niah_multikey": 1, "passkey": 2, "number_string": 2, "needle": 1}  # a word of vt may be noise too
SAID_OF = {
    "niah_multikey": "magic number",
    "passkey": "pass key",
    "number_string": "sequence of digits",
    "needle": "magic number",
    "vt": "ariables",
}


def test_a_text_may_hide_what_several_tasks_ask_for():
    """Each once, with its task's name, and anywhere in the text, whatever that is made of."""
    documents = Documents(TOKENIZER, 0)
    depths = {haystack.name: dict[str, list[float]]() for haystack in documents.haystacks}
    for seed in range(60):
        haystack = documents.haystacks[seed % 4]
        setting = Setting(size=40, haystack=haystack, wording=WORDINGS[seed // 4 % 2])
        made = _make(random.Random(seed), "niah_multikey", setting, ["passkey", "number_string", "needle", "vt"])
        for task, question in made.asked:
            assert SAID_OF[task] in question.prompt
            found = [place.start() for place in re.finditer(rf"\b{question.answers[0]}\b", made.context)]
            assert found
            assert len(found) == TIMES_SAID.get(task, len(found))
            depths[haystack.name].setdefault(task, []).append(found[-1] / len(made.context))
    for name, found in depths.items():
        assert set(found) == set(SAID_OF)
        spread = [depth for task in found.values() for depth in task]
        assert sum(0.25 < depth < 0.75 for depth in spread) / len(spread) > 0.4, name


def test_texts_of_the_users_are_hidden_in_too():
    words = "The quick brown fox of line four jumps over a lazy dog"

    class Own(Sentences):
        name = "own"

        def pieces(self, draw, count):
            return [words] * count

    documents = Documents(TOKENIZER, 0, [Own()])
    texts = [TOKENIZER.decode(row) for step in range(6) for row in documents.batch(step, 768, 4096).context]
    assert any(text.count(words) > 5 for text in texts)


def test_labels_are_the_replies_and_each_question_sees_only_its_document_and_itself():
    batch = Documents(TOKENIZER, 0).batch(1, 768, 4096)
    width, several = batch.context.shape[1], False
    for row in range(len(batch.names)):
        said = TOKENIZER.decode(batch.labels[row][batch.labels[row] != IGNORED]).split("<end>")[:-1]
        assert said
        document = TOKENIZER.decode(batch.context[row])
        if batch.names[row] in ("lines", "kv"):
            assert all(reply.strip('>". ') in document for reply in said)  # it can be looked up
        length = int((batch.context[row] != TOKENIZER.pad_token_id).sum())
        seen = batch.visible(batch.every)[row, 0]
        real = batch.labels[row] != IGNORED
        assert bool(seen[real][:, :length].all())
        assert not bool(seen[real][:, length:width].any())
        of = {TASK_NAMES[task] for task in batch.tasks[row][real].tolist()}
        assert of <= {batch.names[row]} | ALSO_HIDDEN.keys()
        several |= len(of) > 1
        starts = (batch.positions[row] == length).long()
        owner = starts.cumsum(0)  # each question begins at the position right behind the document
        assert len(said) == int(owner.max())
        asked = batch.positions[row] >= length
        among = seen[:, width:][asked][:, asked]
        same = owner[asked][:, None] == owner[asked]
        assert torch.equal(among, same.tril())
    assert several, "one text has questions of several tasks"
    rows, at = batch.prose.unbind(1)  # of texts that hide something; there is a next token, and it is no padding
    assert {batch.names[row] for row in rows.tolist()} <= {name for name in batch.names if TASKS[name].hides}
    assert len(rows) == PROSE
    assert bool((batch.context[rows, at + 1] != TOKENIZER.pad_token_id).all())


def test_questions_read_together_are_answered_as_if_read_alone():
    model = new_model(layers=3)
    documents = Documents(TOKENIZER, 0)
    batch = documents.batch(2, 256, 768)
    with torch.no_grad():
        logits, places = read(model, batch).replies, batch.labels != IGNORED
        together = torch.zeros(*places.shape, logits.shape[-1])
        together[places] = logits
        for row in range(len(batch.names)):
            length = int((batch.context[row] != TOKENIZER.pad_token_id).sum())
            starts = (batch.positions[row] == length).nonzero()[:, 0].tolist()
            stop = int((batch.positions[row] > 0).sum())
            for start, end in zip(starts, [*starts[1:], stop], strict=True):
                ids = torch.cat([batch.context[row, :length], batch.asked[row, start:end]])[None]
                alone = model(ids).logits[0, length:]
                where = places[row, start:end]
                torch.testing.assert_close(together[row, start:end][where], alone[where], rtol=1e-3, atol=1e-3)


def agreement(hand, document, place):
    """How many tokens before this place of a document are those at hand, by hand; the last one at hand comes first."""
    count = 0
    while count < min(REACH, len(hand), place) and document[place - 1 - count] == hand[count]:
        count += 1
    return count


def test_heads_are_to_look_where_what_is_at_hand_stands_too():
    tasks = {"kv": 1, "niah_multivalue": 3, "niah_single_uuid": 1}
    batch = Documents(TOKENIZER, 0).batch(5, 700, 4200, tasks)
    wanted, kinds = looks(batch), Counter()
    for row in range(len(batch.names)):
        replies = (batch.labels[row] != IGNORED).nonzero()[:, 0].tolist()
        assert wanted.at[row, : len(replies)].tolist() == replies
        assert not wanted.follow[row, len(replies) :].any()
        assert not wanted.choose[row, len(replies) :].any()
        for number, at in enumerate(replies):
            label, follow = int(batch.labels[row, at]), wanted.follow[row, number].nonzero()[:, 0].tolist()
            [chosen] = wanted.choose[row, number].nonzero()[:, 0].tolist()
            document = batch.context[row, : int(batch.lengths[row])].tolist()
            begin = int((batch.owner[row] == batch.owner[row, at]).nonzero()[0, 0])
            hand = batch.asked[row, begin : at + 1].tolist()[::-1]
            agrees = [agreement(hand, document, place) for place in range(len(document))]
            best = [place for place, count in enumerate(agrees) if count == max(agrees) > 1]
            if chosen:
                assert document[chosen] == label
                assert chosen in follow
                assert len({document[place] for place in follow}) == len(follow) > 1
                assert not wanted.rests[row, number]
            elif len(best) == 1 and document[best[0]] == label:
                assert follow == best
            else:
                assert not follow
            kinds["choice" if chosen else "found" if follow else "none"] += 1
    assert min(kinds[kind] for kind in ("choice", "found", "none")) > 10, kinds


def test_the_shipped_model_looks_there():
    model, _ = load_embedded(torch.float32)
    right, alike = Counter(), list[Tensor]()
    for step in range(2):
        batch = Documents(TOKENIZER, 99).batch(step, 1000, 4000, {"kv": 1, "niah_multivalue": 1})
        with torch.no_grad():
            found, wanted = read(model, batch), looks(batch)
            for head, places in ((FOLLOWING, wanted.follow), (CHOOSING, wanted.choose)):
                attention = look_scores(model, batch, found, wanted.at, *head).softmax(-1)[..., : places.shape[-1]]
                matters = places.any(-1) & ~wanted.rests if head == CHOOSING else places.any(-1)
                if head == FOLLOWING:
                    several = places[places.sum(-1) > 1]
                    least = attention.amin(2)[places.sum(-1) > 1].where(several, 1).amin(-1)
                    alike.append(least * several.sum(-1))
                there = (attention * places[:, :, None]).sum(-1)[matters]
                right[head], right[head, "all"] = right[head] + (there > 0.5).sum(), right[head, "all"] + there.numel()
    assert torch.cat(alike).median() > 0.5, "of several values all are looked at alike"
    for head, least in ((FOLLOWING, 0.98), (CHOOSING, 0.95)):
        assert right[head, "all"] > 50
        assert right[head] > least * right[head, "all"], right


def test_what_is_trained_on_a_gpu_is_the_same_loss():
    """There every head has keys of its own."""
    model, batch = new_model(layers=3), Documents(TOKENIZER, 0).batch(2, 256, 768)
    losses = []
    AttentionInterface.register(FUSED, attend)
    for kind in ("sdpa", FUSED):
        model.set_attn_implementation(kind)
        losses.append(loss_of(model, batch, read(model, batch)).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def running(process):
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())  # none if it has ended and nobody asked
    except FileNotFoundError:
        return False


AHEAD = """
import dataclasses

from kvsketch.evaluation.embedded.training.ahead import Ahead, Wanted

if __name__ == "__main__":
    wanted = [Wanted(0, 200, 400, False), Wanted(1, 600, 700, True)]
    with Ahead(4, [], processes=1) as ahead:
        ahead.batches(wanted[:1], wanted[1:])
        [found] = ahead.batches(wanted[1:], wanted[:1])  # longer ones by now: what was begun, and something else
        assert set(ahead.begun) == {wanted[0]}
        expected = wanted[1].made(ahead.documents)
        assert found.names == expected.names
        for field in dataclasses.fields(expected)[1:]:
            assert getattr(found, field.name).equal(getattr(expected, field.name)), field.name
        print(*ahead.pool._processes, flush=True)
        input()
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="a system without /proc does not show its processes"
)
def test_batches_that_are_made_ahead_are_those_that_are_made_here(tmp_path):
    """And one that is killed leaves no process behind."""
    (tmp_path / "ahead.py").write_text(AHEAD)
    command = [sys.executable, tmp_path / "ahead.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as made:
        process = int(made.stdout.readline())
        assert running(process)
        made.kill()
    deadline = time.monotonic() + 20
    while running(process):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_rate_warms_up_stays_and_falls():
    recipe = Recipe(tokens=1000)
    assert recipe.rate_at(1, 0) == recipe.rate / recipe.warm_up
    assert recipe.rate_at(100, 100) == recipe.rate
    assert recipe.rate_at(100, 600) == pytest.approx((recipe.rate + recipe.last_rate) / 2)
    assert recipe.rate_at(100, 999.999) == pytest.approx(recipe.last_rate)
    assert recipe.all_tokens == 1333
    assert recipe.rate_at(100, 1000) == recipe.finish_rate
    assert recipe.rate_at(100, 1333) == pytest.approx(recipe.last_rate)
    assert Recipe(tokens=1000, finish=0.0).all_tokens == 1000
    assert Recipe.on("cuda", seed=1) == Recipe(tokens=54_000_000, batch=16_384, finish=0.8, seed=1)
    assert Recipe.on("cpu", seed=0, tokens=5) == Recipe(tokens=5)
    with pytest.raises(ValueError, match="tokens must be positive, got 0"):
        Recipe(tokens=0)
    for wrong in ({"finish": -1.0}, {"decay_from": 1.0}):
        with pytest.raises(ValueError, match="finish must not be negative and decay_from from 0 to below 1, got"):
            Recipe(**wrong)


def test_documents_get_longer_when_they_are_solved_or_their_time_is_up():
    recipe = Recipe(tokens=1_000_000)
    solved = dict.fromkeys(WATCHED, 1.0)
    progress = Progress(accuracy=solved).after(1, solved, recipe)
    assert (progress.stage, progress.step) == (1, 1)
    assert all(progress.accuracy[name] < SOLVED for name in WATCHED)  # to be earned again
    assert Progress(accuracy={}).after(1, {}, recipe).stage == 0
    assert Progress(accuracy={}).after(50_000, {}, recipe).stage == 1
    assert Progress(accuracy={}, stage=len(LENGTHS) - 1).after(10**6, solved, recipe).stage == len(LENGTHS) - 1
    for tokens, stage in ((199_999, 3), (200_000, 4)):  # long ones not before their time, however well it goes
        assert Progress(accuracy=solved, stage=3).after(tokens, solved, recipe).stage == stage


def test_the_end_is_of_what_is_hardest_at_several_lengths():
    documents, recipe = Documents(TOKENIZER, 0), Recipe(tokens=1000)

    def batches_at(progress):
        return [wanted.made(documents) for wanted in _wanted(recipe, progress)]

    found = [
        batch
        for step in range(3)
        for progress in [Progress(step=step, tokens=1000, stage=1, accuracy={})]
        for batch in batches_at(progress)
    ]
    assert {name for batch in found for name in batch.names} <= set(FINISHED_WITH) < set(SHARES)
    assert all(any(abs(batch.context.shape[1] / n - 1) < 0.4 for n in FINISHED_AT) for batch in found)
    assert len({min(FINISHED_AT, key=lambda n: abs(n - batch.context.shape[1])) for batch in found}) > 1
    progress = Progress(tokens=999, stage=1, accuracy={})
    before = batches_at(progress)
    assert all(batch.context.shape[1] < 0.5 * FINISHED_AT[0] for batch in before)


@pytest.mark.slow
def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    module = importlib.import_module("kvsketch.evaluation.embedded.training.train")
    monkeypatch.setattr(module, "FINISHED_AT", (250, 350))  # long documents would take most of the time
    recipe = Recipe(**SMALL)
    steps = []
    whole = train(tmp_path / "whole", recipe, show=steps.append)
    first = 1 + next(progress.step for progress in steps if recipe.finishes(progress.tokens))  # step of the finish
    assert 2 < first < steps[-1].step

    parts = tmp_path / "parts"
    # Before the finish, in its second step with the first one saved, and so again with nothing more saved.
    for last, save_every in ((2, 0.0), (first + 1, 0.0), (first + 1, 1e9)):

        def stop(progress, last=last):
            if progress.step == last:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(parts, recipe, save_every=save_every, show=stop)
    (parts / f"{UNFINISHED}left").write_text("what a killed run wrote of a checkpoint")
    train(parts, recipe)
    assert {path.name for path in parts.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}
    weights, again = (load_file(folder / "model.safetensors") for folder in (whole, parts / "model"))
    assert weights.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())
    texts = [(folder / "log.jsonl").read_text() for folder in (tmp_path / "whole", parts)]
    logs = [[json.loads(line) for line in text.splitlines()] for text in texts]
    assert logs[0] == logs[1]
    assert [row["step"] for row in logs[0]] == list(range(1, len(logs[0]) + 1))
    assert len(list(parts.glob("*.safetensors"))) == 1  # old checkpoints are gone
    [checkpoint] = parts.glob("*.safetensors")
    write_tensors(checkpoint, load_file(checkpoint) | {"first.x": torch.zeros(1)}, {})
    train(parts, recipe)  # there is nothing left to do, and what is not known is left alone
    write_tensors(checkpoint, {"first.x": torch.zeros(1)}, {})
    with pytest.raises(ValueError, match=r"no checkpoint that this version .* go on from: model\..* is missing"):
        train(parts, recipe)
    with pytest.raises(ValueError, match="holds a run with other settings"):
        train(parts, Recipe(**SMALL | {"tokens": 9_000}))
    with pytest.raises(ValueError, match=r"holds a run with other haystacks, \[\], now \['noise'\]"):
        train(parts, recipe, haystacks=[Sentences()])
    state = read_json(parts / "state.json")
    write_json(parts / "state.json", state | {"beginnings": "0"})
    with pytest.raises(ValueError, match=r"other beginnings, 0, now .*; another kvsketch, .* began it: go on"):
        train(parts, recipe)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "log.jsonl").write_text("precious")
    with pytest.raises(ValueError, match="has files in it, and none of a training run"):
        train(tmp_path / "mine", recipe)
    assert (tmp_path / "mine" / "log.jsonl").read_text() == "precious"


@pytest.mark.slow
def test_training_teaches(tmp_path):
    """20 steps on short documents: replies that were not known before are known."""
    documents = Documents(TOKENIZER, 0)
    model = new_model(layers=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(20):
        batch = documents.batch(step, 192, 512)
        found = read(model, batch)
        optimizer.zero_grad()
        loss_of(model, batch, found).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(F.cross_entropy(found.replies, batch.labels[batch.labels != IGNORED]).item())
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
