"""Bytes and seconds, to and from what people write."""

import re

from poros.errors import ConfigError

_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str | int) -> int:
    """Read ``"11GiB"``, ``"500 MB"`` or a plain number of bytes; raise :class:`ConfigError` for anything else."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _BYTES:
        raise ConfigError(f"{text!r} is not an amount of memory; write it like '11GiB' or '500MB'")
    return int(float(match[1]) * _BYTES[match[2].upper()])


def format_bytes(num_bytes: float) -> str:
    """Write a byte count in the largest binary unit that keeps it at or above one: ``251.6 MiB``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """Write a duration as a person would read it: ``0.62 s``, ``4 min 10 s``, ``2 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
