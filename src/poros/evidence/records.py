"""The records of passes: written in one step, read with care, and never mixed with those of another place.

A record is a JSON object: ``cell``, ``number`` of the pass, ``status``, ``reason``, ``seconds``, ``losses``,
``memory``, ``facts``, ``setup_s``, ``wall_s`` and ``provenance``.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from poros.errors import ConfigError
from poros.evidence.artifact import PLACE
from poros.evidence.engines.base import Status, describe
from poros.evidence.files import replace_file
from poros.evidence.limits import MAX_RUN_S
from poros.evidence.provenance import provenance_of_new_process, unix_time

Record = dict[str, Any]

_THREADS = ("num_threads", "omp_num_threads", "usable_cores")


class _Readings(BaseModel):
    """What every record holds; more does no harm."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    cell: str
    number: int
    status: Status
    reason: str | None
    seconds: list[Annotated[float, Field(gt=0)]]
    losses: list[float]
    memory: dict[str, int | None] | None
    facts: dict[str, Any]
    setup_s: float | None
    provenance: dict[str, Any]

    @field_validator("provenance")
    @classmethod
    def _has_a_time(cls, value: dict[str, Any]) -> dict[str, Any]:
        unix_time(str(value.get("time_utc")))
        return value


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file at once."""
    replace_file(path, json.dumps(content, indent=1, allow_nan=False).encode())


def read_json(path: Path, way_out: str) -> Any:
    """The content of a JSON file; ``way_out`` ends the message of the :class:`ConfigError` for one that has none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. {way_out}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {str(error) or 'not JSON'}. {way_out}") from None


def read_record(path: Path, cell: str, number: int, steps: int) -> Record:
    """The record of pass ``number`` of ``cell``.

    Raises:
        ConfigError: the file is damaged, or is the record of another pass.
    """
    way_out = "Delete the file to have the pass measured again."
    record = read_json(path, way_out)
    try:
        known = _Readings.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise ConfigError(f"{path} is damaged: {where}: {first['msg']}. {way_out}") from None
    if (known.cell, known.number) != (cell, number):
        raise ConfigError(
            f"{path} should be pass {number} of {cell}, but is pass {known.number} of {known.cell}. {way_out}"
        )
    if known.status == "ok" and (len(known.seconds) != steps or known.memory is None):
        raise ConfigError(f"{path} is damaged: it has {len(known.seconds)} of {steps} counted steps. {way_out}")
    found: Record = record
    return found


def threads_asked_for(environment: Mapping[str, str]) -> dict[str, Any]:
    """What a process with ``environment`` makes the number of its threads from."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"omp_num_threads": environment.get("OMP_NUM_THREADS"), "usable_cores": usable}


def expected_here(cell: str, method: str, module: str | None, folder: str | None) -> Record:
    """A record as a pass would begin it here and now: its place, and nothing measured. Imports no torch on a CPU."""
    engine = describe(method, module)
    facts = threads_asked_for({**os.environ, **engine.environment})
    return {"cell": cell, "facts": facts, "provenance": provenance_of_new_process(engine.packages, folder)}


def require_same_place(record: Record, others: Iterable[Record], own_packages: Mapping[str, bool], out: Path) -> None:
    """Refuse a pass that is, or would be, of another place than those that there are.

    Args:
        record: of the pass, as far as it is known.
        own_packages: cell -> whether it has a folder of packages, and so versions, of its own.
        out: what cannot be finished, for the message.

    Raises:
        ConfigError: host, GPU, commit, versions, threads or data are not the same, or the two are days apart.
    """
    for other in others:
        if abs(_taken_at(record) - _taken_at(other)) > MAX_RUN_S:
            began = other["provenance"]["time_utc"]
            raise ConfigError(
                f"{out} cannot be finished any more: {other['cell']} was measured at {began}, and passes of one run "
                f"are at most {MAX_RUN_S / 86400:g} days apart. Start in a new folder."
            )
        difference = next(_differences(other, record, own_packages), None)
        if difference is not None:
            key, was, now = difference
            raise ConfigError(
                f"{out} cannot be finished here: {key} is {now!r}, and was {was!r} when {other['cell']} was measured. "
                "Passes of two places are not compared: go back to what it was, or start in a new folder."
            )


def _differences(
    one: Record, other: Record, own_packages: Mapping[str, bool]
) -> Iterator[tuple[str, Any, Any]]:  # key, value of one, value of the other
    for key in PLACE:
        yield from _unequal(key, one["provenance"].get(key), other["provenance"].get(key))
    both = [record["facts"] for record in (one, other)]
    for key in _THREADS:
        if all(key in facts for facts in both):
            yield from _unequal(key, *(facts[key] for facts in both))
    if one["cell"] == other["cell"] or not (own_packages[one["cell"]] or own_packages[other["cell"]]):
        versions = [record["provenance"].get("versions") or {} for record in (one, other)]
        for package in versions[0]:
            if package in versions[1]:
                yield from _unequal(f"the version of {package}", *(some[package] for some in versions))
    if _model(one) == _model(other):
        digests = [(facts.get("dataset") or {}).get("sha256") for facts in both]
        if all(digests):
            yield from _unequal("dataset.sha256", *digests)


def _taken_at(record: Record) -> float:
    return unix_time(record["provenance"]["time_utc"])


def _model(record: Record) -> str:
    return str(record["cell"]).rpartition("/")[0]


def _unequal(key: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if was != now:
        yield key, was, now
