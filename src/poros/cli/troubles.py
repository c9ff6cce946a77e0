"""What a command that measures does about trouble that nobody foresaw: never the exit status of a verdict."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

from poros.cli.screen import STATUS_ERROR, STATUS_INTERRUPTED
from poros.errors import PorosError

# Imported now: where memory is full, nothing can be.
from poros.evidence.failures import first_line, is_memory_full


@contextmanager
def no_verdict(*, debug: bool) -> Iterator[None]:
    """End whatever goes wrong inside with status 2, since 0, 1 and 3 are verdicts.

    A full memory, and files that cannot be read or written, become a :class:`PorosError`, which fits one screen. What
    is not understood is shown with its traceback, and so is everything with ``debug``.
    """
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        if not debug:
            raise
        traceback.print_exc(file=sys.stderr)
        raise typer.Exit(STATUS_INTERRUPTED) from None
    except Exception as error:
        if not debug:
            if isinstance(error, PorosError):
                raise
            told = _told(error)
            if told is not None:
                raise PorosError(told) from error
        with suppress(Exception):  # there may be no memory even for that
            traceback.print_exc(file=sys.stderr)
        raise typer.Exit(STATUS_ERROR) from None


def _told(error: Exception) -> str | None:
    """``error`` in words for a user; None for one that is not understood."""
    if is_memory_full(error):
        said = f" ({first_line(error)})" if first_line(error) else ""
        return f"memory is full{said}. Lower seq_len, batch_size or rank, take a smaller model, or free memory."
    if isinstance(error, BrokenPipeError):
        return "what this command says is read by nobody any more, so it has stopped"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or first_line(error)}. Free space, or give a place that can be used."
    return None
