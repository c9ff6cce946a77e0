"""The file that a command adds rows to: tried before anything is measured, and never the end of what was."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from poros.errors import ConfigError

if TYPE_CHECKING:
    from poros.evidence.artifact import Row


def require_writable(path: Path, option: str) -> None:
    """Refuse a file that rows cannot be added to; leaves everything as it was.

    Raises:
        ConfigError: it is a folder, lies in none, or may not be written.
    """
    there = path.exists()
    try:
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"{option} {str(path)!r} cannot be written: {error.strerror}. Give a file in a folder that exists."
        ) from None


def add_row(path: Path, row: "Row") -> None:
    """Add a row at the end of a file of rows, on a line of its own whatever the file ends with."""
    from poros.evidence.artifact import append_row

    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    append_row(path, row)


def spare_file() -> Path:
    """A file in the folder for temporary files, for rows that could not be put where they should be."""
    handle, name = tempfile.mkstemp(prefix="poros-rows-", suffix=".jsonl")
    os.close(handle)
    return Path(name)
