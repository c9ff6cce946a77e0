"""Rows as a reader wants them: side by side for each run and model, with parity, and ratios to the baselines.

Markdown and the page are two ways to write what is computed here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from poros.errors import ResultError
from poros.evidence.artifact import ParityRow, Row, SpeedRow, pass_median, read_rows
from poros.evidence.verify import verify_file

BASELINES = ("resident", "poros-train", "unsloth", "stream-loop")
_RESERVING = ("resident", "poros-train", "unsloth")  # those whose memory a cut is measured against
_WITH_PARITY = ("poros", "poros-trainer")
_WORST_FIRST = ("FAIL", "INCONCLUSIVE", "PASS")
_MAX_SHOWN = 3

STATUS_TEXT = {
    "out_of_memory": "out of memory",
    "missing_package": "missing package",
    "unsupported": "unsupported",
    "diverged": "diverged",
    "timeout": "time limit",
    "crashed": "crashed",
}


@dataclass(frozen=True)
class Column:
    """One column of a table: ``name`` below the heading ``group``, or ``heading`` where there is room for one only."""

    key: str
    heading: str
    name: str = ""
    group: str = ""


@dataclass(frozen=True)
class Cell:
    """What a table shows, and the number that it stands for, by which a column is sorted."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Entry:
    """A speed row beside others of its run and model: its number among all rows, and its cells by column key."""

    index: int
    row: SpeedRow
    cells: dict[str, Cell]


@dataclass(frozen=True)
class Group:
    """The speed rows of one model in one run."""

    run_id: str
    model: str
    parity: str  # verdicts of the parity rows of the model
    entries: tuple[Entry, ...]
    same_losses: tuple[str, ...]  # labels of the methods whose loss is the resident run's, bit for bit, at every step

    @property
    def row(self) -> SpeedRow:
        """Any row, for what all share."""
        return self.entries[0].row

    @property
    def ok(self) -> list[SpeedRow]:
        """The rows that have figures."""
        return [entry.row for entry in self.entries if entry.row.status == "ok"]

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
    def parity(self) -> list[tuple[int, ParityRow]]:
        """Parity rows with their numbers among all rows."""
        return [(index, row) for index, row in enumerate(self.rows) if isinstance(row, ParityRow)]


def rows_file(path: Path) -> Path:
    """The file of rows that ``path`` is, or holds under the name ``rows.jsonl``."""
    return path / "rows.jsonl" if path.is_dir() else path


def read_verified(*paths: Path) -> list[Row]:
    """The rows of files, or of folders with a ``rows.jsonl``, if :func:`verify_file` finds nothing wrong with them.

    Raises:
        ResultError: a file cannot be read, or is not to be believed.
    """
    files = [rows_file(path) for path in paths]
    for file in files:
        problems = verify_file(file)
        if problems:
            shown = [f"{file}: {problem}" for problem in problems[:_MAX_SHOWN]]
            more = f"'poros bench verify {file}' lists all {len(problems)} problems."
            raise ResultError("\n".join(["These rows do not hold up, so nothing is made of them:", *shown, more]))
    return read_rows(*files)


def summarize(rows: Sequence[Row]) -> Summary:
    """Group ``rows``, compare each with the baselines of its group, and leave out columns that nobody fills."""
    grouped: dict[tuple[str, str], list[tuple[int, SpeedRow]]] = {}
    for index, row in enumerate(rows):
        if isinstance(row, SpeedRow):
            grouped.setdefault((row.run_id, row.model), []).append((index, row))
    parity = [row for row in rows if isinstance(row, ParityRow)]
    groups = tuple(_group(members, parity) for members in grouped.values())
    cells = [entry.cells for group in groups for entry in group.entries]
    columns = tuple(column for column in _columns() if any(some[column.key].text for some in cells))
    return Summary(tuple(rows), groups, columns)


def parity_text(rows: Iterable[ParityRow]) -> str:
    """The verdicts of ``rows`` in a few words, the worst first: ``FAIL (math), PASS (strict)``."""
    paths: dict[str, list[str]] = {}
    for row in rows:
        known = paths.setdefault(row.verdict, [])
        if row.path not in known:
            known.append(row.path)
    return ", ".join(f"{verdict} ({', '.join(paths[verdict])})" for verdict in _WORST_FIRST if verdict in paths)


def settings_text(row: SpeedRow) -> str:
    """The settings that the rows of a run share, in one sentence."""
    base = "no quantisation" if row.quantization is None else row.quantization.upper()
    base += " with double quantisation" if row.quantization and row.double_quant else ""
    targets = row.lora.targets if isinstance(row.lora.targets, str) else ", ".join(row.lora.targets)
    lora = f"LoRA r={row.lora.rank}, alpha {row.lora.alpha:g}, dropout {row.lora.dropout:g}, targets {targets}"
    passes = f"{row.num_passes} {'pass' if row.num_passes == 1 else 'passes'} of {row.steps} counted steps"
    return (
        f"{row.seq_len} tokens, batch {row.batch_size}, accumulation {row.accumulation}; {base}, {row.dtype}; {lora}; "
        f"{row.path} path; {row.dataset.name} data; {passes} after {row.warmup_steps} of warm-up."
    )


def place_text(row: Row) -> str:
    """Where and with what a row was measured, in one sentence."""
    card = ", ".join(part for part in (row.gpu, row.link, row.driver and f"driver {row.driver}") if part)
    versions = ", ".join(f"{name} {number}" for name, number in row.versions.items() if number)
    commit = f"; commit {row.poros_commit[:10]}" if row.poros_commit else ""
    return f"{f'{card}; ' if card else ''}{row.host}; {versions}{commit}; {row.time_utc}."


def seconds_text(seconds: float, std: float | None = None) -> str:
    """Seconds of a step, with their standard deviation if there is one, and the digits that mean something."""
    digits = 3 if seconds >= 0.1 else 4
    return f"{seconds:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


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
    yield Column("parity", "parity", "parity")


def _group(members: Sequence[tuple[int, SpeedRow]], parity: Sequence[ParityRow]) -> Group:
    measured = {row.method: row for _, row in reversed(members) if row.status == "ok"}  # the first of each method
    baselines = {name: measured[name] for name in BASELINES if name in measured}
    row = members[0][1]
    verdict = parity_text(one for one in parity if one.model == row.model)
    entries = tuple(Entry(index, one, _cells(one, baselines, verdict)) for index, one in members)
    resident = baselines.get("resident")
    same = [one.label for _, one in members if resident and one is not resident and _same_losses(one, resident)]
    return Group(row.run_id, row.model, verdict, entries, tuple(same))


def _same_losses(row: SpeedRow, other: SpeedRow) -> bool:
    return row.status == "ok" and bool(row.losses[0]) and row.losses == other.losses


def _cells(row: SpeedRow, baselines: dict[str, SpeedRow], verdict: str) -> dict[str, Cell]:
    empty = Cell("")
    cells = {
        "parity": Cell(verdict if row.method in _WITH_PARITY else ""),
        "s_per_step": Cell(STATUS_TEXT.get(row.status, "")),
        "passes": empty,
        "tokens_per_s": empty,
    }
    if row.s_per_step is not None and row.tokens_per_s is not None:
        cells["s_per_step"] = Cell(seconds_text(row.s_per_step, row.s_per_step_std), row.s_per_step)
        if row.num_passes > 1:
            cells["passes"] = Cell(", ".join(seconds_text(pass_median(seconds)) for seconds in row.passes))
        cells["tokens_per_s"] = Cell(f"{row.tokens_per_s:,.0f}", row.tokens_per_s)
    for name in BASELINES:
        base = baselines[name].s_per_step if name in baselines else None
        ratio = row.s_per_step / base if row.s_per_step is not None and base else None
        cells[f"of_{name}"] = empty if ratio is None else Cell(f"{ratio:.2f}", ratio)
    for key in ("allocated_bytes", "reserved_bytes", "process_bytes", "host_peak_bytes", "host_locked_bytes"):
        cells[key] = _gib(getattr(row, key))
    return cells


def _gib(num_bytes: int | None) -> Cell:
    return Cell("") if num_bytes is None else Cell(f"{num_bytes / 2**30:.2f}", num_bytes)


def overview(summary: Summary) -> tuple[list[Column], list[list[str]]]:
    """Columns and lines of the table that says, for each model and run, what the fastest Poros row achieves."""
    words = ("model", "weights", "family", "parity", "fastest Poros row", "s/step")
    columns = [Column(name, name, name) for name in words]
    columns += [column for column in _columns() if column.key.startswith("of_") or column.key == "reserved_bytes"]
    columns += [Column(f"cut_{name}", f"memory cut against {name}", name, "memory cut against") for name in _RESERVING]
    lines = [_achieved(group) for group in summary.groups]
    used = [place for place in range(len(columns)) if place < len(words) or any(line[place] for line in lines)]
    return [columns[place] for place in used], [[line[place] for place in used] for line in lines]


def _achieved(group: Group) -> list[str]:
    about = [group.model, group.row.weights, group.row.family or "", group.parity]
    ours = min(
        (entry for entry in group.entries if entry.row.method in _WITH_PARITY and entry.row.s_per_step is not None),
        key=lambda entry: entry.row.s_per_step or 0.0,
        default=None,
    )
    if ours is None:
        return [*about, "none", *[""] * (len(BASELINES) + len(_RESERVING) + 2)]
    reserved = {row.method: row.reserved_bytes for row in reversed(group.ok)}
    cuts = [(reserved.get(name) or 0) / (ours.row.reserved_bytes or 1) for name in _RESERVING]
    shown = [ours.cells[key].text for key in ("s_per_step", *(f"of_{name}" for name in BASELINES), "reserved_bytes")]
    return [*about, ours.row.label, *shown, *(f"{cut:.2f}" if cut and ours.row.reserved_bytes else "" for cut in cuts)]
