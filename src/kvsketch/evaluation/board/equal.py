"""How much each method is told to keep so that it holds at most its budget, windows and spare room included."""

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
PLACES = 4  # decimal places of a fraction
UNEVEN = 0.02  # share of a prompt by which prompts read together differ in length; caches of such rows hold more


class Fitter:
    """Finds how much caches hold of a text, which is read in as many rows as prompts are read together."""

    def __init__(self, model: PreTrainedModel, ids: Int64[Tensor, "1 n"], rows: int = 1) -> None:
        shorter = [round(UNEVEN * ids.shape[1] * row / rows) for row in range(rows)]
        self.model = model
        together = padded([ids[0, : ids.shape[1] - less].tolist() for less in shorter], 0)
        self.text = Text(model, *(x.to(model.device) for x in together))

    def run(self, specs: Sequence[str], rows: RowsFile) -> Iterator[tuple[str, int]]:
        """Fit specs that the file lacks, one by one; yields what was just done, and how many specs that settles."""
        wanted = {spec: self._labels(spec) for spec in specs}
        return rows.fill(wanted, lambda spec: {"fitted": self.fitted(spec)}, "bytes held")

    def found(self, rows: RowsFile) -> dict[str, str]:
        """The fitted spec of each spec in the file that was fitted to this text, read in as many rows."""
        noted = read_rows(rows.path, FITTED_KEY)[1]
        return {row["method"]: row["fitted"] for row in noted if row == row | self._labels(row["method"])}

    def _labels(self, spec: str) -> Row:
        """The labels that tell a row from others."""
        together, tokens = self.text.ids.shape
        return dict(zip(FITTED_KEY, (TASK, tokens, together, spec), strict=True))

    def fitted(self, spec: str) -> str:
        """The spec lowered until it holds at most its budget's share of exact's bytes of the text, and not far less.

        A spec that holds more however little it is told to keep stays as it is.
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
        """The bytes that exact holds."""
        exact = self.text.whole(Exact())
        assert exact is not None, "an exact cache reads what exact caches do"
        return exact.nbytes

    def _share(self, config: BudgetedConfig) -> float:
        return self.text.cache(config).nbytes / self._whole
