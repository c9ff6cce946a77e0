"""The report as one HTML file that needs nothing else: tables, charts drawn from embedded readings, every row."""

import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from poros.evidence.artifact import Row, pass_median
from poros.evidence.summary import Column, Group, Summary, overview
from poros.evidence.wording import READING, failure_text, place_text, surfaces_text, verdict_text, why_text

_ROOM = "poros.evidence"
_IN_MARKDOWN_ONLY = ("passes",)  # here a chart shows them


def html_page(summary: Summary, title: str) -> str:
    """The whole page. It loads nothing, and what rows say cannot become markup or code."""
    environment = Environment(
        loader=PackageLoader(_ROOM),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    folder = files(_ROOM) / "templates"
    columns = [column for column in summary.columns if column.key not in _IN_MARKDOWN_ONLY]
    glance, lines = overview(summary)
    return environment.get_template("page.html.j2").render(
        title=title,
        summary=summary,
        columns=columns,
        column_groups=_column_groups(columns),
        glance=glance,
        glance_groups=_column_groups(glance),
        lines=lines,
        reading=READING,
        place_text=place_text,
        failure_text=failure_text,
        surfaces_text=surfaces_text,
        verdict_text=verdict_text,
        why_text=why_text,
        row_text=_row_text,
        style=Markup((folder / "page.css").read_text(encoding="utf-8")),
        script=Markup((folder / "page.js").read_text(encoding="utf-8")),
        data=Markup(_json([_charted(group) for group in summary.groups])),
    )


def _column_groups(columns: list[Column]) -> list[tuple[str, int]]:
    """The upper headings, with the number of columns below each."""
    groups: list[tuple[str, int]] = []
    for column in columns:
        if groups and groups[-1][0] == column.group:
            groups[-1] = (column.group, groups[-1][1] + 1)
        else:
            groups.append((column.group, 1))
    return groups


def _charted(group: Group) -> dict[str, Any]:
    """What the charts of a group are drawn from."""
    on_card = any(entry.row.reserved_bytes for entry in group.ok)
    key = "reserved_bytes" if on_card else "host_peak_bytes"
    return {
        "memory": "GiB reserved on the card" if on_card else "GiB of host memory, peak",
        "warmup": group.entries[0].row.warmup_steps,
        "methods": [
            {
                "row": entry.index,
                "method": entry.row.method,
                "label": entry.row.label,
                "seconds": entry.row.s_per_step,
                "shown": entry.cells["s_per_step"].text,
                "gib": (getattr(entry.row, key) or 0) / 2**30,
                "passes": entry.row.passes,
                "medians": [pass_median(seconds) for seconds in entry.row.passes],
                "losses": entry.row.losses,
            }
            for entry in group.ok
        ],
    }


def _json(value: Any) -> str:
    """JSON that can stand inside a script element."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")


def _row_text(row: Row) -> str:
    """A row's JSON with a line for each key."""
    return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in row.model_dump().items()) + "\n}"
