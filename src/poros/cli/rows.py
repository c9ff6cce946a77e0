"""The file that a command adds rows to: tried before anything is measured, and never the end of what was."""

import os
import tempfile
from pathlib import Path

from poros.errors import ConfigError


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


def spare_file() -> Path:
    """A file in the folder for temporary files, for rows that could not be put where they should be."""
    handle, name = tempfile.mkstemp(prefix="poros-rows-", suffix=".jsonl")
    os.close(handle)
    return Path(name)
