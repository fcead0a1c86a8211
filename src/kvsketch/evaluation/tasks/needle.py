"""A needle in a haystack, over length and depth. The needle is random, so that no model can know it beforehand.

The question and the needle follow gkamradt/LLMTest_NeedleInAHaystack in form; the random number is MInference's idea.
"""

import random

from kvsketch.evaluation.tasks.base import Question, Sample, Setting, Task, spread
from kvsketch.evaluation.tasks.scoring import all_contained
from kvsketch.evaluation.tasks.words import names


def needle(draw: random.Random, setting: Setting) -> Sample:
    """One needle among `size` pieces of the haystack."""
    (key,) = names(draw, 1, setting.invented)
    number = str(draw.randint(1_000_000, 9_999_999))
    if setting.wording == "official":
        sentence = f"The special magic number of {key} is: {number}."
        text, opening = f"\n\nWhat is the special magic number of {key}?", f" The special magic number of {key} is:"
        introduction, reply = "This is a very long text. A question on it follows.\n\n", f" {number}."
    else:
        sentence = f"The magic number of {key} is {number}."
        text, opening = f"\nWhat is the magic number of {key}?", f" The magic number of {key} is "
        introduction, reply = "A text:\n", f"{number}."
    pieces, depths = spread(draw, setting.haystack.pieces(draw, setting.size), [sentence], setting.depth)
    context = introduction + setting.haystack.joint.join(pieces)
    return Sample(context, (Question(text, (number,), reply, depths[0], opening),))


TASKS = (
    Task(
        name="needle",
        suite="needle",
        dense=False,
        make=needle,
        score=all_contained,
        new_tokens=30,
        takes_depth=True,
        hides=True,
    ),
)
