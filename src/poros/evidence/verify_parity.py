"""Whether a parity row's verdict is the one that its surfaces, steps and reason give."""

import re

from poros.evidence.artifact import ParityRow, Surfaces
from poros.evidence.verify_readings import counted, memory_problems, possible_losses, possible_seconds
from poros.evidence.verify_settings import Found, shown

# Verdicts that rest on no inequality: zero gradients, and a loss that ended the check.
_NOTHING_SHOWN = re.compile(r"vacuous|loss is")


def verdict_problems(row: ParityRow) -> Found:
    """All that is wrong with a parity row's result."""
    if row.method != "poros":
        yield "method", f"is {row.method!r}; parity is checked for poros"
    if row.path == "fast":
        yield "path", "is 'fast', which is not reproducible; parity is checked on strict or math"
    yield from memory_problems("", row, row, complete=row.verdict != "INCONCLUSIVE")
    yield from _surfaces(row)
    yield from _first_difference(row)
    yield from _difference(row)
    yield from _reason(row)
    yield from _steps(row)
    yield from possible_seconds("wall_s", row.wall_s)


def _unequal(surfaces: Surfaces) -> list[str]:
    return [name for name, equal in surfaces.model_dump().items() if not equal]


def _surfaces(row: ParityRow) -> Found:
    streamed, control = _unequal(row.surfaces.streamed), _unequal(row.surfaces.control)
    if row.verdict != "INCONCLUSIVE" and control:
        yield "verdict", f"is {row.verdict}, but the control differs in {', '.join(control)}: INCONCLUSIVE"
    elif row.verdict == "PASS" and streamed:
        yield "verdict", f"is PASS, but the streamed run differs in {', '.join(streamed)}"
    elif row.verdict == "FAIL" and not streamed:
        yield "verdict", "is FAIL, but every surface of the streamed run is equal"
    elif row.verdict == "INCONCLUSIVE" and not streamed + control and not _NOTHING_SHOWN.search(row.reason or ""):
        yield "verdict", "is INCONCLUSIVE, but every surface is equal, and the reason is not that this shows nothing"


def _first_difference(row: ParityRow) -> Found:
    first = row.first_difference
    decides = row.surfaces.streamed if row.verdict == "FAIL" else row.surfaces.control
    if row.verdict == "PASS" and first is not None:
        yield "first_difference", "is given, but the verdict is PASS"
    if row.verdict == "FAIL" and first is None:
        yield "first_difference", "is null, but the verdict is FAIL"
    if first is None:
        return
    if not 0 <= first.step < row.steps:
        yield "first_difference.step", f"is {first.step}; the steps are from 0 to {row.steps - 1}"
    if first.surface not in Surfaces.model_fields:
        yield "first_difference.surface", f"is {first.surface!r}; there are {', '.join(Surfaces.model_fields)}"
    elif row.verdict != "PASS" and first.surface not in _unequal(decides):
        yield "first_difference.surface", f"is {first.surface}, which is equal at every step"
    if first.expected_bits is not None and first.expected_bits == first.found_bits:
        yield "first_difference.found_bits", f"is {first.found_bits}, which are the expected bits"


def _difference(row: ParityRow) -> Found:
    largest = row.max_abs_difference
    if row.verdict == "PASS" and largest != 0.0:
        yield "max_abs_difference", f"is {shown(largest)}; with the verdict PASS it is 0.0"
    elif largest is not None and not largest >= 0:
        yield "max_abs_difference", f"is {largest}; it should be null, or at least 0"


def _reason(row: ParityRow) -> Found:
    if row.verdict == "PASS" and row.reason is not None:
        yield "reason", f"is {row.reason!r} with the verdict PASS; it should be null"
    if row.verdict != "PASS" and not (row.reason and row.reason.strip()):
        yield "reason", f"is {row.reason!r} with the verdict {row.verdict}; it should say why"


def _steps(row: ParityRow) -> Found:
    vacuous = row.verdict == "INCONCLUSIVE" and _NOTHING_SHOWN.search(row.reason or "") is not None
    if not (0 if vacuous else 1) <= row.num_gradients < 2**31:
        yield "num_gradients", f"is {row.num_gradients}; a comparison of nothing proves nothing"
    if not 1 <= row.control_steps <= row.steps:
        yield "control_steps", f"is {row.control_steps}; of {row.steps} steps, the control should repeat at least one"
    # A loss that is not finite ends a check, and is not among the losses.
    ended = row.verdict != "PASS" and len(row.losses) == row.steps - 1
    yield from () if ended else counted("losses", row.losses, row.steps, "steps")
    yield from possible_losses("losses", row.losses)
    for key, wanted in ("warmup_steps", 0), ("num_passes", 1):
        if getattr(row, key) != wanted:
            yield key, f"is {getattr(row, key)}; a parity check has {wanted}"
