"""Rows as a reader wants them: side by side for each run and model, with parity, and ratios to the baselines.

Markdown and the page are two ways to write what is computed here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from poros.evidence.artifact import PLACE, WORST_FIRST, Memory, ParityRow, Row, SpeedRow, pass_median
from poros.evidence.wording import STATUS_TEXT, seconds_text, settings_parts, settings_text, usual_settings

BASELINES = ("resident", "poros-train", "unsloth", "stream-loop")
_RESERVING = ("resident", "poros-train", "unsloth")  # those whose memory a cut is measured against
_WITH_PARITY = ("poros", "poros-trainer")
_FASTEST = "fastest Poros row"
_OF_THE_FASTEST = ("s_per_step", *(f"of_{name}" for name in BASELINES), "reserved_bytes")


@dataclass(frozen=True)
class Column:
    """One column of a table: ``name`` below the heading ``group``, or ``heading`` where there is room for one only."""

    key: str
    heading: str
    name: str = ""
    group: str = ""
    is_number: bool = True


@dataclass(frozen=True)
class Cell:
    """What a table shows, and the number that it stands for, by which a column is sorted."""

    text: str
    value: float | None = None
    row: int | None = None  # the number of the row that it is from, if that is not the line's own


_EMPTY = Cell("")


@dataclass(frozen=True)
class Entry:
    """A speed row beside others of its run, place and model: its number among all rows, and its cells by column key.

    Attributes:
        changes: What its method changes, and every setting that is not the group's.
    """

    index: int
    row: SpeedRow
    cells: dict[str, Cell]
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """The speed rows of one model in one run on one machine: all that may stand in one table.

    Attributes:
        settings: Those that the rows share, in one sentence.
        weights: Empty if not all rows have the same.
        parity: Verdicts of the parity rows of the model as it is here.
        same_losses: Labels of the methods whose loss is the resident run's, bit for bit, at every step.
    """

    run_id: str
    model: str
    settings: str
    weights: str
    parity: Cell
    entries: tuple[Entry, ...]
    same_losses: tuple[str, ...]

    @property
    def heading(self) -> str:
        """What the group is called, but for its run."""
        return self.model + (f", {self.weights} weights" if self.weights else "")

    @property
    def where(self) -> str:
        """Its run, and the machine that it ran on."""
        row = self.entries[0].row
        return f"{self.run_id}, {row.gpu or row.host}"

    @property
    def families(self) -> str:
        """The family of the model."""
        return ", ".join(dict.fromkeys(entry.row.family for entry in self.entries if entry.row.family))

    @property
    def ok(self) -> list[Entry]:
        """Entries with figures."""
        return [entry for entry in self.entries if entry.row.status == "ok"]

    @property
    def failures(self) -> list[Entry]:
        """Entries without a figure."""
        return [entry for entry in self.entries if entry.row.status != "ok"]


@dataclass(frozen=True)
class Summary:
    """Everything that a report shows: all rows, the speed rows in groups, and the columns that have figures."""

    rows: tuple[Row, ...]
    groups: tuple[Group, ...]
    columns: tuple[Column, ...]

    @property
    def has_several_runs(self) -> bool:
        """Whether lines of one table may be of different runs or machines, so that each has to say of which it is."""
        return len({group.where for group in self.groups}) > 1

    @property
    def parity(self) -> list[tuple[int, ParityRow]]:
        """Parity rows with their numbers among all rows."""
        return [(index, row) for index, row in enumerate(self.rows) if isinstance(row, ParityRow)]


def summarize(rows: Sequence[Row]) -> Summary:
    """Group ``rows``, compare each with the baselines of its group, and leave out columns that nobody fills."""
    grouped: dict[tuple[Any, ...], list[tuple[int, SpeedRow]]] = {}
    for index, row in enumerate(rows):
        if isinstance(row, SpeedRow):
            place = tuple(getattr(row, key) for key in PLACE)
            grouped.setdefault((row.run_id, row.model, *place), []).append((index, row))
    parity = [(index, row) for index, row in enumerate(rows) if isinstance(row, ParityRow)]
    groups = tuple(_group(members, parity) for members in grouped.values())
    cells = [entry.cells for group in groups for entry in group.entries]
    columns = tuple(column for column in _columns() if any(some[column.key].text for some in cells))
    return Summary(tuple(rows), groups, columns)


def _parity_cell(rows: Iterable[tuple[int, ParityRow]], block_size: int | None = None) -> Cell:
    """The verdicts of ``rows`` with what they were found with, the worst first: ``PASS (strict, 20 steps)``.

    Args:
        rows: with their numbers among all rows; the cell leads to the first of the worst.
        block_size: of the row beside which they are told; one that differs is told too.
    """
    found: dict[str, list[str]] = {}
    first: dict[str, int] = {}
    for index, row in rows:
        with_what = f"{row.path}, {row.steps} {'step' if row.steps == 1 else 'steps'}"
        with_what += f", block size {row.block_size}" if row.block_size not in (None, block_size) else ""
        with_what += f", {note}" if isinstance(note := row.options.get("note"), str) else ""
        first.setdefault(row.verdict, index)
        known = found.setdefault(row.verdict, [])
        if with_what not in known:
            known.append(with_what)
    verdicts = [verdict for verdict in WORST_FIRST if verdict in found]
    text = ", ".join(f"{verdict} ({'; '.join(found[verdict])})" for verdict in verdicts)
    return Cell(text, row=first[verdicts[0]] if verdicts else None)


def _columns() -> Iterable[Column]:
    yield Column("s_per_step", "s/step", "s/step")
    yield Column("passes", "s/step of each pass", "each pass")
    yield Column("tokens_per_s", "tokens/s", "tokens/s")
    for name in BASELINES:
        yield Column(f"of_{name}", f"s/step over {name}", name, "s/step over that of")
    for name in ("allocated", "reserved", "process"):
        yield Column(f"{name}_bytes", f"{name} GiB", name, "GiB on the card")
    for name in ("peak", "locked"):
        yield Column(f"host_{name}_bytes", f"host {name} GiB", name, "GiB of host memory")
    yield Column("parity", "parity", "parity", is_number=False)


def _group(members: Sequence[tuple[int, SpeedRow]], parity: Sequence[tuple[int, ParityRow]]) -> Group:
    measured = {row.method: row for _, row in reversed(members) if row.status == "ok"}  # the first of each method
    baselines = {name: measured[name] for name in BASELINES if name in measured}
    parts = [settings_parts(row) for _, row in members]
    usual = usual_settings(parts)
    entries = []
    for (index, row), part in zip(members, parts, strict=True):
        own = [text for key, text in part.items() if text != usual.get(key) and text not in row.changes]
        verdicts = _parity_cell(((i, one) for i, one in parity if _is_about(one, row)), row.block_size)
        entries.append(Entry(index, row, _cells(row, baselines, verdicts), (*row.changes, *own)))
    about = _parity_cell((i, one) for i, one in parity if any(_is_about(one, row) for _, row in members))
    resident = baselines.get("resident")
    same = [one.label for _, one in members if resident and one is not resident and _same_losses(one, resident)]
    row = members[0][1]
    weights = row.weights if all(one.weights == row.weights for _, one in members) else ""
    settings = settings_text(parts, usual)
    return Group(row.run_id, row.model, settings, weights, about, tuple(entries), tuple(same))


def _is_about(parity: ParityRow, row: SpeedRow) -> bool:
    """Whether a verdict is about what a speed row measured: the same model, weights, bits, and way of launching."""
    pairs = ((getattr(parity, key), getattr(row, key)) for key in ("model", "weights", "family", "quantization"))
    double = [one.double_quant and one.quantization is not None for one in (parity, row)]
    about = all(one == other for one, other in pairs) and double[0] == double[1] and parity.dtype == row.dtype
    return about and row.method in _WITH_PARITY and parity.engine == row.engine


def _same_losses(row: SpeedRow, other: SpeedRow) -> bool:
    return row.status == "ok" and bool(row.losses[0]) and row.losses == other.losses


def _cells(row: SpeedRow, baselines: dict[str, SpeedRow], verdicts: Cell) -> dict[str, Cell]:
    cells = {
        "parity": verdicts,
        "s_per_step": Cell(STATUS_TEXT.get(row.status, "")),
        "passes": _EMPTY,
        "tokens_per_s": _EMPTY,
    }
    if row.s_per_step is not None and row.tokens_per_s is not None:
        cells["s_per_step"] = Cell(seconds_text(row.s_per_step, row.s_per_step_std), row.s_per_step)
        if row.num_passes > 1:
            cells["passes"] = Cell(", ".join(seconds_text(pass_median(seconds)) for seconds in row.passes))
        cells["tokens_per_s"] = Cell(f"{row.tokens_per_s:,.0f}", row.tokens_per_s)
    for name in BASELINES:
        base = baselines[name].s_per_step if name in baselines else None
        ratio = row.s_per_step / base if row.s_per_step is not None and base else None
        cells[f"of_{name}"] = _EMPTY if ratio is None else Cell(f"{ratio:.2f}", ratio)
    for key in Memory.model_fields:
        cells[key] = _gib(getattr(row, key))
    return cells


def _gib(num_bytes: int | None) -> Cell:
    return _EMPTY if num_bytes is None else Cell(f"{num_bytes / 2**30:.2f}", num_bytes)


def overview(summary: Summary) -> tuple[list[Column], list[list[Cell]]]:
    """Columns and lines of the table that says, for each model and run, what the fastest Poros row achieves.

    The cells that are from a row say which.
    """
    words = ("model", "run", "weights", "family", "parity", _FASTEST)
    columns = [Column(name, name, name, is_number=False) for name in words]
    columns += [column for column in _columns() if column.key in _OF_THE_FASTEST]
    columns += [Column(f"cut_{name}", f"memory cut against {name}", name, "memory cut against") for name in _RESERVING]
    lines = [_achieved(group) for group in summary.groups]
    shown = {*words, "s_per_step", *(key for line in lines for key, cell in line.items() if cell.text)}
    if not summary.has_several_runs:
        shown.remove("run")
    used = [column for column in columns if column.key in shown]
    return used, [[line.get(column.key, _EMPTY) for column in used] for line in lines]


def _achieved(group: Group) -> dict[str, Cell]:
    """A line of the overview, by column key; a cell that is not there is empty."""
    about = {
        "model": Cell(group.model),
        "run": Cell(group.where),
        "weights": Cell(group.weights),
        "family": Cell(group.families),
        "parity": group.parity,
    }
    ours = min(
        (entry for entry in group.ok if entry.row.method in _WITH_PARITY),
        key=lambda entry: entry.row.s_per_step or 0.0,
        default=None,
    )
    if ours is None:
        return {**about, _FASTEST: Cell("none")}
    texts = {_FASTEST: ours.row.label, **{key: ours.cells[key].text for key in _OF_THE_FASTEST}}
    reserved = {entry.row.method: entry.row.reserved_bytes for entry in reversed(group.ok)}  # the first of each method
    for name in _RESERVING:
        theirs = reserved.get(name)
        if theirs and ours.row.reserved_bytes:
            texts[f"cut_{name}"] = f"{theirs / ours.row.reserved_bytes:.2f}"
    return {**about, **{key: Cell(text, row=ours.index) for key, text in texts.items()}}
