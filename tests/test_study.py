"""A model writes questions about a text; a prompt is then read for them."""

from itertools import pairwise

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import kvsketch
from states import difference, state_of

RHYME = [
    "1.",
    "who",
    "came?\n2.",
    "and",
    "no",
    "more.\n3.",
    "where",
    "to?\n4.",
    "Who",
    "came?\n5.",
    "when",
    "was",
    "it?\n",
]
ANSWERED = ["<a>", "came?\n", "to?\n", "it?\n"]  # an answer comes behind each of these
OTHERS = ["text:\n1.", "<u>", "</u>", "\n\nwho", "\n\nwhere", "\n\nwhen", "came?", "to?", "it?", "yes", "he\n"]
WORDS = ["<unk>", *dict.fromkeys([*RHYME, *ANSWERED, *OTHERS, *(f"w{i}" for i in range(20))])]
FOLLOWS = dict(pairwise(RHYME)) | {"text:\n1.": "who", "yes": "he\n"} | dict.fromkeys(ANSWERED, "yes")
TEMPLATE = (
    "{% for m in messages %}<u> {{ m['content'] }} </u> {% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
)
QUESTIONS = ["who came?", "where to?", "when was it?"]
TEXT = " ".join(f"w{i % 20}" for i in range(300))


@pytest.fixture(scope="module")
def writer():
    """A model that goes from each word to the next one of a rhyme, and its tokenizer, which knows words."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" +"), "removed")
    size = len(vocabulary) + len(vocabulary) % 2
    config = LlamaConfig(
        vocab_size=size, hidden_size=2 * size, intermediate_size=4, num_hidden_layers=2, num_attention_heads=2,
        head_dim=8, max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name or "lm_head" in name:
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, 2 * size))
        for word, after in FOLLOWS.items():
            model.lm_head.weight[vocabulary[after], vocabulary[word]] = 1
    return model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<unk>")


def ids_of(tokenizer, text):
    return tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("raw", [False, True])
def test_questions_are_what_the_model_writes_and_how_a_prompt_goes_on_with_an_answer(writer, raw):
    model, tokenizer = writer
    tokenizer.chat_template, heard = TEMPLATE, []
    questions = kvsketch.study(model, tokenizer, TEXT, count=8, raw=raw, progress=heard.append)
    assert list(questions) == QUESTIONS, "no numbers, none twice, and no line that asks nothing"
    assert heard == [150, 300]
    for question, ids in questions.items():
        behind = "\n" if raw else " </u> <a> "
        assert tokenizer.decode(ids[0]) == tokenizer.decode(ids_of(tokenizer, f"\n\n{question}{behind} yes he\n")[0])
        assert 0 not in ids, "words that are known"
    assert list(kvsketch.study(model, tokenizer, TEXT, count=3, raw=raw)) == QUESTIONS[:2]
    prompt, caches = ids_of(tokenizer, TEXT), []
    for given in (questions, list(questions.values())):
        caches.append(kvsketch.make_cache(model, "kvzip(keep=0.25, queries='questions')", questions=given))
        kvsketch.prefill(model, prompt, caches[-1])
    again = kvsketch.study(model, tokenizer, TEXT, count=8, raw=raw)
    assert again.keys() == questions.keys(), "the model is attached by now"
    assert difference(*map(state_of, caches)) is None


def test_pieces_fit_into_the_context_and_are_asked_evenly(writer):
    model, tokenizer = writer
    tokenizer.chat_template, read = None, []
    text = " ".join(f"w{i % 20}" for i in range(1500))
    hook = model.register_forward_pre_hook(lambda _, args, given: read.append(given["input_ids"]), with_kwargs=True)
    kvsketch.study(model, tokenizer, text, count=2)
    hook.remove()
    prompts, every = [ids for ids in read if ids.shape[1] > 1], ids_of(tokenizer, text)
    assert max(ids.shape[1] for ids in prompts) + 48 <= 512
    for ids, start in zip(prompts, (375, 375, 1125), strict=True):  # two of four pieces; the same is asked of both
        assert torch.equal(ids[:, :370], every[:, start : start + 370])


@pytest.mark.usefixtures("as_users_run_it")
def test_what_cannot_be_studied(writer):
    model, tokenizer = writer
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template: there is nothing to split"):
        kvsketch.split_prompt(tokenizer, TEXT, "who?")
    with pytest.raises(ValueError, match="needs the model's tokenizer, got NoneType"):
        kvsketch.study(model, None, TEXT)
    for given, message in (
        ({"text": tokenizer(TEXT, return_tensors="pt")["input_ids"]}, "the text itself, as a str.*got Tensor"),
        ({"text": " \n"}, "the text is empty: there is nothing to ask about"),
        ({"count": 0}, "count must be a whole number of at least 1, got 0"),
        (
            {"count": 30},
            "a piece of the text and the questions about it have [0-9]+ tokens, and the context.*Fewer questions need",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            kvsketch.study(model, tokenizer, **{"text": TEXT} | given)
    with pytest.raises(ValueError, match="wrote no question about this text: give make_cache questions of your own"):
        kvsketch.study(zeros(model), tokenizer, TEXT, count=2)
    model.train()
    with pytest.raises(ValueError, match=r"is in training: call model.eval\(\) first"):
        kvsketch.study(model, tokenizer, TEXT)
    model.eval()


def zeros(model):
    """A model that writes the same unknown word for ever."""
    return LlamaForCausalLM(model.config).eval().apply(lambda part: [p.data.zero_() for p in part.parameters()])
