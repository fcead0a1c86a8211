"""RULER's needles, variable tracking, common words and frequent words.

Templates, counts and scoring follow the official generators; every sample draws its own permutation, where the official
ones shuffle all samples of a length alike.
"""

import random
import string
import uuid
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from kvsketch.evaluation.scoring import all_contained
from kvsketch.evaluation.tasks.base import Question, Sample, Setting, Task, spread
from kvsketch.evaluation.words import ADJECTIVES, NOUNS, invented_word, names

NEEDLES = 4  # keys, values or queries of the tasks that have several
HOPS = 4
COMMON, FREQUENT = 10, 3


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
    """Numbers under names, hidden in `size` pieces of a haystack; or, if dense, a haystack of `size` needles."""
    number = _uuid if uuids else _number
    titles = [_uuid(draw) for _ in range(setting.size)] if dense and uuids else []
    titles = titles or names(draw, setting.size if dense else keys, setting.invented)
    held = {title: [number(draw) for _ in range(values)] for title in titles}
    kind = "uuid" if uuids else "number"
    official = setting.wording == "official"
    fact = (
        "One of the special magic {kind}s for {title} is: {value}."
        if official
        else "The magic {kind} of {title} is {value}."
    )
    pairs = [(title, value) for title, found in held.items() for value in found]
    facts = [fact.format(kind=kind, title=title, value=value) for title, value in pairs]
    if dense:
        pieces, depths = facts, [i / max(1, len(facts) - 1) for i in range(len(facts))]
    else:
        pieces, depths = spread(draw, setting.haystack.pieces(draw, setting.size), facts, setting.depth)
    depth = dict(zip(pairs, depths, strict=True))
    asked = draw.sample(titles, len(titles))
    groups = [asked[i : i + queries] for i in range(0, len(asked) - queries + 1, queries)]
    one = queries * values == 1
    context = (_ruler_introduction(kind, one) if official else "A text:\n") + "\n".join(pieces)
    ask = _ruler_question if official else _compact_question
    questions = []
    for group in groups[: setting.questions]:
        # one title's values are expected in the order of the text
        answers = [pair for title in group for pair in sorted(((title, v) for v in held[title]), key=depth.__getitem__)]
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
    """Question, opening of the answer, and the rest of it."""
    query = titles[0] if len(titles) == 1 else f"{', '.join(titles[:-1])}, and {titles[-1]}"
    what, verb = (f"the special magic {kind}", "is") if len(answers) == 1 else (f"all the special magic {kind}s", "are")
    kinds = kind if len(answers) == 1 else f"{kind}s"
    return (
        f"\nWhat {verb} {what} for {query} mentioned in the provided text?",
        f" The special magic {kinds} for {query} mentioned in the provided text {verb}",
        " " + ", ".join(value for _, value in answers) + ".",
    )


def _compact_question(kind: str, titles: list[str], answers: list[tuple[str, str]]) -> tuple[str, str, str]:
    if len(answers) == 1:
        what = f"he magic {kind} of {titles[0]}"
        return f"\nWhat is t{what}?", f" T{what} is ", f"{answers[0][1]}."
    what = f"he magic {kind}s of"
    if len(titles) == 1:
        values = ", ".join(value for _, value in answers)
        return f"\nWhat are all t{what} {titles[0]}?", f" T{what} {titles[0]} are ", f"{values}."
    # several titles: each is said again before its number
    reply = ", ".join(f"{title} is {value}" for title, value in answers)
    return f"\nWhat are t{what} {', '.join(titles)}?", f" T{what}", f" {reply}."


def _number(draw: random.Random) -> str:
    return str(draw.randint(1_000_000, 9_999_999))


def _uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def variable_tracking(draw: random.Random, setting: Setting) -> Sample:
    """A chain of assignments in the haystack: who has the value at its start?"""
    official = setting.wording == "official"
    example = ""
    if official:
        lines, names_of, value = _chain(draw, letters=3)
        example = "".join(_ruler_chain("\n".join(lines), names_of, value)) + " ".join(names_of) + "\n\n"
    lines, names_of, value = _chain(draw, letters=5 if official else 0)
    haystack = setting.haystack.pieces(draw, setting.size)
    places = sorted(draw.randint(0, len(haystack)) for _ in lines)  # the chain stays in its order
    pieces = list[str]()
    for i, line in enumerate(lines):
        pieces += [*haystack[places[i - 1] if i else 0 : places[i]], line]
    body = "\n".join(pieces + haystack[places[-1] :])
    depth = places[0] / max(1, len(haystack))
    if official:
        context, text, opening = _ruler_chain(body, names_of, value)
        reply = " ".join(names_of) + "."
    else:
        context, text, opening = f"A text:\n{body}", f"\nWhich variables are {value}?", " They are"
        reply = f" {' '.join(names_of)}."
    return Sample(example + context, (Question(text, tuple(names_of), reply, depth, opening),))


def _chain(draw: random.Random, letters: int) -> tuple[list[str], list[str], str]:
    """Assignments, the variables in their order, and their value; names of so many capitals, or words if 0."""
    value = str(draw.randint(10_000, 99_999))
    found: dict[str, None] = {}
    while len(found) <= HOPS:
        name = "".join(draw.choices(string.ascii_uppercase, k=letters)) if letters else draw.choice(ADJECTIVES)
        found[name] = None
    order = list(found)
    return (
        [f"VAR {order[0]} = {value}"] + [f"VAR {b} = VAR {a} " for a, b in pairwise(order)],
        order,
        value,
    )


def _ruler_chain(body: str, names_of: list[str], value: str) -> tuple[str, str, str]:
    """Context, question and the answer's opening."""
    # "assgined" is what the official prompt says
    return (
        f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{body}",
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above.",
        f" Answer: According to the chain(s) of variable assignment in the text above, {len(names_of)} variables are "
        f"assgined the value {value}, they are: ",
    )


def common_words(draw: random.Random, setting: Setting) -> Sample:
    """Ten words come often, `size` others seldom; which ten?"""
    often, seldom = (30, 3) if setting.size >= 100 else (6, 1)  # the official counts of long lists and of short ones
    if setting.wording == "compact":
        return _common_words_compact(draw, setting.size, often, seldom)
    example, common = _numbered_words(draw, 10, 6, 1)
    listed, asked = _numbered_words(draw, setting.size, often, seldom)
    before = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    ask = "\nQuestion: What are the 10 most common words in the above list?"
    opening = " Answer: The top 10 words that appear most often in the list are:"
    context = f"{before}{example}{ask}{opening} {_enumerate(common)}\n\n{before}{listed}"
    return Sample(context, (Question(ask, tuple(asked), f" {_enumerate(asked)}", opening=opening),))


def _common_words_compact(draw: random.Random, others: int, often: int, seldom: int) -> Sample:
    words, asked = _shuffled_words(draw, others, often, seldom)
    reply = f" {' '.join(sorted(asked))}."
    return Sample(f"Words: {' '.join(words)}.", (Question("\nThe most common words are", tuple(asked), reply),))


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
    """`size` coded words, the k-th most frequent with weight k⁻², the first of all hidden as dots; which come next?"""
    official = setting.wording == "official"
    code = (
        (lambda: "".join(draw.choices(string.ascii_lowercase, k=6))) if official else partial(draw.choice, ADJECTIVES)
    )
    kinds = max(FREQUENT + 2, min(setting.size // 50, 200) + FREQUENT + 2)
    words = _distinct(code, kinds)
    weights = [(rank + 1) ** -2.0 for rank in range(kinds)]
    while True:
        text = draw.choices(words, weights, k=setting.size)
        counts = Counter(text)
        ranked = sorted(words, key=lambda word: -counts[word])
        ahead = [counts[better] - counts[worse] for better, worse in pairwise(ranked)]
        if min(ahead[: FREQUENT + 1]) > 0:  # the three, and their order, are beyond doubt
            return _frequent_sample(text, ranked, official)


def _distinct(code: Callable[[], str], count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[code()] = None
    return list(found)


def _frequent_sample(text: list[str], ranked: list[str], official: bool) -> Sample:
    hidden, asked = ranked[0], ranked[1 : FREQUENT + 1]
    dots = "...." if official else "..."
    body = " ".join(dots if word == hidden else word for word in text)
    if not official:
        return Sample(
            f"Code: {body}.", (Question("\nThe most frequent words are", tuple(asked), f" {' '.join(asked)}."),)
        )
    context = (
        "Read the following coded text and track the frequency of each coded word. "
        f"Find the three most frequently appeared coded words. {body}"
    )
    ask = (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text?"
    )
    opening = " Answer: According to the coded text above, the three most frequently appeared words are:"
    return Sample(context, (Question(ask, tuple(asked), f" {' '.join(asked)}.", opening=opening),))


def _needle_task(name: str, **options: int | bool) -> Task:
    make: Callable[[random.Random, Setting], Sample] = partial(needles, **options)  # type: ignore[arg-type]
    return Task(
        name=name,
        suite="ruler",
        dense=bool(options.get("dense")),
        make=make,
        score=all_contained,
        new_tokens=128,
    )


TASKS = (
    _needle_task("niah_single"),
    _needle_task("niah_single_uuid", uuids=True),
    _needle_task("niah_multikey", keys=NEEDLES),
    _needle_task("niah_multikey_dense", dense=True),
    _needle_task("niah_multikey_uuid", dense=True, uuids=True),
    _needle_task("niah_multivalue", values=NEEDLES),
    _needle_task("niah_multiquery", keys=NEEDLES, queries=NEEDLES),
    Task(name="vt", suite="ruler", dense=False, make=variable_tracking, score=all_contained, new_tokens=30),
    Task(name="cwe", suite="ruler", dense=False, make=common_words, score=all_contained, new_tokens=120),
    Task(name="fwe", suite="ruler", dense=False, make=frequent_words, score=all_contained, new_tokens=50, smallest=30),
)
