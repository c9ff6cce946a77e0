"""Whether one row's settings, method, names and place can be, and agree with each other.

What a single setting may be is said by the row's fields, and is no matter here.
"""

import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from poros.evidence.artifact import OF_THE_CARD, Row, SpeedRow
from poros.evidence.engines.base import METHODS, SIZES, Engine, describe, label_fault, slug
from poros.evidence.provenance import unix_time
from poros.model.shapes import read_shape, shape_names

Found = Iterator[tuple[str, str]]  # a key, and what is wrong with its value

_CLOCK_SLACK_S = 24 * 3600  # a clock may be wrong by a time zone, not by more
_FIRST_DAY = datetime(2025, 1, 1, tzinfo=UTC)  # no row is older than the schema
_NAMES = (
    *("run_id", "cell", "model", "family", "method", "label", "attention"),
    *("host", "gpu", "gpu_uuid", "driver", "link", "time_utc", "poros_commit"),
)
_COMMIT = re.compile(r"[0-9a-f]{7,64}(\+(changes|[0-9a-f]{8}))?")  # the hash of what is not committed
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ADDED_OPTIONS = ("module", "num_threads", "replayed_layers")  # which no spec gives, so that no cell is named for them
_STANDARD_CELL = re.compile(
    rf"(?P<method>{'|'.join(sorted(METHODS, key=len, reverse=True))})(-bs(?P<block_size>\d+))?(-s(?P<slots>\d+))?"
    r"(-r(?P<resident_blocks>\d+))?(-(?P<engine>eager|replay))?"
)
_PARITY_CELL = re.compile(
    r"parity-(?P<path>[a-z]+)(-bs(?P<block_size>\d+)x(?P<slots>\d+))?(-r(?P<resident_blocks>\d+))?(-acc(?P<accumulation>\d+))?"
    r"(-(?P<engine>replay))?(-.*)?"
)


def setting_problems(row: Row) -> Found:
    """All that is wrong with a row but for its readings."""
    yield from _names(row)
    yield from _data(row)
    yield from _device(row)
    yield from _provenance(row)
    if row.method not in METHODS:
        yield "method", f"is {row.method!r}; there are {', '.join(METHODS)}"
        return
    yield from _label(row)
    yield from _cell(row)
    if "module" not in row.options:  # an engine of the user's own, of which nothing is known here
        yield from _engine(row, describe(row.method))


def _names(row: Row) -> Found:
    for key in _NAMES:
        value = getattr(row, key)
        if value is None:
            continue
        if value != value.strip() or not value:
            yield key, f"is {value!r}; a name neither is empty nor begins or ends with a blank"
        elif not value.isprintable():
            yield key, f"is {value!r}; a name has no control characters"
    targets = [row.lora.targets] if isinstance(row.lora.targets, str) else row.lora.targets
    if not targets or not all(targets):
        yield "lora.targets", f"is {row.lora.targets!r}; it should name what gets an adapter"
    others = {"lora.targets": targets, "versions": [*row.versions, *filter(None, row.versions.values())]}
    for key, values in others.items():
        if odd := [value for value in values if not value.isprintable() or value != value.strip()]:
            yield key, f"holds {odd[0]!r}; a name has no control characters, and no blanks around it"
    if row.weights == "real" and row.model in shape_names():
        yield "weights", f"is 'real', but {row.model} is the name of a shape, which has no weights"
    if row.model in shape_names() and row.family not in (None, family := read_shape(row.model)["model_type"]):
        yield "family", f"is {row.family!r}; the shape {row.model} is of {family!r}"


def _data(row: Row) -> Found:
    data = row.dataset
    if (data.name == "synthetic") != (data.path is None):
        yield "dataset.path", f"is {data.path!r}, but the data are {data.name}; a file's rows have one, no others"
    if data.sha256 is None:
        if _has_result(row):
            yield "dataset.sha256", "is null; a row with a result says which tokens it rests on"
    elif not _SHA256.fullmatch(data.sha256):
        yield "dataset.sha256", f"is {data.sha256!r}; it should be 64 hexadecimal digits"


def _device(row: Row) -> Found:
    """A row of a card names it, and one of a CPU has nothing to do with any."""
    if row.device is None and _has_result(row):
        yield "device", "is null; a row with a result says where it was computed"
    for key in ("gpu", "gpu_memory_bytes"):
        if row.device == "cuda" and getattr(row, key) is None and _has_result(row):
            yield key, "is null; a row measured on a card names it"
    if row.device == "cpu" and row.engine == "replay" and _has_result(row):
        yield "engine", "is 'replay', but the device is the CPU, where there are no graphs to replay"
    for key in OF_THE_CARD:
        if row.device == "cpu" and getattr(row, key) is not None:
            yield key, f"is {getattr(row, key)!r}, but the device is the CPU"


def _has_result(row: Row) -> bool:
    return not isinstance(row, SpeedRow) or row.status == "ok"


def _provenance(row: Row) -> Found:
    if row.poros_commit is not None and not _COMMIT.fullmatch(row.poros_commit):
        yield "poros_commit", f"is {row.poros_commit!r}; it should be hexadecimal: COMMIT or COMMIT+CHANGES"
    if not row.versions.get("torch"):
        yield "versions", f"is {row.versions}; it should name torch at least"
    try:
        taken = unix_time(row.time_utc)
    except ValueError:
        yield "time_utc", f"is {row.time_utc!r}; it should read like 2026-01-31T12:00:00Z"
        return
    if taken > time.time() + _CLOCK_SLACK_S:
        yield "time_utc", f"is {row.time_utc}, which has not come yet"
    if taken < _FIRST_DAY.timestamp():
        yield "time_utc", f"is {row.time_utc}, before there were such rows"


def _label(row: Row) -> Found:
    """What tables call the row must not be what they call another."""
    fault = label_fault(row.label, row.method, {name: getattr(row, name) for name in SIZES})
    if fault is not None:
        yield "label", fault


def _cell(row: Row) -> Found:
    """A cell is its model's, and what it says of the settings is so."""
    prefix = f"{row.model}/"
    name = row.cell.removeprefix(prefix)
    if not row.cell.startswith(prefix) or not name:
        yield "cell", f"is {row.cell!r}; it should begin with the model and a slash: {prefix}"
        return
    if isinstance(row, SpeedRow):
        said = _STANDARD_CELL.fullmatch(name.removesuffix(_options_in_cell(row.options)))
    else:
        said = _PARITY_CELL.fullmatch(name)
        if said is None:
            yield "cell", f"is {row.cell!r}; that of a parity row reads like {row.model}/parity-strict"
    for key, value in (said.groupdict() if said else {}).items():
        if value is not None and value != str(getattr(row, key)):
            yield "cell", f"is {row.cell!r}, but {key} is {getattr(row, key)}"


def _options_in_cell(options: dict[str, Any]) -> str:
    parts = (f"{name}-{value}" for name, value in options.items() if name not in _ADDED_OPTIONS)
    return "".join("-" + slug(part) for part in parts)


def _engine(row: Row, engine: Engine) -> Found:
    """What the method is known to change, to take, and to be launched by."""
    if row.changes != [*engine.changes]:
        yield "changes", f"is {row.changes}; {row.method} changes {[*engine.changes]}"
    if row.engine not in (engine.launches or (None,)) and (_has_result(row) or row.engine is not None):
        those = " or ".join(map(shown, engine.launches or (None,)))
        yield "engine", f"is {shown(row.engine)}; that of {row.method} is {those}"
    for key in SIZES:
        if getattr(row, key) and key not in engine.settings:
            yield key, f"is {getattr(row, key)}; {row.method} has none"
    if engine.dropout is not None and row.lora.dropout != engine.dropout:
        yield "lora.dropout", f"is {row.lora.dropout}; {row.method} takes {engine.dropout} only"


def shown(value: Any) -> str:
    """A value as a message has it."""
    return "null" if value is None else repr(value)
