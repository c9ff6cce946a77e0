"""Reads rows from a JSONL file: what a row may look like, and what is wrong with one that does not."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from poros.errors import DataError

Kind = Literal["messages", "prompt", "text"]

# kind of row -> the fields that make it one
FIELDS: dict[Kind, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "text": ("text",),
}
_ROLES = ("system", "user", "assistant", "tool", "developer")  # that chat templates know

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

_WANTED = "a row needs 'messages', or 'prompt' and 'completion', or 'text'"


class RowError(Exception):
    """Why one row cannot be used. Whoever reads the file adds its name and the line."""


@dataclass(frozen=True)
class Row:
    """One line of the file, its fields checked for their types."""

    kind: Kind
    fields: dict[str, Any]


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The file's lines that are not blank, with their numbers from 1. Only one is in memory at a time."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                stripped = line.strip().removeprefix(b"\xef\xbb\xbf")
                if stripped:
                    yield number, stripped
    except FileNotFoundError:
        raise DataError(f"{path}: no such file. Set data.train or data.eval to a JSONL file, one row a line.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. A JSONL file is needed.") from None


def parse_row(line: bytes, format: Literal["auto"] | Kind = "auto") -> Row:
    """Read one line.

    Raises:
        RowError: not UTF-8, not a JSON object, or without the fields that ``format`` needs.
    """
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise RowError(f"not valid JSON: {error.msg} at column {error.colno}; JSONL has one object a line") from None
    except RecursionError:
        raise RowError("not usable JSON: nested too deeply") from None
    if _SURROGATE.search(line):
        _check_unicode(row)
    if not isinstance(row, dict):
        raise RowError(f"a JSON {_json_type(row)}, not an object with fields; {_WANTED}")
    kind = _kind(row) if format == "auto" else format
    missing = [name for name in FIELDS[kind] if name not in row]
    if missing:
        raise RowError(f"no field {missing[0]!r}; {_has(row)}")
    if kind == "messages":
        _check_messages(row["messages"])
    else:
        for name in FIELDS[kind]:
            if not isinstance(row[name], str):
                raise RowError(f"{name!r} is a JSON {_json_type(row[name])}; it must be text")
    return Row(kind, row)


def _kind(row: dict[str, Any]) -> Kind:
    found: list[Kind] = [kind for kind, names in FIELDS.items() if all(name in row for name in names)]
    if not found:
        raise RowError(f"{_WANTED}; {_has(row)}")
    if len(found) > 1:
        raise RowError(f"has the fields of several formats ({', '.join(found)}); set data.format to the one to use")
    return found[0]


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list):
        raise RowError(f"'messages' is a JSON {_json_type(messages)}; it must be a list of messages")
    for position, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f"message {position} must be an object with a 'role' and a 'content'")
        role = message["role"]
        if role not in _ROLES and get_close_matches(role.lower(), _ROLES, cutoff=0.75):
            meant = get_close_matches(role.lower(), _ROLES, n=1)[0]
            raise RowError(f"message {position} has the role {role!r}; did you mean {meant!r}?")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise RowError(f"the content of message {position} is a JSON {_json_type(content)}; it must be text")


def _check_unicode(row: Any) -> None:
    """JSON can write half a character, ``\\ud83d`` alone, which no tokenizer takes."""
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise RowError("holds half of a surrogate pair (\\ud800 to \\udfff), which is not Unicode text") from None


def _has(row: dict[str, Any]) -> str:
    names = [repr(name) if len(name) <= 30 else repr(name[:27] + "...") for name in list(row)[:6]]
    return f"this one has {', '.join(names)}" if names else "this one is empty"


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "number")
