"""The output folder of a run: may it be used, and what is in it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from poros.errors import ConfigError
from poros.train.checkpoints import Checkpoint, complete_checkpoints, is_partial

_LOCK = ".poros.lock"


@contextmanager
def claimed_output(output: Path, *, resume: bool, overwrite: bool) -> Iterator[Checkpoint | None]:
    """Hold ``output`` for one run. Nothing in it is changed; a folder made for it goes again if it stays empty.

    Yields:
        With ``resume``, the newest complete checkpoint.

    Raises:
        ConfigError: it is a file or cannot be written, another run is writing there, it holds something and neither
            ``resume`` nor ``overwrite`` is given, or there is nothing to resume.
    """
    if resume and overwrite:
        raise ConfigError("--resume goes on with a run and --overwrite deletes it: give one of the two.")
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output}: is a file, and the output has to be a folder. Set output to another path.")
    _check_writable(output)
    made = [folder for folder in (output, *output.parents) if not folder.exists()]
    lock = FileLock(output / _LOCK)
    try:
        try:
            output.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(
                f"{output}: another run is writing to it now. Wait until that has ended, or set output to another "
                "folder."
            ) from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"{output}: cannot be created: {reason}. Set output to another folder.") from None
        yield _choose_checkpoint(output, resume, overwrite)
    finally:
        if lock.is_locked:
            with suppress(OSError):
                os.unlink(lock.lock_file)  # while it is ours
            lock.release()
        with suppress(OSError):
            for folder in made:
                folder.rmdir()


def _choose_checkpoint(output: Path, resume: bool, overwrite: bool) -> Checkpoint | None:
    if resume:
        checkpoints = complete_checkpoints(output)
        if not checkpoints:
            raise ConfigError(
                f"{output}: nothing to resume, it holds no complete checkpoint. Run without --resume to start the run."
            )
        return checkpoints[-1]
    held = sorted(path.name for path in output.iterdir() if not is_partial(path) and path.name != _LOCK)
    if held and not overwrite:
        names = ", ".join(held[:5]) + (", ..." if len(held) > 5 else "")
        raise ConfigError(
            f"{output}: is not empty ({names}). Add --resume to go on with the run in it, --overwrite to delete that "
            "run's checkpoints and adapter, or set output to another folder."
        )
    return None


def describe_output(output: Path) -> str:
    """What a stopped run left in ``output``, and how to go on."""
    checkpoints = complete_checkpoints(output)
    if not checkpoints:
        return f"Nothing was saved in {output}."
    newest = checkpoints[-1]
    return f"{newest.folder} holds everything up to step {newest.step}. Go on from it with --resume."


def _check_writable(output: Path) -> None:
    nearest = next(path for path in [output, *output.absolute().parents] if path.exists())
    if not nearest.is_dir():
        raise ConfigError(
            f"{output}: {nearest} is a file, so there can be no folder below it. Set output to another path."
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{output}: {nearest} may not be written to. Change its permissions, or set output elsewhere."
        )
