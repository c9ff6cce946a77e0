"""What keeps files of rows from being believed: figures that readings do not give, and rows that cannot be."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from poros.evidence.artifact import ParityRow, Row, parse_row
from poros.evidence.lines import LineError, numbered_lines, parse_line, printable
from poros.evidence.verify_parity import verdict_problems
from poros.evidence.verify_readings import figure_problems, reading_problems
from poros.evidence.verify_run import Placed, run_problems
from poros.evidence.verify_settings import setting_problems


@dataclass(frozen=True)
class Problem:
    """A reason to refuse a file: the line, its cell if it has one, the key, and what was found and should be."""

    line: int
    cell: str | None
    key: str
    message: str
    file: str = ""

    def __str__(self) -> str:
        cell = f" ({printable(self.cell, 100)})" if self.cell else ""
        return f"row {self.line}{cell}: {printable(self.key, 100)} {printable(self.message)}"


def verify_file(path: str | Path) -> list[Problem]:
    """Everything that is wrong with a file of rows, by line; [] for a file to be believed.

    Raises:
        ResultError: the file cannot be read, or is empty.
    """
    return verify_files([path])


def verify_files(paths: Sequence[str | Path]) -> list[Problem]:
    """Everything that is wrong with files of rows, taken by themselves and together: a run may be in several of them.

    Raises:
        ResultError: a file cannot be read, or is empty.
    """
    problems: list[Problem] = []
    rows: list[Placed] = []
    for path in map(str, paths):
        for line, text in numbered_lines(path):
            try:
                fields = parse_line(text)
            except LineError as error:
                problems.append(Problem(line, None, "the line", str(error), path))
                continue
            row, wrong = parse_row(fields)
            if row is None:
                cell = fields.get("cell") if isinstance(fields, dict) else None
                cell = cell if isinstance(cell, str) else None
                problems += [Problem(line, cell, key, message, path) for key, message in wrong]
            else:
                rows.append(Placed(path, line, row))
                problems += [Problem(line, row.cell, key, message, path) for key, message in verify_row(row)]
    for placed, key, message in run_problems(rows):
        problems.append(Problem(placed.line, placed.row.cell, key, message, placed.file))
    order = {str(path): place for place, path in reversed(list(enumerate(paths)))}
    return sorted(problems, key=lambda problem: (order[problem.file], problem.line))


def verify_row(row: Row) -> list[tuple[str, str]]:
    """What is wrong with one row by itself: pairs of a key and what was found and should be."""
    found = [*setting_problems(row)]
    if isinstance(row, ParityRow):
        return [*found, *verdict_problems(row)]
    readings = [*reading_problems(row)]
    return [*found, *readings, *(figure_problems(row) if not readings else ())]
