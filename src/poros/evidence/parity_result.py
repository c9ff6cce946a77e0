"""The verdict of a parity check, and the row that records it."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

import poros
from poros.evidence import provenance
from poros.evidence.artifact import ParityRow
from poros.evidence.bits import Difference
from poros.evidence.twins import ParitySettings, Twins

EXIT_STATUS = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}  # 2 is for errors


@dataclass
class ParityResult:
    """The verdict of a check and what it rests on.

    Attributes:
        reason: Why the verdict is not PASS; None if it is.
        equal: For ``"streamed"`` and ``"control"``: surface -> every tensor was equal at every step.
        first_difference: Of the run that decided the verdict.
        max_abs_difference: Largest distance between the streamed and the resident run; None if it is not finite.
        losses: Of the resident run, at every step; what is not finite ended the check and is left out.
        num_gradients: Gradients compared in a step.
        fields: The row without the verdict: settings, memory and provenance.
        note: What a reader of the verdict should know besides; None for nothing.
    """

    verdict: Literal["PASS", "FAIL", "INCONCLUSIVE"]
    reason: str | None
    equal: dict[str, dict[str, bool]]
    first_difference: Difference | None
    max_abs_difference: float | None
    losses: list[float]
    num_gradients: int
    fields: dict[str, Any]
    note: str | None = None

    @property
    def exit_status(self) -> int:
        """Of a command that ends with this verdict."""
        return EXIT_STATUS[self.verdict]

    def __str__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        if self.verdict == "INCONCLUSIVE":
            return f"INCONCLUSIVE: {self.reason}{note}"
        largest = "not finite" if self.max_abs_difference is None else f"{self.max_abs_difference:.2e}"
        return f"{self.verdict} ({largest})" + (f": {self.reason}" if self.reason else "") + note

    def row(self) -> ParityRow:
        """The result row."""
        return ParityRow.model_validate(
            self.fields
            | {
                "verdict": self.verdict,
                "reason": self.reason,
                "max_abs_difference": self.max_abs_difference,
                "surfaces": self.equal,
                "first_difference": self.first_difference and _as_fields(self.first_difference),
                "num_gradients": self.num_gradients,
                "losses": self.losses,
                "options": self.fields["options"] | ({"note": self.note} if self.note else {}),
            }
        )


def what_streamed(twins: Twins) -> str | None:
    """The note on a check in which no block had to come a second time; None if blocks did."""
    report = poros.report(twins.streamed)
    if report.num_loads > report.num_blocks:
        return None
    return "every block fits the window, so nothing was reloaded"


def setting_fields(settings: ParitySettings, twins: Twins) -> dict[str, Any]:
    """What a row says of the settings and the models, but for the data."""
    report = poros.report(twins.streamed)
    base = twins.resident.get_base_model()
    kept = f"-r{report.resident_blocks}" if report.resident_blocks else ""
    window = f"bs{report.block_size}x{report.slots}{kept}-acc{settings.accumulation}"
    window += "-replay" * (report.engine == "replay") + "-poison" * settings.poison
    return {
        "cell": f"{settings.row_name}/parity-{settings.path}-{window}",
        "model": settings.row_name,
        "weights": twins.weights,
        "family": twins.family,
        "method": "poros",
        "label": f"poros, block size {report.block_size}",
        "engine": report.engine,
        "path": settings.path,
        "device": twins.device.type,
        "attention": base.config._attn_implementation,
        "quantization": settings.quantization,
        "double_quant": settings.double_quant and settings.quantization is not None,
        "dtype": twins.dtype,
        "seq_len": settings.seq_len,
        "batch_size": settings.batch_size,
        "accumulation": settings.accumulation,
        "lora": {
            "rank": settings.rank,
            "alpha": 2 * settings.rank,
            "dropout": settings.dropout,
            "targets": twins.targets,
        },
        "block_size": report.block_size,
        "slots": report.slots,
        "resident_blocks": report.resident_blocks,
        "learning_rate": settings.learning_rate,
        "max_grad_norm": settings.max_grad_norm,
        "options": {"poison": settings.poison},
    }


def memory_fields(twins: Twins) -> dict[str, int | None]:
    """Peaks of this process, which holds all three models; to be read while their optimizers live."""
    on_card: dict[str, int | None] = dict.fromkeys(("allocated_bytes", "reserved_bytes", "process_bytes"))
    if twins.device.type == "cuda":
        reserved, used = torch.cuda.max_memory_reserved(twins.device), provenance.process_bytes_on_card()
        # What the allocator has handed back since its peak was the process's too.
        more = reserved - torch.cuda.memory_reserved(twins.device)
        on_card = {
            "allocated_bytes": torch.cuda.max_memory_allocated(twins.device),
            "reserved_bytes": reserved,
            "process_bytes": None if used is None else used + more,
        }
    locked = poros.report(twins.streamed).locked_bytes
    return {**on_card, "host_peak_bytes": provenance.host_peak_bytes(), "host_locked_bytes": locked}


def _as_fields(first: Difference) -> dict[str, Any]:
    """A first difference as rows have it."""
    place = {"step": first.step, "surface": first.surface, "tensor": first.tensor or None}
    if first.element is None:
        return place
    element = first.element
    values = {
        key: value if math.isfinite(value) else repr(value)  # JSON knows no NaN
        for key, value in (("expected", element.expected), ("found", element.found))
    }
    bits = {"expected_bits": element.expected_bits, "found_bits": element.found_bits}
    return {**place, "index": list(element.index), **values, **bits}
