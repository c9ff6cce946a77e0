"""What keeps files of rows from being believed: figures that readings do not give, and rows that cannot be."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from poros.errors import ResultError
from poros.evidence.artifact import ParityRow, Row, read_lines
from poros.evidence.lines import printable
from poros.evidence.verify_parity import verdict_problems
from poros.evidence.verify_readings import figure_problems, reading_problems
from poros.evidence.verify_run import Placed, run_problems
from poros.evidence.verify_settings import setting_problems

_MAX_SHOWN = 3  # of the problems, in an error message


@dataclass(frozen=True)
class Problem:
    """A reason to refuse a file: the line, its cell if it has one, the key, and what was found and should be."""

    file: str
    line: int
    cell: str | None
    key: str
    message: str

    def __str__(self) -> str:
        cell = f" ({printable(self.cell, 100)})" if self.cell else ""
        return f"row {self.line}{cell}: {printable(self.key, 100)} {printable(self.message)}"


def verify_file(path: str | Path) -> list[Problem]:
    """Everything that is wrong with a file of rows, by line; [] for a file to be believed.

    Raises:
        ResultError: the file cannot be read, or is empty.
    """
    return examine([path])[1]


def examine(paths: Sequence[str | Path]) -> tuple[list[Placed], list[Problem]]:
    """The rows of files, and everything that is wrong with them, each by itself and all together.

    Together, because a run may be in several files.

    Raises:
        ResultError: a file cannot be read, or is empty.
    """
    files = [*map(str, paths)]
    problems: list[Problem] = []
    rows: list[Placed] = []
    for file in files:
        for line in read_lines(file):
            faults = line.faults if line.row is None else verify_row(line.row)
            problems += [Problem(file, line.number, line.cell, key, message) for key, message in faults]
            if line.row is not None:
                rows.append(Placed(file, line.number, line.row))
    for placed, key, message in run_problems(rows):
        problems.append(Problem(placed.file, placed.line, placed.row.cell, key, message))
    problems.sort(key=lambda problem: (files.index(problem.file), problem.line))
    return rows, problems


def rows_file(path: Path) -> Path:
    """The file of rows that ``path`` is, or holds under the name ``rows.jsonl``."""
    return path / "rows.jsonl" if path.is_dir() else path


def read_verified(*paths: Path) -> list[Row]:
    """The rows of files, or of folders with a ``rows.jsonl``, if :func:`examine` finds nothing wrong with them.

    Raises:
        ResultError: a file cannot be read, or they are not to be believed, each by itself and all together.
    """
    files = [rows_file(path) for path in paths]
    rows, problems = examine(files)
    if problems:
        shown = [f"{printable(problem.file)}: {problem}" for problem in problems[:_MAX_SHOWN]]
        command = "poros bench verify " + " ".join(dict.fromkeys(printable(file) for file in files))
        more = f"'{command}' lists all {len(problems)} problems."
        raise ResultError("\n".join(["These rows do not hold up, so nothing is made of them:", *shown, more]))
    return [placed.row for placed in rows]


def verify_row(row: Row) -> list[tuple[str, str]]:
    """What is wrong with one row by itself: pairs of a key and what was found and should be."""
    found = [*setting_problems(row)]
    if isinstance(row, ParityRow):
        return [*found, *verdict_problems(row)]
    readings = [*reading_problems(row)]
    return [*found, *readings, *(figure_problems(row) if not readings else ())]
