"""Made-up text: sentences of a small English grammar, with thousands of words in several forms and new names.

Nothing is taken from any text, and the sentences mean nothing. They are there so that needles can lie in something
other than the same few sentences again and again.
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvsketch.evaluation.tasks.words import ADJECTIVES, NOUNS, invented_word

T = TypeVar("T")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Regular verbs, and irregular ones with their past and participle.
_REGULAR = """
accept admire admit agree answer appear approach arrange arrive ask attach attempt avoid bake balance banish bathe
believe belong blame boil borrow bother bounce bow brush bury call carry chase cheer claim clean climb collect comfort
complain confess consider cook copy count cover crawl cross cry cure dance decide decorate defend delay deliver demand
describe deserve destroy discover dislike divide doubt drag drain dream dress drop dry earn embrace employ empty enjoy
enter escape examine excuse expect explain explore fail fear fetch fill finish fix flatter float follow forgive frame
gather gaze glance grab greet groan guard guess guide hammer hand handle happen hate help hesitate hide hope hunt hurry
imagine imitate inspect insult invent invite join joke judge jump kick kiss kneel knock label last laugh lean learn lift
like listen live load lock look love manage march mark marry measure mend mention miss mix move murmur nail name need
nod notice obey object observe offer open order paint pass paste pause pay pick place plan plant play please point
polish possess pour praise prefer prepare pretend promise protect pull punish push question race rain raise reach
recall refuse remain remember remind remove repair repeat reply rescue rest return roll row rule rush sail save scatter
scold search seem serve settle share shout sigh signal sketch slip smell smile smoke solve spare stare start stay step
stir stop stretch suffer suggest supply support suppose surprise suspect talk taste tease thank tie touch trace trade
travel treat tremble trust try turn unpack use visit wait wake walk wander want warn wash waste watch water weigh
whisper whistle wink wipe wish wonder work worry wrap yawn
"""
_IRREGULAR = """
become became become, begin began begun, bend bent bent, bind bound bound, bite bit bitten, blow blew blown, break broke
broken, bring brought brought, build built built, buy bought bought, catch caught caught, choose chose chosen, come came
come, cut cut cut, deal dealt dealt, dig dug dug, draw drew drawn, drink drank drunk, drive drove driven, eat ate eaten,
fall fell fallen, feed fed fed, feel felt felt, fight fought fought, find found found, fly flew flown, forget forgot
forgotten, freeze froze frozen, get got got, give gave given, go went gone, grow grew grown, hang hung hung, hear heard
heard, hold held held, keep kept kept, know knew known, lay laid laid, lead led led, leave left left, lend lent lent,
let let let, lose lost lost, make made made, mean meant meant, meet met met, put put put, read read read, ride rode
ridden, ring rang rung, rise rose risen, run ran run, say said said, see saw seen, sell sold sold, send sent sent, set
set set, shake shook shaken, shine shone shone, show showed shown, sing sang sung, sink sank sunk, sit sat sat, sleep
slept slept, speak spoke spoken, spend spent spent, stand stood stood, steal stole stolen, stick stuck stuck, strike
struck struck, sweep swept swept, swim swam swum, swing swung swung, take took taken, teach taught taught, tear tore
torn, tell told told, think thought thought, throw threw thrown, understand understood understood, wear wore worn, win
won won, write wrote written
"""
_DETERMINERS = _words("the the the a a this that one every another some no each her his my our their your its")
_PLURAL_DETERMINERS = _words(
    "the the the these those some many few all most several two three four ten our their his her"
)
_PREPOSITIONS = _words("""
about above across after against along among around at before behind below beneath beside between beyond by down during
for from in inside into like near of off on onto over past round since through to toward towards under until up upon
with within without
""")
_PRONOUNS = _words("he she they we you I it nobody everybody somebody who")
_OBJECTS = _words("him her them us you me it nobody everyone something nothing")
_LINKS = _words("and but so yet for or while because although when before after until since though if as where")
_STARTS = _words("""
then now here there once again still perhaps indeed however meanwhile therefore afterwards suddenly yesterday tomorrow
tonight later soon often always never sometimes besides moreover otherwise at-last in-short of-course for-once by-then
""")
_MODALS = _words("would could should might must may can will shall had-to used-to did-not does-not cannot would-not")
_MONTHS = _words("January February March April May June July August September October November December")
_DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_TITLES = _words("Mr. Mrs. Miss Dr. Captain Lady Lord Sir Aunt Uncle Professor")


_LATE = ("admit", "begin", "forget", "prefer")  # verbs of several syllables that are stressed on the last one
_OES = ("echo", "hero", "mango", "potato", "tomato", "volcano", "go", "veto")
_VES = {"calf": "calves", "elf": "elves", "knife": "knives", "leaf": "leaves", "loaf": "loaves", "scarf": "scarves"}
_VES |= {"shelf": "shelves", "thief": "thieves", "wharf": "wharves", "wolf": "wolves"}
_PLURALS = _VES | {"mouse": "mice", "goose": "geese", "ox": "oxen", "fish": "fish", "sheep": "sheep", "deer": "deer"}


def _ing(verb: str) -> str:
    if verb.endswith("ie"):
        return f"{verb[:-2]}ying"
    return (verb[:-1] if verb.endswith("e") and not verb.endswith(("ee", "ye")) else _doubled(verb)) + "ing"


def _past(verb: str) -> str:
    return verb + "d" if verb.endswith("e") else f"{verb[:-1]}ied" if _y(verb) else _doubled(verb) + "ed"


def _doubled(verb: str) -> str:
    """A verb with its last consonant doubled, if an ending that begins with a vowel requires it."""
    short = re.fullmatch(r"[^aeiou]*[aeiou][bdgklmnprt]", verb)
    return verb + verb[-1] if short or verb in _LATE else verb


def _more(word: str) -> str:
    """The plural of a noun, or the third person of a verb."""
    if word in _PLURALS:
        return _PLURALS[word]
    if _y(word):
        return f"{word[:-1]}ies"
    return word + ("es" if word.endswith(("s", "x", "z", "ch", "sh")) or word in _OES else "s")


def _y(word: str) -> bool:
    return word.endswith("y") and word[-2] not in "aeiou"


def _adverb(word: str) -> str:
    if _y(word):
        return f"{word[:-1]}ily"
    if word.endswith("ic"):
        return f"{word}ally"
    if word.endswith("ue") or (word.endswith("le") and word[-3] not in "aeiou"):
        return word[:-1] + ("ly" if word.endswith("ue") else "y")
    return word + ("y" if word.endswith("ll") else "ly")


IRREGULAR = tuple(tuple(forms.split()) for forms in _IRREGULAR.replace("\n", " ").split(","))
VERBS = tuple(
    (verb, _more(verb), past, participle, _ing(verb))
    for verb, past, participle in [*((v, _past(v), _past(v)) for v in _REGULAR.split()), *IRREGULAR]
)
PLURALS = tuple(map(_more, NOUNS))
ADVERBS = tuple(_adverb(word) for word in ADJECTIVES if not word.endswith("ly"))


class Writer:
    """Writes sentences, one after another, with random choices from `draw`."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def sentence(self) -> str:
        """One sentence with its full stop."""
        forms: list[tuple[float, Callable[[], str]]] = [
            (8, self._plain),
            (2, self._question),
            (3, self._speech),
            (1, self._number),
            (1, self._list),
        ]
        return self.draw.choices([form for _, form in forms], [weight for weight, _ in forms])[0]()

    def _plain(self) -> str:
        text = self._clause()
        if self._chance(0.25):
            text = f"{self._of(_STARTS).replace('-', ' ')}{self._of((',', '', ''))} {text}"
        if self._chance(0.45):
            text += f"{self._of((',', ',', '', ';'))} {self._of(_LINKS)} {self._clause()}"
        if self._chance(0.1):
            text += f", {self._of(VERBS)[4]} {self._thing()}"
        return _capital(text) + self._of((".", ".", ".", ".", ".", "!"))

    def _question(self) -> str:
        how = self._of(("why", "how", "when", "where", "what", "do you know why", "who said that", "and"))
        start = f"{_capital(how)} {self._of(('did', 'does', 'could', 'will'))}"
        return f"{start} {self._who()} {self._verb(0)} {self._thing()}?"

    def _speech(self) -> str:
        opened, closed = self._of((('"', '"'), ("\u201c", "\u201d"), ("'", "'")))
        said = self._of(("said", "asked", "cried", "answered", "thought", "whispered"))
        by = f"{said} {self._who()}" if self._chance(0.6) else f"{self._who()} {said}"
        said_how = f" {self._of(ADVERBS)}" if self._chance(0.3) else ""
        return f"{opened}{_capital(self._clause())}{self._of((',', '!', '?'))}{closed} {by}{said_how}."

    def _number(self) -> str:
        count = self.draw.choice((self.draw.randint(2, 99), self.draw.randint(100, 99_999)))
        hour = f"{self.draw.randint(1, 12)}:{self.draw.randint(0, 59):02d}"
        date = f"{self._of(_MONTHS)} {self.draw.randint(1, 28)}, {self.draw.randint(1600, 2099)}"
        return self._of(
            (
                f"On {date}, {self._clause()}.",
                f"At {hour} on {self._of(_DAYS)} {self._clause()}.",
                f"{_capital(self._of(PLURALS))} cost {count:,} {self._of(PLURALS)} in {self._name()}.",
                f"There were {count} {self._of(ADJECTIVES)} {self._of(PLURALS)} {self._where()}.",
                f"{self._name()} is {count} {self._of(PLURALS)} {self._where()}.",
            )
        )

    def _list(self) -> str:
        things = ", ".join(self._of(PLURALS) for _ in range(self.draw.randint(2, 5)))
        return f"{_capital(self._who())} {self._verb(2)} {things} and {self._of(PLURALS)} {self._where()}."

    def _clause(self) -> str:
        mood = self.draw.random()
        where = f" {self._where()}" if self._chance(0.4) else ""
        how = f" {self._of(ADVERBS)}" if self._chance(0.15) else ""
        if mood < 0.45:
            return f"{self._who()}{how} {self._verb(2)} {self._thing()}{where}"
        if mood < 0.6:
            return f"{self._who()} {self._of(('was', 'is', 'had been', 'seemed', 'became'))} {self._quality()}{where}"
        if mood < 0.75:
            return f"{self._who()} {self._of(_MODALS).replace('-', ' ')} {self._verb(0)} {self._thing()}{where}"
        if mood < 0.9:
            return f"the {self._of(PLURALS)} {self._of(('were', 'are', 'have been'))} {self._verb(3)}{how}{where}"
        return f"there {self._of(('was', 'is', 'stood', 'lay'))} {self._single()}{where}"

    def _who(self) -> str:
        which = self.draw.random()
        if which < 0.3:
            return self._of(_PRONOUNS)
        return self._name() if which < 0.45 else self._plural() if which < 0.6 else self._single()

    def _thing(self) -> str:
        which = self.draw.random()
        if which < 0.2:
            return self._of(_OBJECTS)
        return self._plural() if which < 0.4 else self._name() if which < 0.45 else self._single()

    def _single(self) -> str:
        quality = f"{self._quality()} " if self._chance(0.45) else ""
        noun = self._of(NOUNS)
        noun += f" of {self._determined(self._of(NOUNS))}" if self._chance(0.15) else ""
        return f"{self._name()}'s {quality}{noun}" if self._chance(0.05) else self._determined(quality + noun)

    def _determined(self, noun: str) -> str:
        determiner = self._of(_DETERMINERS)
        return f"{'an' if determiner == 'a' and noun[0] in 'aeiou' else determiner} {noun}"

    def _plural(self) -> str:
        quality = f"{self._quality()} " if self._chance(0.4) else ""
        return f"{self._of(_PLURAL_DETERMINERS)} {quality}{self._of(PLURALS)}"

    def _quality(self) -> str:
        if self._chance(0.15):
            return f"{self._of(ADJECTIVES)}{self._of((' and ', ', '))}{self._of(ADJECTIVES)}"
        very = f"{self._of(('very', 'too', 'so', 'rather', *ADVERBS[::40]))} " if self._chance(0.15) else ""
        return very + (self._verb(self._of((3, 4))) if self._chance(0.1) else self._of(ADJECTIVES))

    def _name(self) -> str:
        name = _capital(invented_word(self.draw) if self._chance(0.6) else self._of(NOUNS))
        return f"{self._of(_TITLES)} {name}" if self._chance(0.3) else name

    def _where(self) -> str:
        return f"{self._of(_PREPOSITIONS)} {self._thing()}"

    def _verb(self, form: int) -> str:
        return self._of(VERBS)[form]

    def _chance(self, share: float) -> bool:
        return self.draw.random() < share

    def _of(self, choices: Sequence[T]) -> T:
        return choices[int(self.draw.random() * len(choices))]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
