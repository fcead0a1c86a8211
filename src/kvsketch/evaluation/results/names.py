"""Names of the files of rows, and of methods in tables and pictures."""

ANSWERS, TEXTS, SPEED, PROMPTS, FITTED = "rows.jsonl", "text.jsonl", "speed.jsonl", "prompts.jsonl", "fitted.jsonl"


def family(method: str) -> str:
    """A method without its budget; all budgets of one family make one curve."""
    name, _, options = method.partition("(")
    others = [option for option in options.removesuffix(")").split(", ") if option and not option.startswith("keep=")]
    return f"{name}({', '.join(others)})" if others else name
