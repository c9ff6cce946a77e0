"""``poros bench report``, ``compare`` and ``verify``: what was measured, shown and checked."""

import contextlib
import errno
import os
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from poros.cli.screen import Debug
from poros.errors import ConfigError

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
    from poros.evidence.summary import summarize
    from poros.evidence.verify import read_verified, rows_file

    title = title.encode("utf-8", "replace").decode()  # what came from the command line may be no text
    summary = summarize(read_verified(*results))
    folder = output or rows_file(results[0]).parent
    texts = {"report.md": markdown_report(summary, title), "report.html": html_page(summary, title)}
    for file in _write_all(folder, texts):
        typer.echo(file)


def compare(
    before: Annotated[Path, typer.Argument(help="File of rows, or folder with a rows.jsonl.", metavar="BEFORE")],
    after: Annotated[Path, typer.Argument(help="The same of a later run.", metavar="AFTER")],
    debug: Debug = False,
) -> None:
    """Say what changed between two runs, cell by cell, whether it is beyond their spread, and what else differs."""
    from poros.evidence.compare import compare as compare_rows
    from poros.evidence.compare import comparison_lines
    from poros.evidence.verify import read_verified

    for line in comparison_lines(compare_rows(read_verified(before), read_verified(after))):
        typer.echo(line)


def verify(
    results: Results,
    debug: Debug = False,
) -> None:
    """Recompute what follows from the readings, and refuse rows that do not hold up, with exit status 1."""
    from poros.evidence.lines import printable
    from poros.evidence.verify import examine, rows_file

    files = [rows_file(path) for path in results]
    rows, problems = examine(files)
    for problem in problems[:_MAX_SHOWN]:
        typer.echo(f"{printable(problem.file)}: {problem}", err=True)
    if len(problems) > _MAX_SHOWN:
        typer.echo(f"and {len(problems) - _MAX_SHOWN} problems more", err=True)
    num_rows = Counter(placed.file for placed in rows)
    for file in files:
        if str(file) not in {problem.file for problem in problems}:
            typer.echo(f"{printable(file)}: {num_rows[str(file)]} rows verified")
    if problems:
        raise typer.Exit(STATUS_REFUSED)


def _write_all(folder: Path, texts: dict[str, str]) -> list[Path]:
    """Write all files of a folder or, if one cannot be written, none; each replaces its predecessor at once.

    Raises:
        ConfigError: the folder cannot be made or written to.
    """
    drafts = {folder / name: folder / f".{name}.{os.getpid()}" for name in texts}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, draft in drafts.items():
            if file.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
            draft.write_text(texts[file.name], encoding="utf-8")
        for file, draft in drafts.items():
            draft.replace(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"the report cannot be written to {str(folder)!r}: {reason}. Give a folder with --output."
        ) from None
    finally:
        for draft in drafts.values():
            with contextlib.suppress(OSError, ValueError):
                draft.unlink(missing_ok=True)
    return [*drafts]
