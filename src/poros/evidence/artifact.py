"""The row: one measured claim as a line of JSON, with its settings, every reading, and where it was taken.

What follows from a row's readings (:func:`derived_figures`) is defined here once, for those who write rows and for
those who check them. Units are in the names: ``*_s`` seconds, ``*_bytes`` bytes; what is not known is null.
"""

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from poros.errors import ResultError
from poros.evidence.engines.base import Status
from poros.evidence.files import replace_file
from poros.evidence.limits import MAX_BATCH, MAX_LAYERS, MAX_RANK, MAX_SEED, MAX_SEQ_LEN, MAX_STEPS
from poros.evidence.lines import LineError, numbered_lines, parse_line, printable

WORST_FIRST = ("FAIL", "INCONCLUSIVE", "PASS")  # of verdicts
OF_THE_CARD = ("gpu", "gpu_uuid", "driver", "link", "gpu_memory_bytes")
PLACE = ("host", *OF_THE_CARD, "poros_commit")  # what rows that stand side by side have in common
_MAX_PROBLEMS = 8  # an error message has to fit one screen

_Meter = Annotated[int, Field(ge=0, lt=2**60)]
_Size = Annotated[int, Field(gt=0, lt=2**60)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class Lora(_Part):
    """Settings of the adapters."""

    rank: Annotated[int, Field(ge=1, le=MAX_RANK)]
    alpha: Annotated[float, Field(gt=0, le=1e6)]
    dropout: Annotated[float, Field(ge=0, lt=1)]
    targets: str | list[str]


class Dataset(_Part):
    """What was learnt from."""

    name: Literal["synthetic", "rows"]
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    sha256: str | None = None
    """Of all token ids that the run used."""
    path: str | None = None


class _Peaks(_Part):
    allocated_bytes: _Meter | None = None
    """The most that the allocator had handed out on the card."""
    reserved_bytes: _Meter | None = None
    """The most that the allocator had taken of the card."""
    process_bytes: _Meter | None = None
    """The whole process on the card, with its CUDA context, as the driver counts it."""
    host_peak_bytes: _Meter | None = None
    """The largest resident set of the process."""
    host_locked_bytes: _Meter | None = None
    """Host memory that was page-locked."""


class Memory(_Peaks):
    """Peaks of one pass."""


class Surfaces(_Part):
    """On which surfaces every tensor was bitwise equal at every step."""

    loss: bool
    gradients: bool
    grad_norm: bool
    adapters: bool
    optimizer: bool
    rng: bool


class Comparison(_Part):
    """Two comparisons with the resident run: the streamed run, and the resident run's repetition."""

    streamed: Surfaces
    control: Surfaces


class FirstDifference(_Part):
    """Where two runs first were not equal."""

    step: int
    surface: str
    tensor: str | None = None
    index: int | list[int] | None = None
    expected: bool | int | float | str | None = None
    found: bool | int | float | str | None = None
    expected_bits: str | None = None
    found_bits: str | None = None


class _Identity(_Part):
    row_schema: Literal[1] = 1
    kind: str
    run_id: str
    """Shared by the rows of one side-by-side run."""
    cell: str
    """Unique in its run; the same in another run of the same spec."""
    model: str
    """Name of a shape, hub id, or folder."""
    weights: Literal["random", "real"]
    family: str | None = None
    """The configuration's ``model_type``."""
    method: str
    label: str
    """What tables call the method with its settings."""
    changes: list[str] = []
    """What the method changes against plain resident QLoRA."""
    engine: Literal["eager", "replay"] | None = None
    path: Literal["fast", "strict", "math"]
    """Which attention kernels were allowed: any, deterministic ones, or only the plain one."""


class _Settings(_Part):
    device: Literal["cpu", "cuda"] | None = None
    attention: str | None = None
    quantization: Literal["nf4"] | None = None
    double_quant: bool
    dtype: Literal["bfloat16", "float16", "float32"]
    seq_len: Annotated[int, Field(ge=1, le=MAX_SEQ_LEN)]
    batch_size: Annotated[int, Field(ge=1, le=MAX_BATCH)]
    accumulation: Annotated[int, Field(ge=1, le=MAX_BATCH)]
    lora: Lora
    block_size: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None
    slots: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None
    resident_blocks: Annotated[int, Field(ge=0, le=MAX_LAYERS)] | None = None
    budget_bytes: _Size | None = None
    dataset: Dataset
    learning_rate: Annotated[float, Field(gt=0, le=1000)]
    max_grad_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    optimizer: Literal["adamw"] = "adamw"
    options: dict[str, Any] = {}
    """Settings that only this method knows."""
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)]
    """Counted optimizer steps."""
    warmup_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    """Optimizer steps before the counted ones."""
    num_passes: Annotated[int, Field(ge=1, le=MAX_STEPS)] = 1


class _SpeedResult(_Peaks):
    status: Status
    reason: str | None = None
    """Why there is no figure; null if there is one."""
    passes: list[list[float]]
    """Seconds of every counted step of each pass."""
    s_per_step: float | None = None
    """Median of the passes' medians."""
    s_per_step_std: float | None = None
    """Standard deviation of the passes' medians; null with one pass."""
    losses: list[list[float]]
    """Loss of every optimizer step of each pass, warm-up included; an empty list for a method that computes none."""
    pass_memory: list[Memory]
    tokens_per_s: float | None = None


class _ParityResult(_Peaks):
    verdict: Literal["PASS", "FAIL", "INCONCLUSIVE"]
    reason: str | None = None
    """Why the verdict is not PASS."""
    max_abs_difference: float | None = None
    surfaces: Comparison
    first_difference: FirstDifference | None = None
    control_steps: int
    """Steps in which the resident run's repetition was compared too."""
    num_gradients: int
    """Gradients compared in a step."""
    losses: list[float]
    wall_s: float


class _Provenance(_Part):
    time_utc: str
    gpu: str | None = None
    gpu_uuid: str | None = None
    driver: str | None = None
    link: str | None = None
    gpu_memory_bytes: _Size | None = None
    host: str
    versions: dict[str, str | None]
    poros_commit: str | None = None


# Fields come in the order of the bases from the last to the first: a row reads from what it is to where it was taken.
class SpeedRow(_Provenance, _SpeedResult, _Settings, _Identity):
    """Seconds a step and peak memory of one method on one model."""

    kind: Literal["speed"] = "speed"

    @classmethod
    def from_passes(cls, **fields: Any) -> "SpeedRow":
        """The row of ``fields``, completed by what its passes give; ``fields`` hold no derived figure.

        Raises:
            ResultError: a field is missing, unknown, or of the wrong type.
        """
        fields = json.loads(json.dumps(fields))  # tuples become lists, as in the file
        if fields.get("device") == "cpu":  # the card of a host that has one had no part in it
            fields |= dict.fromkeys(OF_THE_CARD)
        keys = ("status", "passes", "pass_memory", "seq_len", "batch_size", "accumulation")
        missing = [key for key in keys if key not in fields]
        if missing:
            raise ResultError(f"a speed row needs {', '.join(missing)}")
        figures = derived_figures(*(fields[key] for key in keys))
        try:
            return cls.model_validate(fields | figures)
        except ValidationError as error:
            raise ResultError(_listed([f"row: {key} {why}" for key, why in _faults(error)])) from None


class ParityRow(_Provenance, _ParityResult, _Settings, _Identity):
    """Whether a streamed run gave the bits of its resident twin."""

    kind: Literal["parity"] = "parity"


Row = SpeedRow | ParityRow
_KINDS: dict[str, type[SpeedRow] | type[ParityRow]] = {"speed": SpeedRow, "parity": ParityRow}


def pass_median(seconds: Sequence[float]) -> float:
    """The figure of one pass."""
    return statistics.median(seconds)


def derived_figures(
    status: str,
    passes: Sequence[Sequence[float]],
    pass_memory: Sequence[Any],
    seq_len: int,
    batch_size: int,
    accumulation: int,
) -> dict[str, float | int | None]:
    """All that a speed row says which follows from its readings, by key; all null if the status is not ``"ok"``.

    Args:
        passes: seconds of every counted step of each pass.
        pass_memory: for each pass, a mapping or :class:`Memory`.
    """
    memory = [dict(one) for one in pass_memory]
    keys = list(Memory.model_fields)
    if status != "ok" or not passes or not all(passes):
        return dict.fromkeys(["s_per_step", "s_per_step_std", "tokens_per_s", *keys])
    medians = [pass_median(seconds) for seconds in passes]
    s_per_step = statistics.median(medians)
    return {
        "s_per_step": s_per_step,
        "s_per_step_std": statistics.stdev(medians) if len(medians) > 1 else None,
        "tokens_per_s": seq_len * batch_size * accumulation / s_per_step if s_per_step else None,
        **{key: max((one[key] for one in memory if one.get(key) is not None), default=None) for key in keys},
    }


@dataclass(frozen=True)
class Line:
    """A line of a file of rows.

    Attributes:
        cell: What it says that its cell is, whether or not it is a row.
        row: None if it is none.
        faults: What keeps it from being a row: pairs of a key's path and an explanation.
    """

    number: int
    cell: str | None
    row: Row | None
    faults: list[tuple[str, str]]


def read_lines(path: str | Path) -> list[Line]:
    """The lines of a file of rows, in order, without the blank ones.

    Raises:
        ResultError: the file cannot be read, or is empty.
    """
    return [_read_line(number, text) for number, text in numbered_lines(path)]


def read_rows(*paths: str | Path) -> list[Row]:
    """The rows of files of JSON lines, in order.

    Raises:
        ResultError: a file cannot be read, is empty, or holds something other than rows; names file and line.
    """
    rows: list[Row] = []
    for path in paths:
        for line in read_lines(path):
            if line.row is None:
                faults = [printable(f"{path}:{line.number}: {key} {why}") for key, why in line.faults]
                raise ResultError(_listed(faults))
            rows.append(line.row)
    return rows


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Write a file of rows at once."""
    replace_file(Path(path), "".join(json.dumps(row.model_dump()) + "\n" for row in rows).encode())


def append_row(path: str | Path, row: Row) -> None:
    """Add one row at the end of a file of rows, on a line of its own whatever the file ends with."""
    with Path(path).open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write((json.dumps(row.model_dump()) + "\n").encode())


def json_schema() -> dict[str, Any]:
    """The published JSON Schema of a row."""
    adapter: TypeAdapter[Row] = TypeAdapter(Annotated[SpeedRow | ParityRow, Field(discriminator="kind")])
    schema = adapter.json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A row of results of Poros", **schema}


def _read_line(number: int, text: bytes) -> Line:
    try:
        fields = parse_line(text)
    except LineError as error:
        return Line(number, None, None, [("the line", str(error))])
    cell = fields.get("cell") if isinstance(fields, dict) else None
    return Line(number, cell if isinstance(cell, str) else None, *_parse_row(fields))


def _parse_row(fields: Any) -> tuple[Row | None, list[tuple[str, str]]]:
    if not isinstance(fields, dict):
        return None, [("row", "is not a JSON object")]
    if "row_schema" not in fields:
        return None, [("row_schema", f"is missing: the row is older than the published schema.{_lacking(fields)}")]
    kind = _KINDS.get(str(fields.get("kind")))
    if kind is None:
        return None, [("kind", f"is {fields.get('kind')!r}; it should be {' or '.join(_KINDS)}")]
    try:
        return kind.model_validate(fields), []
    except ValidationError as error:
        return None, _faults(error)


def _lacking(fields: dict[str, Any]) -> str:
    kind = _KINDS.get(str(fields.get("kind")))
    wanted = kind.model_fields.items() if kind else ()
    lacking = [name for name, field in wanted if field.is_required() and name not in fields]
    return f" It lacks {', '.join(lacking)}." if lacking else ""


def _faults(error: ValidationError) -> list[tuple[str, str]]:
    return [(".".join(map(str, detail["loc"])), _explain(detail)) for detail in error.errors()]


def _explain(detail: Any) -> str:
    if detail["type"] == "missing":
        return "is missing"
    if detail["type"] == "extra_forbidden":
        return "is no key of a row"
    found = json.dumps(detail["input"], default=repr)
    message = str(detail["msg"])
    return f"is {found if len(found) <= 60 else found[:57] + '...'}; {message[0].lower()}{message[1:]}"


def _listed(lines: list[str]) -> str:
    more = len(lines) - _MAX_PROBLEMS
    return "\n".join(lines if more <= 0 else [*lines[:_MAX_PROBLEMS], f"... and {more} more"])
