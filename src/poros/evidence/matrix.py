"""Runs every cell of a spec, pass by pass, each in a process of its own, and keeps what has been measured.

Layout of the output folder:

- ``spec.yaml``: the spec, as it was given; ``run.json``: the run's id.
- ``passes/CELL-PASS.json``: the record of each pass. What exists is not measured again, so an interrupted run resumes.
- ``logs/CELL-PASS.log``: what the pass's process said.
- ``rows.jsonl``: a row for each cell whose passes are all done, or one of which failed; written anew after each pass.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from poros.errors import ConfigError
from poros.evidence.artifact import SpeedRow, write_rows
from poros.evidence.engines.base import CellRequest, dataset_of
from poros.evidence.process import run_request
from poros.evidence.spec import BenchSpec, MethodSpec, ModelSpec, cell_name, file_name, first_difference, load_spec
from poros.units import format_bytes

ROWS = "rows.jsonl"
_SPEC = "spec.yaml"
_RUN = "run.json"
# Of the place, what must be the same for all passes of a run; and what for all passes of a cell.
_SAME_IN_RUN = ("host", "gpu", "gpu_uuid", "driver", "poros_commit")
_SAME_IN_CELL = ("versions",)

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
        ConfigError: the spec is not valid; ``out`` belongs to another spec, or is in use; or this is not the machine,
            the set of packages or the commit with which the run began.
    """
    spec = load_spec(spec_file)
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
        self.records: dict[tuple[str, int], dict[str, Any]] = {}  # (cell, pass) -> record
        for cell, number in order(spec):
            if self._file(cell, number).exists():
                self.records[cell.name, number] = json.loads(self._file(cell, number).read_text())

    def finish(self, say: Say) -> list[SpeedRow]:
        """Run every pass that is missing; a cell that has failed is not run again."""
        for left in (*self._passes.glob("*.request"), *self._passes.glob("*.draft")):  # of a run that was killed
            left.unlink()
        if self.records:
            say(f"{len(self.records)} passes are there already")
        rows = self._write_rows()
        for cell, number in order(self.spec):
            if (cell.name, number) in self.records or self._failure(cell) is not None:
                continue
            record = run_request(self._request(cell, number), self._log(cell, number), self.spec.time_limit_s)
            self._require_same_place(cell, number, record)
            self.records[cell.name, number] = record
            rows = self._write_rows()
            say(f"{cell.name}  pass {number} of {self.spec.passes}  {_brief(record)}")
        return rows

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
            options=method.options,
            folder=spec.folder_of(method.method),
            cache=spec.cache_folder(),
            record=str(self._file(cell, number).absolute()),
        )

    def _write_rows(self) -> list[SpeedRow]:
        done = (cell for cell in cells(self.spec) if self._is_done(cell))
        rows = [self._row(cell) for cell in done]
        if rows:
            write_rows(self.out / ROWS, rows)
        return rows

    def _row(self, cell: Cell) -> SpeedRow:
        request = self._request(cell, 1)
        records = self._records(cell)
        good = [record for record in records if record["status"] == "ok"]
        last = self._failure(cell) or good[-1]
        facts = self._facts(cell, records)
        return SpeedRow.from_passes(
            cell=cell.name,
            model=request.model,
            weights=request.weights,
            family=facts.get("family"),
            method=request.method,
            label=cell.method.shown,
            changes=cell.method.engine.changes,
            engine=cell.method.engine.launch,
            path=request.path,
            device=facts.get("device"),
            attention=request.attention,
            quantization=request.quantization,
            double_quant=request.double_quant,
            dtype=request.dtype,
            seq_len=request.seq_len,
            batch_size=request.batch_size,
            accumulation=request.accumulation,
            lora=asdict(request.lora),
            block_size=facts.get("block_size", request.block_size),
            slots=facts.get("slots", request.slots),
            resident_blocks=facts.get("resident_blocks"),
            budget_bytes=facts.get("budget_bytes"),
            dataset=facts.get("dataset", dataset_of(request)),
            learning_rate=request.learning_rate,
            max_grad_norm=request.max_grad_norm,
            options=_options(cell.method),
            steps=request.steps,
            warmup_steps=request.warmup_steps,
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
            if key in ("family", "dataset", "device")
        }
        return {**shared, **{key: value for record in records for key, value in record["facts"].items()}}

    def _records(self, cell: Cell) -> list[dict[str, Any]]:
        numbers = range(1, self.spec.passes + 1)
        return [self.records[cell.name, number] for number in numbers if (cell.name, number) in self.records]

    def _failure(self, cell: Cell) -> dict[str, Any] | None:
        return next((record for record in self._records(cell) if record["status"] != "ok"), None)

    def _is_done(self, cell: Cell) -> bool:
        return self._failure(cell) is not None or len(self._records(cell)) == self.spec.passes

    def _require_same_place(self, cell: Cell, number: int, record: dict[str, Any]) -> None:
        """Refuse a pass that was not run where the others were, and drop its record."""
        for (other, _), known in self.records.items():
            keys = (*_SAME_IN_RUN, *(_SAME_IN_CELL if other == cell.name else ()))
            for key in keys:
                was, now = known["provenance"].get(key), record["provenance"].get(key)
                if was != now:
                    self._file(cell, number).unlink(missing_ok=True)
                    raise ConfigError(
                        f"{self.out} cannot be finished here: {key} is {now!r}, and was {was!r} when {other} was "
                        "measured. Passes of two places are not compared: finish it there, or start in a new folder."
                    )

    def _file(self, cell: Cell, number: int) -> Path:
        return self._passes / f"{file_name(cell.name)}-{number}.json"

    def _log(self, cell: Cell, number: int) -> Path:
        return self.out / "logs" / f"{file_name(cell.name)}-{number}.log"


def _options(method: MethodSpec) -> dict[str, Any]:
    return method.options if method.module is None else {**method.options, "module": method.module}


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
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{out} is in use by another run. Wait for it, or give another folder.") from None
        yield


def _settle(spec: BenchSpec, spec_file: Path, out: Path) -> str:
    """Keep the spec in ``out``, or check that it is the one that is there; returns the run's id."""
    if (out / _SPEC).exists() and (out / _RUN).exists():
        difference = first_difference(load_spec(out / _SPEC), spec)
        if difference is not None:
            raise ConfigError(
                f"{out} holds a run of another spec: {difference}. Give another folder, or go back to {out / _SPEC}."
            )
        run_id: str = json.loads((out / _RUN).read_text())["run_id"]
        return run_id
    shutil.copyfile(spec_file, out / _SPEC)
    run_id = os.environ.get("POROS_RUN_ID") or f"{spec.name}-{uuid4().hex[:8]}"
    draft = out / f".{_RUN}.tmp"
    draft.write_text(json.dumps({"run_id": run_id}))
    draft.replace(out / _RUN)
    return run_id
