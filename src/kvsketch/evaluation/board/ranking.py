"""Which line is best in a column, which cannot be told from the best, and the order of the lines."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from kvsketch.evaluation.board.columns import LIMIT, Column, Figure, Pairs
from kvsketch.evaluation.board.lines import Line
from kvsketch.evaluation.results.pairs import LEVEL, chance

BEST, LEVEL_WITH_BEST, OVER = "best", "level", "over"
SAVES_NOTHING = 0.9  # of exact's bytes, which include spare room, or more


@dataclass(frozen=True)
class Cell:
    """A figure, and its mark among the others of its column and budget."""

    figure: Figure
    mark: str


@dataclass(frozen=True)
class Ranked:
    """A line of a section, with a cell for each column, or None where nothing was measured."""

    line: Line
    cells: Sequence[Cell | None]

    @property
    def shares(self) -> tuple[float, float]:
        """The least and the largest share of exact's bytes that it held."""
        found = [cell.figure.share for cell in self.cells if cell is not None]
        return min(found), max(found)

    @property
    def over(self) -> bool:
        """Whether it held more than its budget in every cell."""
        return all(cell.mark == OVER for cell in self.cells if cell is not None)

    @property
    def saves_nothing(self) -> bool:
        """Whether it always held about as much as exact, though it was told to hold less."""
        keep = self.line.keep
        return keep is not None and self.shares[0] >= max(SAVES_NOTHING, LIMIT * keep)


def ranked(columns: Sequence[Column], lines: Sequence[Line]) -> list[Ranked]:
    """The lines of one budget, ordered by the first columns, best first; lines that hold too much come last."""
    if not columns:
        return []
    marks = [_marks(column, lines) for column in columns]
    found = [
        Ranked(line, [_cell(column, own, line) for column, own in zip(columns, marks, strict=True)]) for line in lines
    ]
    there = [one for one in found if any(one.cells)]
    return sorted(there, key=lambda one: _order(columns, one))


def _cell(column: Column, marks: Mapping[Line, str], line: Line) -> Cell | None:
    return Cell(column.figures[line], marks[line]) if line in column.figures else None


def _order(columns: Sequence[Column], one: Ranked) -> tuple[object, ...]:
    """The place of a line: by the mean of its figures in columns of the first kind."""
    first = columns[0].kind
    cells = [cell for column, cell in zip(columns, one.cells, strict=True) if column.kind == first]
    there = [cell for cell in cells if cell is not None]
    if not there:
        return True, True, 0.0
    mean = sum(cell.figure.value for cell in there) / len(there)
    return False, any(cell.mark == OVER for cell in there), -mean if columns[0].more else mean


def _marks(column: Column, lines: Sequence[Line]) -> dict[Line, str]:
    """The mark of each line: over its budget, best of those that count, level with the best, or none."""
    there = {line: column.figures[line] for line in lines if line in column.figures}
    marks = {line: OVER if figure.over(line) else "" for line, figure in there.items()}
    compared = [line for line, figure in there.items() if line.keep is not None and (figure.pairs or figure.spread)]
    counting = [line for line in compared if not marks[line]]
    if not counting:
        return marks
    best = (max if column.more else min)(counting, key=lambda line: there[line].value)
    for line in counting:
        marks[line] = BEST if line == best else LEVEL_WITH_BEST if _level(there[line], there[best]) else ""
    return marks


def _level(figure: Figure, best: Figure) -> bool:
    if best.spread is not None and figure.spread is not None:
        return best.spread[0] <= figure.spread[1] and figure.spread[0] <= best.spread[1]
    return chance(differences(best.pairs, figure.pairs)) > LEVEL


def differences(one: Pairs, other: Pairs) -> list[float]:
    """Differences over the pairs that both have; every cell weighs the same, however many pairs it has."""
    found = list[float]()
    for cell in one.keys() & other.keys():
        common: list[Hashable] = [key for key in one[cell] if key in other[cell]]
        found += [(one[cell][key] - other[cell][key]) / len(common) for key in common]
    return found
