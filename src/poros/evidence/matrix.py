"""Runs every cell of a spec, pass by pass, each in a process of its own, and keeps what has been measured.

Layout of the output folder:

- ``spec.yaml``: the spec, as it was given; ``run.json``: the run's id, and hashes of the files that it reads.
- ``passes/CELL-PASS.json``: the record of each pass. What exists is not measured again, so an interrupted run resumes.
- ``logs/CELL-PASS.log``: what the pass's process said.
- ``rows.jsonl``: a row for each cell whose passes are all done, or one of which failed; written anew after each pass.
  Rows of parity that were added to it stay in it.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from poros.errors import ConfigError, ResultError
from poros.evidence.artifact import ParityRow, SpeedRow, read_rows, write_rows
from poros.evidence.engines.base import SIZES, CellRequest, Launch, dataset_of
from poros.evidence.files import replace_file
from poros.evidence.preflight import fingerprints, require_runnable
from poros.evidence.process import run_request
from poros.evidence.records import Record, expected_here, read_json, read_record, require_same_place, write_json
from poros.evidence.spec import BenchSpec, MethodSpec, ModelSpec, cell_name, file_name, first_difference, load_spec
from poros.units import format_bytes

ROWS = "rows.jsonl"
_SPEC = "spec.yaml"
_RUN = "run.json"
# What a row has in common with the requests of its passes, under the same names.
_SAID_BY_THE_REQUEST = (
    *("cell", "model", "weights", "method", "path", "attention", "quantization", "double_quant", "dtype", "seq_len"),
    *("batch_size", "accumulation", "learning_rate", "max_grad_norm", "steps", "warmup_steps"),
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Cell:
    """One method on one model."""

    model: ModelSpec
    method: MethodSpec

    @property
    def name(self) -> str:
        """Unique in the run."""
        return cell_name(self.model, self.method)


def run_matrix(spec_file: Path, out: Path, say: Say, *, passes: int | None = None) -> list[SpeedRow]:
    """Measure whatever of a spec has not been measured yet; returns all rows, which are in ``out/rows.jsonl`` too.

    Args:
        spec_file: the spec.
        out: folder for the results: a new one, or one in which a run of the same spec was interrupted.
        say: gets a line for each pass.
        passes: of each method, instead of the spec's.

    Raises:
        ConfigError: the spec is not valid, or names what is not there; ``out`` belongs to another spec, is in use, or
            has a damaged file; or this is not the machine, the set of packages or the commit with which the run began.
    """
    spec = load_spec(spec_file)
    require_runnable(spec)
    with _claimed(out):
        run_id = _settle(spec, spec_file, out)
        counted = spec if passes is None else spec.model_copy(update={"passes": passes})
        return _Run(counted, out, run_id).finish(say)


def cells(spec: BenchSpec) -> list[Cell]:
    """Every cell of ``spec``, all of a model together."""
    return [Cell(model, method) for model in spec.models for method in spec.methods]


def order(spec: BenchSpec) -> Iterator[tuple[Cell, int]]:
    """Cell and number of every pass, in the order in which they run: the methods of a model take turns."""
    for model in spec.models:
        for number in range(1, spec.passes + 1):
            for method in spec.methods:
                yield Cell(model, method), number


class _Run:
    """A spec being measured in a folder."""

    def __init__(self, spec: BenchSpec, out: Path, run_id: str) -> None:
        self.spec, self.out, self.run_id = spec, out, run_id
        self._passes = out / "passes"
        self._own_packages = {cell.name: cell.method.engine.folder for cell in cells(spec)}
        self.records: dict[tuple[str, int], Record] = {}  # (cell, pass) -> record
        for cell, number in order(spec):
            file = self._file(cell, number)
            if file.exists():
                record = read_record(file, cell.name, number, spec.steps)
                if not self._had_less_time(record):
                    require_same_place(record, self.records.values(), self._own_packages, out)
                    self.records[cell.name, number] = record

    def finish(self, say: Say) -> list[SpeedRow]:
        """Run every pass that is missing; a cell that has failed is not run again."""
        for left in (*self._passes.glob("*.request"), *self._passes.glob("*.draft")):  # of a run that was killed
            left.unlink()
        if count := len(self.records):
            say("1 pass is there already" if count == 1 else f"{count} passes are there already")
        rows = self._write_rows()
        for cell, number in order(self.spec):
            if (cell.name, number) in self.records or self._failure(cell) is not None:
                continue
            record = self._measure(cell, number)
            self.records[cell.name, number] = record
            rows = self._write_rows()
            say(f"{cell.name}  pass {number} of {self.spec.passes}  {_brief(record)}")
        return rows

    def _measure(self, cell: Cell, number: int) -> Record:
        """Run a pass. Where it will run is looked at before, so that no reading is taken that cannot be kept."""
        request, file = self._request(cell, number), self._file(cell, number)
        here = expected_here(cell.name, request.method, request.module, request.folder)
        require_same_place(here, self.records.values(), self._own_packages, self.out)
        file.unlink(missing_ok=True)  # of a pass that had less time
        record = run_request(request, self._log(cell, number), self.spec.time_limit_s)
        try:
            require_same_place(record, self.records.values(), self._own_packages, self.out)
        except ConfigError:  # the place has changed meanwhile
            file.unlink(missing_ok=True)
            raise
        return record

    def _had_less_time(self, record: Record) -> bool:
        return record["status"] == "timeout" and record.get("time_limit_s", 0) < self.spec.time_limit_s

    def _request(self, cell: Cell, number: int) -> CellRequest:
        spec, method = self.spec, cell.method
        return CellRequest(
            run_id=self.run_id,
            cell=cell.name,
            number=number,
            method=method.method,
            module=method.module,
            model=cell.model.name,
            source=cell.model.source,
            weights="random" if cell.model.are_random else "real",
            quantization=None if spec.precision.quantization == "none" else spec.precision.quantization,
            double_quant=spec.precision.double_quant,
            dtype=spec.precision.dtype,
            seq_len=spec.seq_len,
            batch_size=spec.batch_size,
            accumulation=spec.accumulation,
            steps=spec.steps,
            warmup_steps=spec.warmup_steps,
            lora=spec.lora_of(method),
            path=spec.path,
            dataset=spec.dataset.path,
            seed=spec.seed,
            learning_rate=spec.learning_rate,
            max_grad_norm=spec.max_grad_norm,
            device=spec.device,
            attention=spec.attention,
            block_size=method.block_size,
            slots=method.slots,
            resident_blocks=method.resident_blocks,
            replay=method.replay,
            options=method.options,
            folder=spec.folder_of(method.method),
            cache=spec.cache_folder(),
            record=str(self._file(cell, number).absolute()),
        )

    def _write_rows(self) -> list[SpeedRow]:
        """Write all rows that there are, those of parity behind the others; returns the others."""
        done = (cell for cell in cells(self.spec) if self._is_done(cell))
        rows, added = [self._row(cell) for cell in done], self._added_rows()
        if rows:
            write_rows(self.out / ROWS, [*rows, *added])
        return rows

    def _added_rows(self) -> list[ParityRow]:
        """Rows of parity in the file of rows, which nothing but that file holds."""
        file = self.out / ROWS
        if not file.exists() or not file.stat().st_size:
            return []
        try:
            return [row for row in read_rows(file) if isinstance(row, ParityRow)]
        except ResultError as error:
            raise ConfigError(
                f"{error}\n{file} would be written anew, and a row of parity in it might be lost: mend or remove the "
                "line. Rows of speed may be removed, they are made from the files in passes."
            ) from None

    def _row(self, cell: Cell) -> SpeedRow:
        request = self._request(cell, 1)
        records = self._records(cell)
        good = [record for record in records if record["status"] == "ok"]
        last = self._failure(cell) or good[-1]
        facts = self._facts(cell, records)
        return SpeedRow.from_passes(
            **{name: getattr(request, name) for name in _SAID_BY_THE_REQUEST},
            **{name: facts.get(name, getattr(request, name)) for name in SIZES},
            **{name: facts.get(name) for name in ("family", "device", "budget_bytes")},
            label=cell.method.shown,
            changes=cell.method.engine.changes,
            engine=_launch(cell.method, facts),
            lora=asdict(request.lora),
            dataset=facts.get("dataset", dataset_of(request)),
            options=_options(cell.method, facts),
            num_passes=self.spec.passes,
            status=last["status"],
            reason=last["reason"],
            passes=[record["seconds"] for record in good],
            losses=[record["losses"] for record in good],
            pass_memory=[record["memory"] for record in good],
            **{**last["provenance"], "run_id": self.run_id},
        )

    def _facts(self, cell: Cell, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What the cell's passes tell of themselves; what a failed one could not, another method on the model can."""
        others = [self._records(other) for other in cells(self.spec) if other.model == cell.model]
        shared = {
            key: value
            for record in (record for some in others for record in some)
            for key, value in record["facts"].items()
            if key in ("family", "dataset", "device", "num_threads")
        }
        return {**shared, **{key: value for record in records for key, value in record["facts"].items()}}

    def _records(self, cell: Cell) -> list[dict[str, Any]]:
        numbers = range(1, self.spec.passes + 1)
        return [self.records[cell.name, number] for number in numbers if (cell.name, number) in self.records]

    def _failure(self, cell: Cell) -> dict[str, Any] | None:
        return next((record for record in self._records(cell) if record["status"] != "ok"), None)

    def _is_done(self, cell: Cell) -> bool:
        return self._failure(cell) is not None or len(self._records(cell)) == self.spec.passes

    def _file(self, cell: Cell, number: int) -> Path:
        return self._passes / f"{file_name(cell.name)}-{number}.json"

    def _log(self, cell: Cell, number: int) -> Path:
        return self.out / "logs" / f"{file_name(cell.name)}-{number}.log"


def _launch(method: MethodSpec, facts: dict[str, Any]) -> Launch | None:
    """How kernels were launched; None if a pass that failed did not come so far."""
    launches = method.engine.launches
    only = launches[0] if len(launches) == 1 else None
    launch: Launch | None = facts.get("engine", "eager" if method.replay is False else only)
    return launch


def _options(method: MethodSpec, facts: dict[str, Any]) -> dict[str, Any]:
    """The row's: those of the method, how many layers were replayed, the user's engine, and a CPU's threads."""
    options = dict(method.options)
    if "replayed_layers" in facts:  # some, but not all
        options["replayed_layers"] = facts["replayed_layers"]
    if method.module is not None:
        options["module"] = method.module
    if facts.get("device") == "cpu" and "num_threads" in facts:
        options["num_threads"] = facts["num_threads"]
    return options


def _brief(record: dict[str, Any]) -> str:
    if record["status"] != "ok":
        return f"{record['status']}: {record['reason']}"
    memory = record["memory"]
    name, size = next(
        ((name, memory[key]) for name, key in (("reserved", "reserved_bytes"), ("host", "host_peak_bytes"))
         if memory[key] is not None),
        ("memory", None),
    )  # fmt: skip
    shown = "" if size is None else f", {name} {format_bytes(size)}"
    return f"{median(record['seconds']):.3f} s/step{shown}, set up in {record['setup_s']:.0f} s"


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Keep a second run out of the folder; the kernel lets go of it when the process ends, however it does."""
    try:
        (out / "passes").mkdir(parents=True, exist_ok=True)
        (out / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be used as a folder for results: {error.strerror}") from None
    try:
        lock = (out / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{out} is in use by another run. Wait for it, or give another folder.") from None
        yield


def _settle(spec: BenchSpec, spec_file: Path, out: Path) -> str:
    """Keep the spec in ``out``, or check that it is the one that is there; returns the run's id."""
    inputs = fingerprints(spec)
    if not ((out / _SPEC).exists() and (out / _RUN).exists()):
        if any((out / "passes").glob("*.json")):
            raise ConfigError(
                f"{out} holds passes, but its {_SPEC} or {_RUN} is gone: put it back, or give another folder"
            )
        run_id = os.environ.get("POROS_RUN_ID") or f"{spec.name}-{uuid4().hex[:8]}"
        replace_file(out / _SPEC, spec_file.read_bytes())
        write_json(out / _RUN, {"run_id": run_id, "inputs": inputs})
        return run_id
    difference = first_difference(load_spec(out / _SPEC), spec)
    if difference is not None:
        raise ConfigError(
            f"{out} holds a run of another spec: {difference}. Give another folder, or go back to {out / _SPEC}."
        )
    way_out = 'Write {"run_id": ID} with the id of its rows into it, or start in a new folder.'
    run = read_json(out / _RUN, way_out)
    if not isinstance(run, dict) or not isinstance(run.get("run_id"), str) or not run["run_id"]:
        raise ConfigError(f"{out / _RUN} is damaged: it has no run_id. {way_out}")
    known = run.get("inputs") or {}
    changed = [name for name in inputs if name in known and known[name] != inputs[name]]
    if changed:
        raise ConfigError(
            f"{changed[0]} has changed since the run in {out} began: put back what it was, or start in a new folder"
        )
    replace_file(out / _SPEC, spec_file.read_bytes())  # what it may differ in is where things lie, and the time limit
    return str(run["run_id"])
