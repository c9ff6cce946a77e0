"""``poros bench report``, ``compare`` and ``verify``: what was measured, shown and checked."""

from pathlib import Path
from typing import Annotated

import typer

from poros.cli.screen import Debug

STATUS_REFUSED = 1
_MAX_SHOWN = 40

Results = Annotated[list[Path], typer.Argument(help="Files of rows, or folders with a rows.jsonl.", metavar="OUT...")]


def report(
    results: Results,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the two files; that of the rows if left out.")
    ] = None,
    title: Annotated[str, typer.Option("--title", help="Heading of the report.")] = "Benchmark results",
    debug: Debug = False,
) -> None:
    """Write report.md and report.html: tables, charts and every row. Rows that "bench verify" refuses are not shown."""
    from poros.evidence.page import html_page
    from poros.evidence.report import markdown_report
    from poros.evidence.summary import read_verified, rows_file, summarize

    summary = summarize(read_verified(*results))
    folder = output or rows_file(results[0]).parent
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ("report.md", markdown_report(summary, title)), ("report.html", html_page(summary, title)):
        (folder / name).write_text(text, encoding="utf-8")
        typer.echo(folder / name)


def compare(
    before: Annotated[Path, typer.Argument(help="File of rows, or folder with a rows.jsonl.", metavar="BEFORE")],
    after: Annotated[Path, typer.Argument(help="The same of a later run.", metavar="AFTER")],
    debug: Debug = False,
) -> None:
    """Say what changed between two runs, cell by cell, whether it is beyond their spread, and what else differs."""
    from poros.evidence.compare import compare as compare_rows
    from poros.evidence.compare import comparison_lines
    from poros.evidence.summary import read_verified

    for line in comparison_lines(compare_rows(read_verified(before), read_verified(after))):
        typer.echo(line)


def verify(
    results: Results,
    debug: Debug = False,
) -> None:
    """Recompute what follows from the readings, and refuse rows that do not hold up, with exit status 1."""
    from poros.evidence.artifact import read_lines
    from poros.evidence.summary import rows_file
    from poros.evidence.verify import verify_file

    refused = False
    for file in map(rows_file, results):
        problems = verify_file(file)
        for problem in problems[:_MAX_SHOWN]:
            typer.echo(f"{file}: {problem}", err=True)
        if len(problems) > _MAX_SHOWN:
            typer.echo(f"{file}: and {len(problems) - _MAX_SHOWN} problems more", err=True)
        refused = refused or bool(problems)
        if not problems:
            typer.echo(f"{file}: {len(read_lines(file))} rows verified")
    if refused:
        raise typer.Exit(STATUS_REFUSED)
