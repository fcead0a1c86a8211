"""How the embedded model is made."""

import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from kvsketch.evaluation.embedded.training.documents import IGNORED, SHARES, Documents
from kvsketch.evaluation.embedded.training.recipe import LENGTHS, SOLVED, WATCHED, Progress, Recipe
from kvsketch.evaluation.embedded.training.start import Shape, start_model
from kvsketch.evaluation.embedded.training.tokenizer import build_tokenizer
from kvsketch.evaluation.embedded.training.train import reply_logits, train
from kvsketch.evaluation.tasks import TASKS
from kvsketch.files import write_tensors

TOKENIZER = build_tokenizer()
SMALL = {"tokens": 3_500, "batch": 512}


def new_model(**shape):
    special = {"begin": TOKENIZER.bos_token_id, "end": TOKENIZER.eos_token_id, "pad": TOKENIZER.pad_token_id}
    return start_model(len(TOKENIZER), shape=Shape(**shape), **special)


@given(st.text())
def test_any_text_survives_the_tokenizer(text):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n", "<end> is text", "a\u2063b", "naïve 日本語 ☃ 👩‍🚀", "x\r\ny\tz", "3.14159 -foo"]
)
def test_odd_texts_survive_the_tokenizer(text):
    assert TOKENIZER.decode(TOKENIZER(text, add_special_tokens=False)["input_ids"]) == text


def test_a_line_and_the_question_on_it_are_laid_out_alike():
    tokens = TOKENIZER.tokenize("line bold-otter: REGISTER_CONTENT is <12345>\n")
    assert tokens == ["line", "Ġbold", "-otter", ":ĠREGISTER_CONTENTĠisĠ<", "123", "45", ">Ċ"]
    assert TOKENIZER.tokenize(" line bold-otter? I need the number. ")[-3:] == [
        "Ġbold",
        "-otter",
        "?ĠIĠneedĠtheĠnumber.Ġ",
    ]


def test_the_tokenizer_is_the_same_every_time():
    assert build_tokenizer().backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()


def test_layer_0_starts_by_looking_back_one_more_token_in_every_head():
    model = new_model()
    model.set_attn_implementation("eager")
    ids = torch.randint(300, 2000, (1, 60), generator=torch.Generator().manual_seed(0))
    attention = model(ids, output_attentions=True).attentions[0][0]
    for head in range(Shape().heads):
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
    assert {name.split()[0] for name in SHARES} == {name for name in TASKS if "uuid" not in name}
    for name in SHARES:
        for length in (512, 2048):
            tokens = len(documents._ids(documents._sample(_draw(name), name, length).context, special=True))
            assert 0.25 * length < tokens < 1.3 * length, name  # short lists of common words are far shorter


def _draw(seed):
    import random

    return random.Random(seed)


def test_labels_are_the_replies_and_each_question_sees_only_its_document_and_itself():
    batch = Documents(TOKENIZER, 0).batch(1, 256, 1024)
    width = batch.context.shape[1]
    for row in range(len(batch.names)):
        said = TOKENIZER.decode(batch.labels[row][batch.labels[row] != IGNORED]).split("<end>")[:-1]
        assert said
        document = TOKENIZER.decode(batch.context[row])
        if batch.names[row].split()[0] in ("lines", "kv", "passkey", "needle", "niah_single", "number_string"):
            assert all(reply.rstrip('>".') in document for reply in said)  # it can be looked up
        length = int((batch.context[row] != TOKENIZER.pad_token_id).sum())
        seen = batch.visible[row, 0]
        real = batch.labels[row] != IGNORED
        assert bool(seen[real][:, :length].all())
        assert not bool(seen[real][:, length:width].any())
        starts = (batch.positions[row] == length).long()
        owner = starts.cumsum(0)  # each question begins at the position right behind the document
        assert len(said) == int(owner.max())
        asked = batch.positions[row] >= length
        among = seen[:, width:][asked][:, asked]
        same = owner[asked][:, None] == owner[asked]
        assert torch.equal(among, same.tril())


def test_questions_read_together_are_answered_as_if_read_alone():
    model = new_model(layers=2)
    documents = Documents(TOKENIZER, 0)
    batch = documents.batch(2, 256, 768)
    with torch.no_grad():
        logits, places = reply_logits(model, batch)
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


def test_the_rate_warms_up_stays_and_falls():
    recipe = Recipe(tokens=1000)
    assert recipe.rate_at(1, 0) == recipe.rate / recipe.warm_up
    assert recipe.rate_at(100, 400) == recipe.rate
    assert recipe.rate_at(100, 750) == pytest.approx((recipe.rate + recipe.last_rate) / 2)
    assert recipe.rate_at(100, 1000) == pytest.approx(recipe.last_rate)
    with pytest.raises(ValueError, match="tokens must be positive, got 0"):
        Recipe(tokens=0)


def test_documents_get_longer_when_they_are_solved_or_their_time_is_up():
    recipe = Recipe(tokens=1_000_000)
    solved = dict.fromkeys(WATCHED, 1.0)
    progress = Progress(accuracy=solved).after(1, solved, recipe)
    assert (progress.stage, progress.step) == (1, 1)
    assert all(progress.accuracy[name] < SOLVED for name in WATCHED)  # to be earned again
    assert Progress(accuracy={}).after(1, {}, recipe).stage == 0
    assert Progress(accuracy={}).after(50_000, {}, recipe).stage == 1
    assert Progress(accuracy={}, stage=len(LENGTHS) - 1).after(10**6, solved, recipe).stage == len(LENGTHS) - 1


@pytest.mark.slow
def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path):
    recipe = Recipe(**SMALL)
    whole = train(tmp_path / "whole", recipe)

    def stop(progress):
        if progress.step in (2, 5):
            raise KeyboardInterrupt

    parts = tmp_path / "parts"
    for save_every in (0.0, 1e9):  # the second run dies with steps that were not saved
        with pytest.raises(KeyboardInterrupt):
            train(parts, recipe, save_every=save_every, show=stop)
    train(parts, recipe)
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
    with pytest.raises(ValueError, match="holds a run with another recipe"):
        train(parts, Recipe(tokens=9_000, batch=512))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "log.jsonl").write_text("precious")
    with pytest.raises(ValueError, match="has files in it, and none of a training run"):
        train(tmp_path / "mine", recipe)
    assert (tmp_path / "mine" / "log.jsonl").read_text() == "precious"


@pytest.mark.slow
def test_training_teaches(tmp_path):
    """28 steps on short documents: what was not known before is known."""
    documents = Documents(TOKENIZER, 0)
    model = new_model(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(28):
        batch = documents.batch(step, 128, 1024)
        logits, places = reply_logits(model, batch)
        loss = F.cross_entropy(logits, batch.labels[places])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
