"""The report in Markdown: what each method took on each model, what failed, and where it was measured."""

import re
from collections.abc import Iterable, Sequence

from poros.evidence.artifact import ParityRow
from poros.evidence.summary import STATUS_TEXT, Entry, Group, Summary, overview
from poros.evidence.wording import place_text

READING = (
    "Seconds a step are the median over passes of each pass's median, with the standard deviation of the passes' "
    "medians. Of memory, each figure is the largest of all passes. Reserved is what the allocator takes of the card, "
    "process what the whole process takes with its CUDA context; of the host, peak is the largest resident set, and "
    "locked what was page-locked. Ratios are to rows of the same run on the same machine, never of another. "
    "A memory cut is the reserved memory of the baseline over that of the row."
)


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
    parts += ["## Provenance", *_places(summary)]
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
        parts.append("\n".join(f"- {inert(failure_text(entry))}" for entry in group.failures))
    return parts


def failure_text(entry: Entry) -> str:
    """Why a row has no figure, in one line."""
    return f"{entry.row.label}: {STATUS_TEXT[entry.row.status]}: {entry.row.reason}"


def _parity_table(rows: Sequence[ParityRow]) -> str:
    heads = ["model", "weights", "path", "steps", "tokens", "accumulation", "block size", "slots", "gradients a step"]
    lines = []
    for row in rows:
        numbers = (row.steps, row.seq_len, row.accumulation, row.block_size, row.slots, row.num_gradients)
        settings = ["" if number is None else str(number) for number in numbers]
        lines.append([row.model, row.weights, row.path, *settings, *surfaces_text(row), verdict_text(row)])
    return table([*heads, "surfaces equal", "in the control", "verdict"], lines)


def surfaces_text(row: ParityRow) -> tuple[str, str]:
    """On how many surfaces the streamed run, and the control, were equal."""
    counts = [list(part.model_dump().values()) for part in (row.surfaces.streamed, row.surfaces.control)]
    streamed, control = (f"{sum(equal)} of {len(equal)}" for equal in counts)
    return streamed, control


def verdict_text(row: ParityRow) -> str:
    """``PASS (0.00e+00)``, or the verdict alone."""
    if row.max_abs_difference is None or row.verdict == "INCONCLUSIVE":
        return row.verdict
    return f"{row.verdict} ({row.max_abs_difference:.2e})"


def why_text(row: ParityRow) -> str:
    """Why a verdict is not PASS, with the first difference; and what is noted besides."""
    first, note = row.first_difference, row.options.get("note")
    if first is None:
        return "; ".join(part for part in (row.reason, note) if isinstance(part, str))
    where = f"step {first.step}, {first.surface}" + ("" if first.tensor is None else f" of {first.tensor}")
    where += "" if first.index is None else f" at {first.index}"
    bits = "" if first.found_bits is None else f" (bits {first.found_bits}, not {first.expected_bits})"
    return f"{row.reason}; first difference: {where}: {first.found} instead of {first.expected}{bits}"


def _places(summary: Summary) -> list[str]:
    """One line for each run: rows that were measured with the same packages share it."""
    places: dict[tuple[str, str], list[str]] = {}
    times: dict[tuple[str, str], str] = {}
    for row in summary.rows:
        place, _, time = place_text(row).rpartition("; ")
        key = (row.run_id, place)
        places.setdefault(key, []).append(row.cell)
        times.setdefault(key, time)
    runs = [run_id for run_id, _ in places]
    lines = []
    for (run_id, place), cells in places.items():
        which = f" ({', '.join(cells)})" if runs.count(run_id) > 1 else ""
        lines.append(f"- Run {_code(run_id)}{inert(which)}: {inert(f'{place}; {times[run_id, place]}')}")
    return ["\n".join(lines)]
