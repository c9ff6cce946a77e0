"""Writing a file at once: a reader finds the old one or the new one, never a part. Imports nothing heavy."""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Let the file at ``path`` hold ``content``; if that fails, it is what it was, and nothing is left beside it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
