"""Checkpoints on disk: written whole or not at all, and found again.

[Note: whole or not at all]
A folder is filled under a temporary name, every file is flushed to the disk, and only then is the folder renamed, which
the file system does in one instant. The manifest, written last, lists the size of every file, so a folder that was
copied by halves is not taken for a checkpoint either. Whatever instant a run is killed at, the newest complete
checkpoint is one that an optimizer step really ended with.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from poros.errors import PorosError

MANIFEST = "poros_checkpoint.json"
ADAPTER = "adapter"  # the folder of the finished adapter, beside the checkpoints

_PROGRESS = "trainer_state.json"
_FOR_RESUMING = {MANIFEST, _PROGRESS, "optimizer.pt", "scheduler.pt", "rng_state.pth"}
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    step: int
    settings: dict[str, Any]  # what the run's bits depend on
    versions: dict[str, str]  # of the libraries that computed them

    def losses(self) -> list[float]:
        """The losses that the run reported up to this step."""
        return [entry["loss"] for entry in self._progress()["log_history"] if "loss" in entry]

    def is_last(self) -> bool:
        """Whether the run was over with this step."""
        return bool(self.step >= self._progress()["max_steps"])

    def _progress(self) -> dict[str, Any]:
        progress: dict[str, Any] = json.loads((self.folder / _PROGRESS).read_text(encoding="utf-8"))
        return progress


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes ``final`` when the block ends without an error. See the note above.

    Raises:
        PorosError: writing failed, for instance because the disk is full; then nothing of it is left.
    """
    partial, before = (final.with_name(f".{final.name}{kind}.partial") for kind in ("", ".before"))
    try:
        for leftover in partial, before:
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in [*partial.rglob("*"), partial]:
            _flush(path)
        if final.exists():
            final.rename(before)  # deleting it in its place could be cut short
        partial.rename(final)
        _flush(final.parent)
    except Exception as error:
        if not _is_failed_write(error):
            raise
        raise PorosError(
            f"{final}: could not be written: {_reason(error)}. Nothing half-written is left, and what was saved before "
            "is untouched. Free some space or set output to another disk, then run again (with --resume if there is a "
            "checkpoint)."
        ) from error
    finally:
        for leftover in partial, before:
            shutil.rmtree(leftover, ignore_errors=True)


def write_manifest(folder: Path, step: int, settings: Mapping[str, Any], versions: Mapping[str, str]) -> None:
    """Say what ``folder`` holds; after this, nothing may be added to it."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    content = {"step": step, "settings": dict(settings), "versions": dict(versions), "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def export_adapter(checkpoint: Checkpoint, final: Path) -> None:
    """Save the adapter of ``checkpoint`` as ``final``, without what only resuming needs."""
    with whole_folder(final) as folder:
        for path in checkpoint.folder.iterdir():
            if path.name not in _FOR_RESUMING:
                shutil.copyfile(path, folder / path.name)


def checkpoint_folder(output: Path, step: int) -> Path:
    """Where the checkpoint of a step goes."""
    return output / f"checkpoint-{step}"


def complete_checkpoints(output: Path) -> list[Checkpoint]:
    """The complete checkpoints in ``output``, oldest first."""
    if not output.is_dir():
        return []
    found = [_read(folder) for folder in output.iterdir() if _NAME.fullmatch(folder.name)]
    return sorted((checkpoint for checkpoint in found if checkpoint is not None), key=lambda found: found.step)


def damaged_checkpoints(output: Path) -> list[Path]:
    """Folders in ``output`` that have a checkpoint's name and are not complete, oldest first."""
    complete = {checkpoint.folder for checkpoint in complete_checkpoints(output)}
    named = {folder: match for folder in output.iterdir() if (match := _NAME.fullmatch(folder.name))}
    return sorted((folder for folder in named if folder not in complete), key=lambda folder: int(named[folder][1]))


def delete_older(output: Path, keep: int) -> None:
    """Delete all checkpoints but the newest ``keep``, and what is left of incomplete ones."""
    kept = {checkpoint.folder for checkpoint in complete_checkpoints(output)[-keep:]}
    for folder in list(output.iterdir()):
        if _NAME.fullmatch(folder.name) and folder not in kept:
            (folder / MANIFEST).unlink(missing_ok=True)  # first, so that half a folder is no checkpoint
            shutil.rmtree(folder)


def delete_run(output: Path) -> None:
    """Delete the checkpoints and the adapter that an earlier run left in ``output``, and nothing else."""
    for path in list(output.iterdir()) if output.is_dir() else []:
        if path.is_dir() and (_NAME.fullmatch(path.name) or path.name == ADAPTER):
            shutil.rmtree(path)


def delete_partial(output: Path) -> None:
    """Delete what a killed run was writing."""
    for path in list(output.iterdir()) if output.is_dir() else []:
        if is_partial(path):
            shutil.rmtree(path)


def is_partial(path: Path) -> bool:
    """Whether ``path`` is a folder that was being written when its run was killed."""
    return path.name.startswith(".") and path.name.endswith((".partial", ".tmp"))


def _read(folder: Path) -> Checkpoint | None:
    """The checkpoint in ``folder``, or None if it is not complete."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        complete = all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
        return (
            Checkpoint(folder, int(manifest["step"]), dict(manifest["settings"]), dict(manifest["versions"]))
            if complete
            else None
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_failed_write(error: Exception) -> bool:
    """A full disk is a RuntimeError to torch, an error of its own to safetensors, and a bare one to tokenizers."""
    return isinstance(error, (OSError, RuntimeError, SafetensorError)) or type(error) is Exception


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error).strip().splitlines()[0]
    free = " (is the disk full?)" if "write" in text.lower() else ""
    return f"{text}{free}"
