"""What keeps a file of rows from being believed: figures that its readings do not give, and readings that cannot be."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from poros.evidence.artifact import Memory, ParityRow, Row, SpeedRow, derived_figures, parse_row, read_lines
from poros.evidence.engines.base import METHODS
from poros.model.shapes import shape_names

# A clock may be wrong by a time zone, not by more.
_CLOCK_SLACK_S = 24 * 3600
_WITHOUT_LOSS = frozenset({"stream-loop"})
_ON_CARD = ("allocated_bytes", "reserved_bytes", "process_bytes")  # each counts what the one before it counts, and more

# What rows of one run_id share. Those of speed stand side by side, so they share their settings too.
_PLACE = ("host", "gpu", "gpu_uuid", "driver", "gpu_memory_bytes", "poros_commit")
_SETTINGS = (
    *("device", "path", "quantization", "double_quant", "dtype", "seq_len", "batch_size", "accumulation"),
    *("learning_rate", "max_grad_norm", "optimizer", "steps", "warmup_steps", "num_passes"),
)

_Found = Iterator[tuple[str, str]]  # a key, and what is wrong with its value
_Numbered = list[tuple[int, Row]]


@dataclass(frozen=True)
class Problem:
    """A reason to refuse a file: the line, its cell if it has one, the key, and what was found and should be."""

    line: int
    cell: str | None
    key: str
    message: str

    def __str__(self) -> str:
        return f"row {self.line}{f' ({self.cell})' if self.cell else ''}: {self.key} {self.message}"


def verify_file(path: str | Path) -> list[Problem]:
    """Everything that is wrong with a file of rows, by line; [] for a file to be believed.

    Raises:
        ResultError: the file cannot be read, is empty, or is not lines of JSON.
    """
    problems: list[Problem] = []
    rows: _Numbered = []
    for line, fields in read_lines(path):
        row, wrong = parse_row(fields)
        if row is None:
            cell = fields.get("cell") if isinstance(fields, dict) else None
            problems += [Problem(line, cell, key, message) for key, message in wrong]
        else:
            rows.append((line, row))
            problems += [Problem(line, row.cell, key, message) for key, message in verify_row(row)]
    problems += [*_mixed(rows), *_duplicates(rows)]
    return sorted(problems, key=lambda problem: problem.line)


def verify_row(row: Row) -> list[tuple[str, str]]:
    """What is wrong with one row by itself: pairs of a key and what was found and should be."""
    found = [*_identity(row)]
    if isinstance(row, ParityRow):
        return [*found, *_memory("", row, row), *_peaks_there(row, row.verdict != "INCONCLUSIVE"), *_verdict(row)]
    readings = [*_readings(row)]
    return [*found, *readings, *(_figures(row) if not readings else ())]


def _identity(row: Row) -> _Found:
    if row.method not in METHODS:
        yield "method", f"is {row.method!r}; there are {', '.join(METHODS)}"
    if row.weights == "real" and row.model in shape_names():
        yield "weights", f"is 'real', but {row.model} is the name of a shape, which has no weights"
    try:
        taken = datetime.strptime(row.time_utc, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        yield "time_utc", f"is {row.time_utc!r}; it should read like 2026-01-31T12:00:00Z"
        return
    if taken > time.time() + _CLOCK_SLACK_S:
        yield "time_utc", f"is {row.time_utc}, which has not come yet"


def _readings(row: SpeedRow) -> _Found:
    """Whether the passes are all there, whole, and possible."""
    lengths = {"passes": len(row.passes), "losses": len(row.losses), "pass_memory": len(row.pass_memory)}
    if (row.status == "ok") != (row.reason is None):
        yield (
            "reason",
            f"is {row.reason!r} with the status {row.status!r}; it should be null if, and only if, that is ok",
        )
    for key, length in lengths.items():
        if row.status == "ok" and length != row.num_passes:
            yield key, f"has {length} passes; num_passes is {row.num_passes}"
        elif row.status != "ok" and not length == lengths["passes"] < row.num_passes:
            yield key, f"has {length} passes with the status {row.status!r}; it should have as many as succeeded"
    if row.status == "ok" and not row.dataset.sha256:
        yield "dataset.sha256", "is null; a row with a figure says which tokens it learnt from"
    for index, seconds in enumerate(row.passes):
        yield from _counted(f"passes.{index}", seconds, row.steps, "steps")
        for step, value in enumerate(seconds):
            if not (math.isfinite(value) and value > 0):
                yield f"passes.{index}.{step}", f"is {value}; seconds should be finite and above 0"
    for index, losses in enumerate(row.losses):
        if losses or row.method not in _WITHOUT_LOSS:
            yield from _counted(f"losses.{index}", losses, row.warmup_steps + row.steps, "warmup_steps + steps")
        yield from _finite(f"losses.{index}", losses)
    for index, memory in enumerate(row.pass_memory):
        yield from _memory(f"pass_memory.{index}.", memory, row)


def _figures(row: SpeedRow) -> _Found:
    """Whether the derived figures are those that the passes give, to the last bit."""
    figures = derived_figures(
        row.status, row.passes, row.pass_memory, row.seq_len, row.batch_size, row.accumulation
    )  # fmt: skip
    for key, expected in figures.items():
        found = getattr(row, key)
        if found != expected:
            yield key, f"is {_shown(found)}; the passes give {_shown(expected)}"
            return  # one wrong figure makes others wrong
    yield from _peaks_there(row, row.status == "ok")


def _peaks_there(row: Row, wanted: bool) -> _Found:
    on_card = row.device == "cuda" or (row.device is None and row.gpu is not None)
    for key in _ON_CARD:
        if wanted and on_card and not getattr(row, key):
            yield key, f"is {_shown(getattr(row, key))}; a row measured on a card says what it took there"


def _memory(prefix: str, memory: Memory | Row, row: Row) -> _Found:
    known = [(key, getattr(memory, key)) for key in _ON_CARD if getattr(memory, key) is not None]
    for (less, low), (more, high) in pairwise(known):
        if high < low:
            yield prefix + more, f"is {high}, below {less} {low}, which is a part of it"
    for key in Memory.model_fields:
        value = getattr(memory, key)
        if value is not None and value < 0:
            yield prefix + key, f"is {value}; bytes cannot be negative"
    for key, value in known:
        if row.gpu_memory_bytes is not None and value > row.gpu_memory_bytes:
            yield prefix + key, f"is {value}; the card has {row.gpu_memory_bytes}"


def _verdict(row: ParityRow) -> _Found:
    """Whether the verdict is the one that the surfaces give."""
    streamed, control = row.surfaces.streamed.model_dump(), row.surfaces.control.model_dump()
    unequal = [name for name, equal in streamed.items() if not equal]
    unequal_control = [name for name, equal in control.items() if not equal]
    if row.verdict != "INCONCLUSIVE" and unequal_control:
        yield "verdict", f"is {row.verdict}, but the control differs in {_list(unequal_control)}: INCONCLUSIVE"
    elif row.verdict == "PASS" and unequal:
        yield "verdict", f"is PASS, but the streamed run differs in {_list(unequal)}"
    elif row.verdict == "FAIL" and not unequal:
        yield "verdict", "is FAIL, but every surface of the streamed run is equal"
    if row.verdict == "PASS" and row.first_difference is not None:
        yield "first_difference", "is given, but the verdict is PASS"
    if row.verdict == "FAIL" and row.first_difference is None:
        yield "first_difference", "is null, but the verdict is FAIL"
    if row.verdict == "PASS" and row.max_abs_difference != 0.0:
        yield "max_abs_difference", f"is {_shown(row.max_abs_difference)}; with the verdict PASS it is 0.0"
    if (row.verdict == "PASS") != (row.reason is None):
        yield (
            "reason",
            f"is {row.reason!r} with the verdict {row.verdict}; it should be null if, and only if, that is PASS",
        )
    if row.verdict == "PASS" and row.num_gradients < 1:
        yield "num_gradients", f"is {row.num_gradients}; a comparison of nothing proves nothing"
    if not (0 if row.verdict == "INCONCLUSIVE" else 1) <= row.control_steps <= row.steps:
        yield "control_steps", f"is {row.control_steps}; of {row.steps} steps, the control should repeat at least one"
    if row.verdict == "PASS":
        yield from _counted("losses", row.losses, row.steps, "steps")
        yield from _finite("losses", row.losses)
    if not (math.isfinite(row.wall_s) and row.wall_s > 0):
        yield "wall_s", f"is {row.wall_s}; seconds should be finite and above 0"


def _mixed(rows: _Numbered) -> Iterator[Problem]:
    """Rows whose settings or place are not those of the others of their run; what most of them say is held right."""
    runs: dict[tuple[str, ...], _Numbered] = defaultdict(list)
    for line, row in rows:
        runs[(row.run_id,)].append((line, row))
        if isinstance(row, SpeedRow):
            runs[row.run_id, "speed"].append((line, row))
            runs[row.run_id, "speed", row.model].append((line, row))
    for group, members in runs.items():
        match len(group):
            case 1:
                yield from _odd_ones(members, _PLACE)
            case 2:
                yield from _odd_ones(members, _SETTINGS)
                yield from _odd_ones(members, ("lora",), lambda lora: lora.model_dump(exclude={"dropout"}))
                same_dropout = [(line, row) for line, row in members if not any("dropout" in c for c in row.changes)]
                yield from _odd_ones(same_dropout, ("lora",), lambda lora: {"dropout": lora.dropout})
            case 3:
                known = [(line, row) for line, row in members if row.dataset.sha256]
                yield from _odd_ones(known, ("dataset",), lambda dataset: dataset.model_dump())


def _odd_ones(
    rows: _Numbered, keys: Iterable[str], part: Callable[[Any], Any] = lambda value: value
) -> Iterator[Problem]:
    for key in keys:
        said = [(line, row, repr(part(getattr(row, key)))) for line, row in rows]
        if said:
            usual = Counter(value for _, _, value in said).most_common(1)[0][0]
            for line, row, value in said:
                if value != usual:
                    message = f"is {value}; other rows of run {row.run_id} have {usual}"
                    yield Problem(line, row.cell, key, message)


def _duplicates(rows: _Numbered) -> Iterator[Problem]:
    first: dict[tuple[str, str, str], int] = {}
    for line, row in rows:
        earlier = first.setdefault((row.run_id, row.kind, row.cell), line)
        if earlier != line:
            yield Problem(line, row.cell, "cell", f"is the cell of row {earlier} too, in the same run")


def _counted(key: str, values: list[float], wanted: int, why: str) -> _Found:
    if len(values) != wanted:
        yield key, f"has {len(values)} entries; {why} is {wanted}"


def _finite(key: str, values: list[float]) -> _Found:
    for step, value in enumerate(values):
        if not math.isfinite(value):
            yield f"{key}.{step}", f"is {value}; a loss should be finite"


def _list(names: list[str]) -> str:
    return ", ".join(names)


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)
