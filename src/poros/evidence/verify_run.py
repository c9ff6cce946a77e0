"""Whether rows hold up together: one run has one place and one set of settings, and no row is another's copy."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from poros.evidence.artifact import PLACE, Row, SpeedRow
from poros.evidence.engines.base import METHODS, describe
from poros.evidence.limits import MAX_RUN_S
from poros.evidence.provenance import unix_time

# What rows of one run_id share besides their place. Those of speed stand side by side, so they share settings too.
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")
_SETTINGS = (
    *("path", "quantization", "double_quant", "dtype", "seq_len", "batch_size", "accumulation"),
    *("learning_rate", "max_grad_norm", "optimizer", "steps", "warmup_steps", "num_passes"),
)


@dataclass(frozen=True)
class Placed:
    """A row, and where it is written."""

    file: str
    line: int
    row: Row


RunProblems = Iterator[tuple[Placed, str, str]]  # the row, a key, and what is wrong with its value


def run_problems(rows: Sequence[Placed]) -> RunProblems:
    """All that is wrong with rows taken together, whichever files they are in."""
    yield from _duplicates(rows)
    yield from _copies(rows)
    for members in _grouped(rows, lambda row: row.run_id):
        yield from _odd_ones(members, PLACE)
        yield from _versions(members)
        yield from _times(members)
        yield from _settings([one for one in members if isinstance(one.row, SpeedRow)])
        for same_model in _grouped(members, lambda row: row.model):
            yield from _odd_ones(same_model, ("weights",))
            yield from _odd_ones(same_model, ("family",), unless_null=True)
            for kind in _grouped(same_model, lambda row: row.kind):
                yield from _odd_ones(kind, ("attention",))


def _settings(rows: Sequence[Placed]) -> RunProblems:
    """What speed rows of a run share; a dropout that a method declares is its own."""
    yield from _odd_ones(rows, _SETTINGS)
    yield from _odd_ones(rows, ("device",), unless_null=True)
    threaded = [one for one in rows if "num_threads" in one.row.options]
    yield from _odd_ones(threaded, ("options",), lambda options: {"num_threads": options["num_threads"]})
    yield from _odd_ones(rows, ("lora",), lambda lora: lora.model_dump(exclude={"dropout"}))
    same_dropout = [one for one in rows if not any("dropout" in change for change in one.row.changes)]
    yield from _odd_ones(same_dropout, ("lora",), lambda lora: {"dropout": lora.dropout})
    for same_model in _grouped(rows, lambda row: row.model):
        known = [one for one in same_model if one.row.dataset.sha256]
        yield from _odd_ones(known, ("dataset",), lambda dataset: dataset.model_dump())


def _versions(rows: Sequence[Placed]) -> RunProblems:
    """Methods share their packages, but for those that bring a folder of their own."""
    shared = [one for one in rows if one.row.method not in METHODS or not describe(one.row.method).folder]
    yield from _odd_ones(shared, ("versions",), lambda versions: {name: versions.get(name) for name in _PACKAGES})


def _times(rows: Sequence[Placed]) -> RunProblems:
    times: list[tuple[float, Placed]] = []
    for one in rows:
        try:
            times.append((unix_time(one.row.time_utc), one))
        except ValueError:
            continue  # refused by itself
    times.sort(key=lambda pair: pair[0])
    if times and times[-1][0] - times[0][0] > MAX_RUN_S:
        middle = times[len(times) // 2][0]
        for time, one in times:
            if abs(time - middle) > MAX_RUN_S / 2:
                message = f"is {one.row.time_utc}; the rows of run {one.row.run_id} are more than two days apart"
                yield one, "time_utc", message


def _duplicates(rows: Sequence[Placed]) -> RunProblems:
    first: dict[tuple[str, str, str], Placed] = {}
    for one in rows:
        earlier = first.setdefault((one.row.run_id, one.row.kind, one.row.cell), one)
        if earlier is not one:
            yield one, "cell", f"is the cell of {_place(earlier, one)} too, in the same run"


def _copies(rows: Sequence[Placed]) -> RunProblems:
    """Readings that are those of another pass or row in every bit."""
    first: dict[tuple[float, ...], tuple[Placed, str]] = {}
    for one in rows:
        row = one.row
        if isinstance(row, SpeedRow):
            readings = [(f"passes.{index}", (*seconds,)) for index, seconds in enumerate(row.passes) if seconds]
        else:
            readings = [("wall_s", (row.wall_s, *row.losses))]
        for key, reading in readings:
            earlier, known = first.setdefault(reading, (one, key))
            if earlier is not one or known != key:
                yield one, key, f"is {known} of {_place(earlier, one)} in every bit; a clock does not repeat itself"
                break


def _place(earlier: Placed, one: Placed) -> str:
    return f"row {earlier.line}" + (f" of {earlier.file}" if earlier.file != one.file else "")


def _grouped(rows: Sequence[Placed], by: Callable[[Row], str]) -> Iterable[list[Placed]]:
    groups: dict[str, list[Placed]] = defaultdict(list)
    for one in rows:
        groups[by(one.row)].append(one)
    return groups.values()


def _odd_ones(
    rows: Sequence[Placed],
    keys: Iterable[str],
    part: Callable[[Any], Any] = lambda value: value,
    *,
    unless_null: bool = False,
) -> RunProblems:
    """Rows that do not say what most of them say, which is held right."""
    for key in keys:
        values = [(one, getattr(one.row, key)) for one in rows]
        said = [(one, repr(part(value))) for one, value in values if value is not None or not unless_null]
        if said:
            usual = Counter(value for _, value in said).most_common(1)[0][0]
            for one, value in said:
                if value != usual:
                    yield one, key, f"is {value}; other rows of run {one.row.run_id} have {usual}"
