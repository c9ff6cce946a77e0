"""The report in Markdown: what each method took on each model, what failed, and where it was measured."""

import re
from collections.abc import Iterable, Sequence

from poros.evidence.artifact import ParityRow, Row
from poros.evidence.summary import Group, Summary, overview
from poros.evidence.wording import READING, failure_text, place_text, surfaces_text, verdict_text, why_text


def markdown_report(summary: Summary, title: str) -> str:
    """The whole report."""
    parts = [f"# {inert(title)}", "Made by `poros bench report` from result rows; do not edit."]
    if summary.groups:
        columns, lines = overview(summary)
        shown = [[cell.text for cell in line] for line in lines]
        parts += ["## At a glance", table([column.heading for column in columns], shown), READING]
    for group in summary.groups:
        parts += _group(group, summary)
    if summary.parity:
        parts += ["## Parity", _parity_table([row for _, row in summary.parity])]
        reasons = [f"{row.cell}: {verdict_text(row)}: {why_text(row)}" for _, row in summary.parity if why_text(row)]
        parts += [f"- {inert(reason)}" for reason in reasons]
    parts += ["## Provenance", _places(summary)]
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; whatever is in a cell stays text, and in it."""
    shown = [[inert(cell).replace("|", "\\|") for cell in line] for line in [head, *lines]]
    return "\n".join("| " + " | ".join(line) + " |" for line in [shown[0], ["---"] * len(head), *shown[1:]])


def inert(text: str) -> str:
    """``text`` on one line, so that Markdown shows it as it is."""
    text = "".join(c if c.isprintable() else " " for c in text)
    text = re.sub(r"[\\`*<~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|&(?=[#\w]+;)|\](?=[(\[])|^[\[#>+=-]", r"\\\g<0>", text)
    return text.strip()


def _code(text: str) -> str:
    """``text`` as a word of code."""
    return f"`{''.join(c if c.isprintable() and c != '`' else ' ' for c in text)}`"


def _group(group: Group, summary: Summary) -> list[str]:
    columns = [column for column in summary.columns if any(entry.cells[column.key].text for entry in group.entries)]
    heads = ["method", "what it changes", *(column.heading for column in columns)]
    lines = []
    for entry in group.entries:
        cells = [entry.cells[column.key].text for column in columns]
        lines.append([entry.row.label, "; ".join(entry.changes) or "nothing", *cells])
    parts = [
        f"## {inert(group.heading)} (run {_code(group.run_id)})",
        inert(group.settings),
        table(heads, lines),
    ]
    if group.same_losses:
        parts.append(
            f"Losses equal to those of resident in every bit, at every step: {inert('; '.join(group.same_losses))}."
        )
    if group.failures:
        parts.append("Without a figure:")
        parts.append("\n".join(f"- {inert(failure_text(entry.row))}" for entry in group.failures))
    return parts


def _parity_table(rows: Sequence[ParityRow]) -> str:
    heads = ["model", "weights", "path", "steps", "tokens", "accumulation", "block size", "slots", "gradients a step"]
    lines = []
    for row in rows:
        numbers = (row.steps, row.seq_len, row.accumulation, row.block_size, row.slots, row.num_gradients)
        settings = ["" if number is None else str(number) for number in numbers]
        lines.append([row.model, row.weights, row.path, *settings, *surfaces_text(row), verdict_text(row)])
    return table([*heads, "surfaces equal", "in the control", "verdict"], lines)


def _places(summary: Summary) -> str:
    """One line for each run: rows that were measured with the same packages share it."""
    places: dict[tuple[str, str], list[Row]] = {}  # (run, place) -> rows
    for row in summary.rows:
        places.setdefault((row.run_id, place_text(row)), []).append(row)
    runs = [run_id for run_id, _ in places]
    lines = []
    for (run_id, place), rows in places.items():
        which = f" ({', '.join(row.cell for row in rows)})" if runs.count(run_id) > 1 else ""
        lines.append(f"- Run {_code(run_id)}{inert(which)}: {inert(f'{place}; {rows[0].time_utc}.')}")
    return "\n".join(lines)
