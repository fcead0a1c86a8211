"""RULER's needles, variable tracking, common words and frequent words.

Templates, counts and scoring follow the official generators; but every sample draws its own permutation, while the
official generators shuffle all samples of a length in the same way.
"""

import math
import random
import string
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from kvsketch.evaluation.tasks.base import Question, Sample, Setting, Task, random_uuid, spread
from kvsketch.evaluation.tasks.scoring import all_contained
from kvsketch.evaluation.tasks.words import ADJECTIVES, NOUNS, distinct, invented_word, names

NEEDLES = 4  # number of keys, values or queries, in the tasks that have several
HOPS = 4
OFFICIAL_NEEDLE = "One of the special magic {kind}s for {title} is: {value}."
COMPACT_NEEDLE = "The magic {kind} of {title} is {value}."
COMMON, FREQUENT = 10, 3
EXAMPLE_PIECES = 10  # pieces of haystack in the worked example of variable tracking
RULER_LONG = 4096  # from so many tokens on, words of the lists come 30 and 3 times instead of 6 and 1
ZETA_OF_2 = math.pi**2 / 6
FEWEST_CODED = 80  # words: enough that the fourth most frequent is more frequent than the fifth


def needles(
    draw: random.Random,
    setting: Setting,
    *,
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    dense: bool = False,
    uuids: bool = False,
) -> Sample:
    """Numbers with names, hidden in `size` pieces of a haystack; or, if dense, a haystack made of `size` needles."""
    number = random_uuid if uuids else _number
    titles = [random_uuid(draw) for _ in range(setting.size)] if dense and uuids else []
    titles = titles or names(draw, setting.size if dense else keys, setting.invented)
    numbers = {title: [number(draw) for _ in range(values)] for title in titles}
    kind = "uuid" if uuids else "number"
    official = setting.wording == "official"
    form = OFFICIAL_NEEDLE if official else COMPACT_NEEDLE
    pairs = [(title, value) for title, found in numbers.items() for value in found]
    sentences = [form.format(kind=kind, title=title, value=value) for title, value in pairs]
    if dense:
        pieces, depths = sentences, [i / max(1, len(sentences) - 1) for i in range(len(sentences))]
    else:
        pieces, depths = spread(draw, setting.haystack.pieces(draw, setting.size), sentences, setting.depth)
    depth = dict(zip(pairs, depths, strict=True))
    asked = draw.sample(titles, len(titles))
    groups = [asked[i : i + queries] for i in range(0, len(asked) - queries + 1, queries)]
    one = queries * values == 1
    context = (_ruler_introduction(kind, one) if official else "A text:\n") + setting.haystack.joint.join(pieces)
    ask = _ruler_question if official else _compact_question
    questions = []
    for group in groups[: setting.questions]:
        answers = [(title, value) for title in group for value in sorted(numbers[title], key=context.index)]
        text, opening, reply = ask(kind, group, answers)
        questions.append(Question(text, tuple(v for _, v in answers), reply, depth[answers[0]], opening))
    return Sample(context, tuple(questions))


def _ruler_introduction(kind: str, one: bool) -> str:
    opening = f"A special magic {kind} is" if one else f"Some special magic {kind}s are"
    afterwards = kind if one else f"{kind}s"
    return (
        f"{opening} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {afterwards} afterwards.\n"
    )


def _ruler_question(kind: str, titles: list[str], answers: list[tuple[str, str]]) -> tuple[str, str, str]:
    """The question, the opening of the answer, and the rest of the answer."""
    query = titles[0] if len(titles) == 1 else f"{', '.join(titles[:-1])}, and {titles[-1]}"
    what, verb = (f"the special magic {kind}", "is") if len(answers) == 1 else (f"all the special magic {kind}s", "are")
    kinds = kind if len(answers) == 1 else f"{kind}s"
    reply = answers[0][1] if len(answers) == 1 else _listed(titles, answers, " is:")
    return (
        f"\nWhat {verb} {what} for {query} mentioned in the provided text?",
        f" The special magic {kinds} for {query} mentioned in the provided text {verb}",
        f" {reply}.",
    )


def _compact_question(kind: str, titles: list[str], answers: list[tuple[str, str]]) -> tuple[str, str, str]:
    if len(answers) == 1:
        what = f"he magic {kind} of {titles[0]}"
        return f"\nWhat is t{what}?", f" T{what} is ", f"{answers[0][1]}."
    what, reply = f"he magic {kind}s of", f" {_listed(titles, answers, ' is')}."
    if len(titles) == 1:
        return f"\nWhat are all t{what} {titles[0]}?", f" T{what} {titles[0]} are", reply
    return f"\nWhat are t{what} {', '.join(titles)}?", f" T{what}", reply


def _listed(titles: list[str], answers: list[tuple[str, str]], verb: str) -> str:
    """Each answer after its name, so that it can be looked up alone; with its place if all share a name."""
    places = [f"({i}) " if len(titles) == 1 else "" for i, _ in enumerate(answers, 1)]
    return ", ".join(f"{place}{title}{verb} {value}" for place, (title, value) in zip(places, answers, strict=True))


def _number(draw: random.Random) -> str:
    return str(draw.randint(1_000_000, 9_999_999))


def variable_tracking(draw: random.Random, setting: Setting) -> Sample:
    """A chain of assignments in the haystack: which variables have the value at its start?"""
    if setting.wording == "official":
        chain, value, example, _ = _hidden_chain(draw, setting, EXAMPLE_PIECES, letters=3)
        worked = "".join(_ruler_chain(example, chain, value)) + f"{' '.join(chain)}\n\n"
        chain, value, body, depth = _hidden_chain(draw, setting, setting.size, letters=5)
        context, text, opening = _ruler_chain(body, chain, value)
        reply = f"{' '.join(chain)}."
        return Sample(worked + context, (Question(text, tuple(chain), reply, depth, opening),))
    chain, value, body, depth = _hidden_chain(draw, setting, setting.size, letters=0)
    text, reply = f"\nWhich variables are {value}?", f" {' '.join(chain)}."
    return Sample(f"A text:\n{body}", (Question(text, tuple(chain), reply, depth, " They are"),))


def _hidden_chain(draw: random.Random, setting: Setting, count: int, letters: int) -> tuple[list[str], str, str, float]:
    """The variables in their order, their value, the text that hides them, and the depth of the first."""
    lines, chain, value = _chain(draw, letters)
    haystack = setting.haystack.pieces(draw, count)
    places = sorted(draw.randint(0, len(haystack)) for _ in lines)  # sorted, so that the chain stays in order
    pieces = list[str]()
    for i, line in enumerate(lines):
        pieces += [*haystack[places[i - 1] if i else 0 : places[i]], line]
    body = setting.haystack.joint.join(pieces + haystack[places[-1] :])
    return chain, value, body, places[0] / max(1, len(haystack))


def _chain(draw: random.Random, letters: int) -> tuple[list[str], list[str], str]:
    """Assignments, the variables in order, and their value; names have `letters` capitals, or are words if it is 0."""
    value = str(draw.randint(10_000, 99_999))
    order = distinct(
        lambda: "".join(draw.choices(string.ascii_uppercase, k=letters)) if letters else draw.choice(ADJECTIVES),
        HOPS + 1,
    )
    return (
        [f"VAR {order[0]} = {value}"] + [f"VAR {b} = VAR {a} " for a, b in pairwise(order)],
        order,
        value,
    )


def _ruler_chain(body: str, chain: list[str], value: str) -> tuple[str, str, str]:
    """Context, question and the answer's opening."""
    # "assgined" is spelled so in the official prompt
    return (
        f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{body}",
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above.",
        f" Answer: According to the chain(s) of variable assignment in the text above, {len(chain)} variables are "
        f"assgined the value {value}, they are: ",
    )


def common_words(draw: random.Random, setting: Setting) -> Sample:
    """Ten words come often and `size` others seldom; which are the ten?"""
    if setting.wording == "compact":
        often, seldom = (30, 3) if setting.size >= 100 else (6, 1)
        words, asked = _shuffled_words(draw, setting.size, often, seldom)
        reply = f" {' '.join(sorted(asked))}."
        return Sample(f"Words: {' '.join(words)}.", (Question("\nThe most common words are", tuple(asked), reply),))
    if (setting.length or RULER_LONG) < RULER_LONG:
        example, common = _numbered_words(draw, 10, 3, 1)
        listed, asked = _numbered_words(draw, setting.size, 6, 1)
    else:
        example, common = _numbered_words(draw, 30, 10, 3)
        listed, asked = _numbered_words(draw, setting.size, 30, 3)
    before = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    ask = "\nQuestion: What are the 10 most common words in the above list?"
    opening = " Answer: The top 10 words that appear most often in the list are:"
    context = f"{before}{example}{ask}{opening} {_enumerate(common)}\n\n{before}{listed}"
    return Sample(context, (Question(ask, tuple(asked), f" {_enumerate(asked)}", opening=opening),))


def _shuffled_words(draw: random.Random, others: int, often: int, seldom: int) -> tuple[list[str], list[str]]:
    bank = list(ADJECTIVES) + ([noun for noun in NOUNS if noun not in ADJECTIVES] if others > 800 else [])
    if others + COMMON > len(bank):
        bank += list({invented_word(draw): None for _ in range(2 * others)})
    chosen = draw.sample(list(dict.fromkeys(bank)), others + COMMON)
    words = chosen[:COMMON] * often + chosen[COMMON:] * seldom
    draw.shuffle(words)
    return words, chosen[:COMMON]


def _numbered_words(draw: random.Random, others: int, often: int, seldom: int) -> tuple[str, list[str]]:
    words, asked = _shuffled_words(draw, others, often, seldom)
    return _enumerate(words), asked


def _enumerate(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def frequent_words(draw: random.Random, setting: Setting) -> Sample:
    """Words, the k-th most frequent with weight k⁻²; the most frequent is shown as dots. Which are the next three?"""
    fewest = FEWEST_CODED if setting.wording == "official" else 30
    if setting.size < fewest:
        raise ValueError(f"fwe needs at least {fewest} words to have three frequent ones, got {setting.size}")
    if setting.wording == "compact":
        return _frequent_words_compact(draw, setting.size)
    ranks = range(1, max(setting.length or setting.size, 500) // 50 + FREQUENT + 2)
    codes = distinct(lambda: "".join(draw.choices(string.ascii_lowercase, k=6)), len(ranks))
    codes[0] = "..."
    text = [
        code for code, rank in zip(codes, ranks, strict=True) for _ in range(int(setting.size / rank**2 / ZETA_OF_2))
    ]
    draw.shuffle(text)
    context = (
        "Read the following coded text and track the frequency of each coded word. "
        f"Find the three most frequently appeared coded words. {' '.join(text)}"
    )
    ask = (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text?"
    )
    opening = " Answer: According to the coded text above, the three most frequently appeared words are:"
    asked = codes[1 : FREQUENT + 1]
    return Sample(context, (Question(ask, tuple(asked), f" {' '.join(asked)}.", opening=opening),))


def _frequent_words_compact(draw: random.Random, size: int) -> Sample:
    """The counts are drawn too, until the three words and their order are unambiguous."""
    kinds = max(FREQUENT + 2, min(size // 50, 200) + FREQUENT + 2)
    words = distinct(partial(draw.choice, ADJECTIVES), kinds)
    weights = [(rank + 1) ** -2.0 for rank in range(kinds)]
    while True:
        text = draw.choices(words, weights, k=size)
        counts = Counter(text)
        ranked = sorted(words, key=lambda word: -counts[word])
        ahead = [counts[better] - counts[worse] for better, worse in pairwise(ranked)]
        if min(ahead[: FREQUENT + 1]) > 0:
            break
    body = " ".join("..." if word == ranked[0] else word for word in text)
    asked = ranked[1 : FREQUENT + 1]
    return Sample(f"Code: {body}.", (Question("\nThe most frequent words are", tuple(asked), f" {' '.join(asked)}."),))


def _needle_task(name: str, **options: int | bool) -> Task:
    make: Callable[[random.Random, Setting], Sample] = partial(needles, **options)  # type: ignore[arg-type]
    return Task(
        name=name,
        suite="ruler",
        dense=bool(options.get("dense")),
        make=make,
        score=all_contained,
        new_tokens=128,
        takes_depth=name.startswith("niah_single"),
        hides=not options.get("dense"),
    )


TASKS = (
    _needle_task("niah_single"),
    _needle_task("niah_single_uuid", uuids=True),
    _needle_task("niah_multikey", keys=NEEDLES),
    _needle_task("niah_multikey_dense", dense=True),
    _needle_task("niah_multikey_uuid", dense=True, uuids=True),
    _needle_task("niah_multivalue", values=NEEDLES),
    _needle_task("niah_multiquery", keys=NEEDLES, queries=NEEDLES),
    Task(name="vt", suite="ruler", dense=False, make=variable_tracking, score=all_contained, new_tokens=30, hides=True),
    Task(name="cwe", suite="ruler", dense=False, make=common_words, score=all_contained, new_tokens=120),
    Task(
        name="fwe",
        suite="ruler",
        dense=False,
        make=frequent_words,
        score=all_contained,
        new_tokens=50,
        smallest=FEWEST_CODED,
    ),
)
