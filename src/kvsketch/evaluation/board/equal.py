"""How much each method is to be given so that it holds no more than its budget, windows and spare room included."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.caches.core.config import BudgetedConfig
from kvsketch.caches.exact import Exact
from kvsketch.caches.registry import parse_spec
from kvsketch.evaluation.answers.session import padded
from kvsketch.evaluation.board.names import FITTED_KEY
from kvsketch.evaluation.board.timed import TASK
from kvsketch.evaluation.reading import Text
from kvsketch.evaluation.results.rows import Row, RowsFile, read_rows
from kvsketch.huggingface.identity import Identity

TRIES = 8
PLACES = 4  # of a fraction
UNEVEN = 0.02  # of a prompt: by so much those that are read together differ, and caches of such rows hold more


class Fitter:
    """One text, in as many rows as prompts are read together, and what caches of it hold."""

    def __init__(self, model: PreTrainedModel, ids: Int64[Tensor, "1 n"], rows: int = 1) -> None:
        shorter = [round(UNEVEN * ids.shape[1] * row / rows) for row in range(rows)]
        self.model = model
        together = padded([ids[0, : ids.shape[1] - less].tolist() for less in shorter], 0)
        self.text = Text(model, *(x.to(model.device) for x in together))

    def run(self, specs: Sequence[str], rows: RowsFile) -> Iterator[tuple[str, int]]:
        """Fit what the file does not hold yet, a spec at a time; what was just done, and how many that settles."""
        wanted = {spec: self._labels(spec) for spec in specs}
        return rows.fill(wanted, lambda spec: {"fitted": self.fitted(spec)}, "bytes held")

    def found(self, rows: RowsFile) -> dict[str, str]:
        """What is given to each spec of the file that was fitted to this text, so read."""
        noted = read_rows(rows.path, FITTED_KEY)[1]
        return {row["method"]: row["fitted"] for row in noted if row == row | self._labels(row["method"])}

    def _labels(self, spec: str) -> Row:
        """What tells a row from others."""
        together, tokens = self.text.ids.shape
        return dict(zip(FITTED_KEY, (TASK, tokens, together, spec), strict=True))

    def fitted(self, spec: str) -> str:
        """The spec that holds at most its budget of what exact holds of the text; not by far less.

        One that needs more however little it is given stays as it is.
        """
        config = parse_spec(spec)
        if not isinstance(config, BudgetedConfig):
            return spec
        assert isinstance(config.keep, float), "a board compares fractions"
        given, keep = config, config.keep
        for _ in range(TRIES):
            share = self._share(given)
            if share <= config.keep:
                return str(given)
            keep = round(keep * min(0.99, config.keep / share), PLACES)
            try:
                given = replace(given, keep=keep)
                Identity(self.model).fitted(given)
            except ValueError:  # nothing would be kept, or a profile does not cover so little
                break
        return spec

    @cached_property
    def _whole(self) -> int:
        """What exact holds."""
        exact = self.text.whole(Exact())
        assert exact is not None, "an exact cache reads what exact caches do"
        return exact.nbytes

    def _share(self, config: BudgetedConfig) -> float:
        return self.text.cache(config).nbytes / self._whole
