"""Files of JSON lines read strictly: whatever JSON allows and nobody can mean is refused with its reason."""

import json
import math
from pathlib import Path
from typing import Any

from poros.errors import ResultError

_MAX_DEPTH = 16  # a row needs five; far below where Python's own recursion ends
_MAX_DIGITS = 19  # of an integer: what 64 bits hold
_MAX_SHOWN = 400  # characters of a file in a message
_BOM = b"\xef\xbb\xbf"


class LineError(ValueError):
    """A line is not JSON, or JSON that means nothing; says why."""


def numbered_lines(path: str | Path) -> list[tuple[int, bytes]]:
    r"""Every line of a file that is not blank, with its number. Lines end at ``\n`` and nowhere else.

    Raises:
        ResultError: the file cannot be read, or holds no line.
    """
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ResultError(f"cannot read {printable(path)}: {getattr(error, 'strerror', None) or error}") from None
    lines = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    if not lines:
        raise ResultError(f"{printable(path)} holds no rows")
    return lines


def parse_line(line: bytes) -> Any:
    """What a line says in JSON.

    Raises:
        LineError: it is not UTF-8 or not JSON; or a key is there twice, a number is not finite or has too many digits,
            a text is none (half a surrogate pair), or the nesting is too deep.
    """
    if line.startswith(_BOM):
        raise LineError("begins with a byte order mark; rows are plain UTF-8")
    try:
        value = json.loads(
            line.decode("utf-8"),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_constant,
        )
    except UnicodeDecodeError as error:
        raise LineError(f"is not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise LineError(f"is not JSON: {error}") from None
    except RecursionError:
        raise LineError(f"is nested more than {_MAX_DEPTH} levels deep") from None
    _require_sane(value)
    return value


def printable(text: object, most: int = _MAX_SHOWN) -> str:
    """``text`` for a terminal: one line, no control characters, no half surrogate pairs, not longer than ``most``."""
    shown = str(text)
    shown = shown if len(shown) <= most else shown[:most] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise LineError(f"has the key {twice!r} twice")
    return fields


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > _MAX_DIGITS:
        raise LineError(f"holds an integer of {len(digits)} digits; {_MAX_DIGITS} are the most")
    return int(digits)


def _number(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise LineError(f"holds {digits[:40]}, which is more than a number can be")
    return number


def _constant(name: str) -> float:
    raise LineError(f"holds {name}, which is no number in JSON")


def _require_sane(value: Any) -> None:
    """Walk without recursion, level by level."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise LineError(f"is nested more than {_MAX_DEPTH} levels deep")
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += [*one.keys(), *one.values()]
            elif isinstance(one, list):
                inner += one
            elif isinstance(one, str) and any("\ud800" <= c <= "\udfff" for c in one):
                raise LineError(f"holds {one[:40]!r}, half of a surrogate pair, which is no text")
        level = inner
