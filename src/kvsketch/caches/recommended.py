"""The methods that are recommended, see docs/methods.md; each with its usual budget, a quarter of a full cache."""

from kvsketch.caches.core.budget import Keep

HOLDS_UP = 0.25  # from this budget on, questions lose next to nothing if heads hold many of the latest tokens
FOR_BOTH = "kvzip(keep=0.25, window=0.25)"  # questions that come later, and text that goes on
FOR_QUESTIONS = "kvzip(keep=0.25)"  # with a smaller budget, holding the latest tokens costs answers
READ_ONCE = "keydiff(keep=0.25, heads='profile')"  # where the prompt cannot be read a second time
READ_ONCE_WITHOUT_PROFILE = "keydiff(keep=0.25)"  # and nobody has measured a profile of the model


def recommended(keep: Keep) -> str:
    """What is recommended for a budget; one in entries or bytes may be small, and is treated as small."""
    return FOR_BOTH if isinstance(keep, float) and keep >= HOLDS_UP else FOR_QUESTIONS
