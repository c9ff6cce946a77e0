"""What changed between two runs of the same cells, and whether it is more than their passes scatter."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from poros.errors import ResultError
from poros.evidence.artifact import ParityRow, Row
from poros.evidence.lines import printable
from poros.evidence.wording import STATUS_TEXT, seconds_text

_MEMORY = {
    "allocated_bytes": "allocated",
    "reserved_bytes": "reserved",
    "process_bytes": "process",
    "host_peak_bytes": "host peak",
    "host_locked_bytes": "host locked",
}
# What may explain a change: all but the identity of the rows and their readings.
_SETTINGS = (
    *("model", "weights", "method", "changes", "engine", "path", "device", "attention", "quantization", "double_quant"),
    *("dtype", "seq_len", "batch_size", "accumulation", "lora", "block_size", "slots", "resident_blocks"),
    *("budget_bytes", "dataset", "learning_rate", "max_grad_norm", "optimizer", "options", "steps", "warmup_steps"),
    *("num_passes", "gpu", "gpu_uuid", "driver", "link", "host", "versions", "poros_commit"),
)
_COMPARED = {"poros_commit"}  # what two runs are usually compared for
_MAX_WIDTH = 1000
_MIN_MEMORY_CHANGE = 0.005  # meters of the whole process and of the host move by themselves

Verdict = Literal["faster", "slower", "within the spread", "unknown", "no figure"]


@dataclass(frozen=True)
class Change:
    """One cell in both runs.

    Attributes:
        verdict: ``faster`` or ``slower`` if the intervals median ± standard deviation do not touch, so that the change
            is beyond both spreads; ``unknown`` if one of the two has a single pass, so no spread.
        ratio: seconds a step of the second over the first; None if one has no figure.
        memory: for each meter that moved by half a percent or more, its ratio.
        settings: for each setting or part of the place that differs, both values.
    """

    cell: str
    before: Row
    after: Row
    verdict: Verdict
    ratio: float | None = None
    memory: dict[str, float] = field(default_factory=dict)
    settings: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """Two runs: the cells of both, and those that only one of them has."""

    changes: tuple[Change, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]


def compare(before: Sequence[Row], after: Sequence[Row]) -> Difference:
    """Match the rows of two runs by their cell.

    Raises:
        ResultError: one of them has several rows of a cell, so it is not one run; or they share no cell.
    """
    first, second = _by_cell(before), _by_cell(after)
    shared = [key for key in first if key in second]
    if not shared:
        raise ResultError(
            f"the two have no cell in common: {_few(c for _, c in first)}; and {_few(c for _, c in second)}. "
            "Compare two runs of the same spec."
        )
    return Difference(
        changes=tuple(_change(first[key], second[key]) for key in shared),
        only_before=tuple(cell for kind, cell in first if (kind, cell) not in second),
        only_after=tuple(cell for kind, cell in second if (kind, cell) not in first),
    )


def comparison_lines(difference: Difference) -> list[str]:
    """The comparison as lines of text for a terminal: what may explain changes, then a line for each cell."""
    lines = _settings_lines(difference.changes)
    lines = ["What differs besides the readings, and may be why they do:", *lines, ""] if lines else []
    table = [("cell", "before", "after", "change", "")]
    table += [(one.cell, *_figures(one)) for one in difference.changes]
    widths = [max(len(line[place]) for line in table) for place in range(4)]
    for line in table:
        cells = [line[0].ljust(widths[0]), *(line[place].rjust(widths[place]) for place in (1, 2, 3)), line[4]]
        lines.append("  ".join(cells).rstrip())
    for one in difference.changes:
        if one.memory:
            moved = ", ".join(f"{_MEMORY[key]} {_percent(ratio)}" for key, ratio in one.memory.items())
            lines.append(f"{one.cell}: memory: {moved}")
    lines += [f"only before: {cell}" for cell in difference.only_before]
    lines += [f"only after: {cell}" for cell in difference.only_after]
    return [printable(line, _MAX_WIDTH) for line in lines]


def _by_cell(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    cells: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row.kind, row.cell)
        if key in cells:
            raise ResultError(
                f"there are two rows of the cell {row.cell}, of the runs {cells[key].run_id} and {row.run_id}. "
                "Compare files of one run each."
            )
        cells[key] = row
    return cells


def _change(before: Row, after: Row) -> Change:
    memory = {}
    for key in _MEMORY:
        was, now = getattr(before, key), getattr(after, key)
        if was and now and abs(now / was - 1) >= _MIN_MEMORY_CHANGE:
            memory[key] = now / was
    old, new = _settings(before), _settings(after)
    settings = {
        key: (_value(old.get(key)), _value(new.get(key))) for key in {**old, **new} if old.get(key) != new.get(key)
    }
    verdict, ratio = _speed(before, after)
    return Change(before.cell, before, after, verdict, ratio, memory, settings)


def _speed(before: Row, after: Row) -> tuple[Verdict, float | None]:
    if isinstance(before, ParityRow) or isinstance(after, ParityRow):
        return "no figure", None
    if before.s_per_step is None or after.s_per_step is None:
        return "no figure", None
    ratio = after.s_per_step / before.s_per_step
    if before.s_per_step_std is None or after.s_per_step_std is None:
        return "unknown", ratio
    if abs(after.s_per_step - before.s_per_step) <= before.s_per_step_std + after.s_per_step_std:
        return "within the spread", ratio
    return ("faster" if ratio < 1 else "slower"), ratio


def _figures(change: Change) -> tuple[str, str, str, str]:
    was, now = _figure(change.before), _figure(change.after)
    if change.ratio is None:
        return was, now, "", "" if was == now else "changed"
    said = {
        "faster": "faster, beyond both spreads",
        "slower": "slower, beyond both spreads",
        "unknown": "unknown: one pass has no spread",
    }
    others = change.settings.keys() - _COMPARED
    caution = f"not like for like ({len(others)} {'setting differs' if len(others) == 1 else 'settings differ'}): "
    verdict = said.get(change.verdict, change.verdict)
    return was, now, _percent(change.ratio), (caution if others else "") + verdict


def _figure(row: Row) -> str:
    if isinstance(row, ParityRow):
        return row.verdict
    if row.s_per_step is None:
        return STATUS_TEXT[row.status]
    return f"{seconds_text(row.s_per_step, row.s_per_step_std)} s"


def _settings_lines(changes: Sequence[Change]) -> list[str]:
    """One line for each difference, with the cells that have it, or "all cells"."""
    cells: dict[tuple[str, str, str], list[str]] = {}
    for one in changes:
        for key, (was, now) in one.settings.items():
            cells.setdefault((key, was, now), []).append(one.cell)
    return [
        f"{'all cells' if len(names) == len(changes) else _few(names)}: {key}: {was} -> {now}"
        for (key, was, now), names in cells.items()
    ]


def _settings(row: Row) -> dict[str, object]:
    """What may explain a change, those in groups by their path: ``lora.rank``, ``versions.torch``."""
    found: dict[str, object] = {}
    for key, value in row.model_dump(include=set(_SETTINGS)).items():
        found |= {f"{key}.{name}": part for name, part in value.items()} if isinstance(value, dict) else {key: value}
    return found


def _value(value: object) -> str:
    return "null" if value is None else str(value)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _few(names: Iterable[str], most: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
