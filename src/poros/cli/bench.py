"""``poros bench run`` and ``poros bench matrix``: measure methods side by side, as a spec says."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from poros.cli.rows import require_writable
from poros.cli.screen import Debug
from poros.cli.troubles import no_verdict
from poros.errors import PorosError


def _show_settings(wanted: bool) -> None:
    if wanted:
        from poros.evidence.spec import describe_spec

        for name, default, description in describe_spec():
            typer.echo(f"{name}  ({default})\n    {description}")
        raise typer.Exit


Spec = Annotated[Path, typer.Argument(help="YAML file that says what is compared.", metavar="SPEC.YAML")]
Settings = Annotated[
    bool, typer.Option("--settings", callback=_show_settings, is_eager=True, help="List every setting and exit.")
]


def run(
    spec: Spec,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File of rows to add to; the spec's name if left out.")
    ] = None,
    list_settings: Settings = False,
    debug: Debug = False,
) -> None:
    """Run one pass of each method, say what came of it, and add the rows to a file.

    One pass has no spread: it shows that a spec works and roughly what to expect. "bench matrix" measures.
    """
    from poros.evidence.artifact import append_row
    from poros.evidence.matrix import ROWS, run_matrix
    from poros.evidence.spec import load_spec

    with no_verdict(debug=debug):
        rows_file = output or Path(f"{load_spec(spec).name}.rows.jsonl")
        require_writable(rows_file, "--output")
        folder = Path(tempfile.mkdtemp(prefix="poros-bench-"))
        try:
            rows = run_matrix(spec, folder, typer.echo, passes=1)
        except BaseException:
            _keep_if_measured(folder)
            raise
        try:
            for row in rows:
                append_row(rows_file, row)
        except OSError as error:
            raise PorosError(
                f"{rows_file} could not be written: {error.strerror}. All rows are in {folder / ROWS}."
            ) from None
        typer.echo(f"added to {rows_file}: {len(rows)} rows")
        if any(row.status != "ok" for row in rows):
            typer.echo(f"what the methods said is in {folder / 'logs'}")
        else:
            shutil.rmtree(folder)


def _keep_if_measured(folder: Path) -> None:
    """Say where the passes of a run are that was ended early, or leave nothing behind if there are none."""
    if any((folder / "passes").glob("*.json")):
        typer.echo(f"what was measured until then is in {folder}", err=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def matrix(
    spec: Spec,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the results; one of its own.")],
    list_settings: Settings = False,
    debug: Debug = False,
) -> None:
    """Run every pass of every method on every model, each in a process of its own, the methods taking turns.

    Interrupted, it goes on where it was when the same command is given again. Running out of memory, a missing package,
    a loss that is not finite and a crash are results. The rows are in the file rows.jsonl of the output folder.
    """
    from poros.evidence.matrix import ROWS, run_matrix

    with no_verdict(debug=debug):
        rows = run_matrix(spec, output, typer.echo)
    failed = sum(row.status != "ok" for row in rows)
    said = f"{len(rows)} rows in {output / ROWS}"
    typer.echo(
        f"{said}, {failed} of them without a figure; why is in the row and in {output / 'logs'}" if failed else said
    )
