"""How a command ends when something is wrong: one screen on stderr and an exit status, no traceback."""

from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from poros.errors import PorosError

# The option of every command that shows where an error comes from.
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

STATUS_ERROR = 2
STATUS_INTERRUPTED = 130  # as a shell reports a command that Ctrl-C ended


def one_screen(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command raise :class:`PorosError` and have its message printed; with ``--debug``, its traceback too."""

    @wraps(command)
    def run(*args: Any, debug: bool = False, **options: Any) -> None:
        try:
            command(*args, debug=debug, **options)
        except PorosError as error:
            if debug:
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(STATUS_ERROR) from None
        except KeyboardInterrupt as stop:
            if debug:
                raise
            typer.echo(str(stop) or "Interrupted.", err=True)
            raise typer.Exit(STATUS_INTERRUPTED) from None

    return run
