"""The ``poros`` command. One file a command; torch and the libraries around it are imported when a command runs."""

from typing import Annotated

import typer

from poros import __version__
from poros.cli import bench as measuring
from poros.cli import results
from poros.cli.data import data
from poros.cli.parity import parity
from poros.cli.plan import plan
from poros.cli.screen import one_screen
from poros.cli.train import train

app = typer.Typer(
    name="poros",
    help="Train QLoRA adapters on models far larger than the card.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"poros {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def version() -> None:
    """Print the version."""
    _show_version(True)


app.command()(one_screen(train))
app.command()(one_screen(data))
app.command()(one_screen(parity))
app.command()(one_screen(plan))

bench = typer.Typer(
    name="bench",
    help="Measure speed and memory side by side, and check and show what was measured.",
    no_args_is_help=True,
)
app.add_typer(bench)
bench.command("run")(one_screen(measuring.run))
bench.command("matrix")(one_screen(measuring.matrix))
bench.command("report")(one_screen(results.report))
bench.command("compare")(one_screen(results.compare))
bench.command("verify")(one_screen(results.verify))


def main() -> None:
    """Entry point of the ``poros`` command."""
    app()
