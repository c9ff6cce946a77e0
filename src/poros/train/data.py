"""Reads the rows of a run, encodes and truncates them, and says what came of each.

[Note: dropped rows]
A row without a token to learn gives a loss of 0/0, and one such row spoils the batches that it is added up with. So it
is left out, counted, and reported with its line; a row that cannot be understood at all stops the run instead.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from poros.errors import DataError
from poros.train.encode import IGNORED, Encoded, Encoder
from poros.train.rows import Kind, RowError, parse_row, read_lines

Truncation = Literal["keep_start", "keep_end", "drop", "error"]

_SHOWN_PROBLEMS = 6  # what fits an error message
_SHOWN_LINES = 8  # what fits a line of a report


@dataclass(frozen=True)
class Place:
    """A line of a data file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class RowDataset:
    """Encoded rows, in the order of the files: what a ``DataLoader`` takes, and what became of each row."""

    examples: list[Encoded] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)  # of each example
    # reason -> the rows that were left out for it
    dropped: dict[str, list[Place]] = field(default_factory=dict)
    truncated: list[Place] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Sequence[int]]:
        example = self.examples[index]
        return {"input_ids": example.input_ids, "labels": example.labels}

    @property
    def num_dropped(self) -> int:
        """Rows that were left out."""
        return sum(map(len, self.dropped.values()))

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(example.input_ids) for example in self.examples)

    @property
    def num_trained(self) -> int:
        """Tokens that the loss counts."""
        return sum(example.num_trained for example in self.examples)

    @property
    def longest(self) -> int:
        """Tokens of the longest row: no batch is ever longer."""
        return max((len(example.input_ids) for example in self.examples), default=0)

    @property
    def largest_id(self) -> int:
        """The largest token id of any row."""
        return max((max(example.input_ids) for example in self.examples), default=0)

    def digest(self) -> str:
        """A hash of every token and label, to tell whether two runs learn from the same rows in the same order."""
        hashed = hashlib.sha256()
        for example in self.examples:
            hashed.update(len(example.input_ids).to_bytes(8, "little"))
            hashed.update(array("q", example.input_ids).tobytes())
            hashed.update(array("q", example.labels).tobytes())
        return hashed.hexdigest()

    def summary(self, batch_size: int = 1) -> Iterator[str]:
        """Lines that say how much there is to learn from, and which rows were left out."""
        yield f"{_rows(len(self))}, {self.num_tokens} tokens, {self.num_trained} of them trained"
        yield f"longest batch {min(batch_size, len(self))} x {self.longest} tokens"
        if self.truncated:
            yield f"{_rows(len(self.truncated))} truncated: {_places(self.truncated)}"
        for reason, places in self.dropped.items():
            yield f"{_rows(len(places))} dropped, {reason}: {_places(places)}"


def read_rows(
    files: Sequence[str],
    encoder: Encoder,
    *,
    format: Literal["auto"] | Kind = "auto",
    max_length: int = 1024,
    truncation: Truncation = "keep_start",
) -> RowDataset:
    """Read and encode every row of ``files``.

    Raises:
        DataError: a file cannot be read, rows cannot be understood (the first few are named with their lines), or no
            row is left.
    """
    dataset = RowDataset()
    problems: list[str] = []
    num_rows = 0
    for file in files:
        for line, content in read_lines(Path(file)):
            num_rows += 1
            place = Place(file, line)
            try:
                _add(dataset, place, encoder.encode(parse_row(content, format)), max_length, truncation)
            except RowError as error:
                problems.append(f"{place}: {error}")
            if len(problems) > _SHOWN_PROBLEMS:
                break
    if problems:
        more = ["(and more)"] if len(problems) > _SHOWN_PROBLEMS else []
        raise DataError("\n".join(["rows cannot be used:", *problems[:_SHOWN_PROBLEMS], *more]))
    if not dataset.examples:
        raise DataError(_nothing_left(files, num_rows, dataset))
    return dataset


def _add(dataset: RowDataset, place: Place, encoded: Encoded, max_length: int, truncation: Truncation) -> None:
    """Truncate one row and keep it, or note why it was left out. See [Note: dropped rows]."""
    if encoded.num_trained == 0:
        dataset.dropped.setdefault("nothing to learn in them", []).append(place)
        return
    length = len(encoded.input_ids)
    if length > max_length:
        if truncation == "error":
            raise RowError(
                f"{length} tokens, and data.max_length is {max_length}; raise it, or set data.truncation to "
                "keep_start, keep_end or drop"
            )
        if truncation == "drop":
            dataset.dropped.setdefault(f"longer than {max_length} tokens", []).append(place)
            return
        kept = slice(0, max_length) if truncation == "keep_start" else slice(length - max_length, length)
        encoded = Encoded(encoded.input_ids[kept], encoded.labels[kept])
        if encoded.num_trained == 0:
            dataset.dropped.setdefault(f"nothing to learn in the {max_length} tokens kept", []).append(place)
            return
        dataset.truncated.append(place)
    # Nothing predicts the first token; labelled, some versions of transformers would count it all the same.
    labels = array("i", [IGNORED, *encoded.labels[1:]])  # four bytes a token, not a pointer and an object
    dataset.examples.append(Encoded(array("i", encoded.input_ids), labels))
    dataset.places.append(place)


def _nothing_left(files: Sequence[str], num_rows: int, dataset: RowDataset) -> str:
    names = ", ".join(files)
    if not num_rows:
        return f"{names}: no rows. Put one JSON object on each line."
    reasons = "; ".join(f"{_rows(len(places))}, {reason}" for reason, places in dataset.dropped.items())
    return (
        f"{names}: of {_rows(num_rows)} none is left to train on: {reasons}. Conversations need an assistant's turn, "
        "prompts a completion; if truncation removed it, raise data.max_length or set data.truncation: keep_end."
    )


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _places(places: Sequence[Place]) -> str:
    shown = ", ".join(map(str, places[:_SHOWN_LINES]))
    return f"{shown}, ..." if len(places) > _SHOWN_LINES else shown
