"""A plan, and what it looks like on one screen."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from poros.errors import ConfigError
from poros.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Plan:
    """What a run takes, with the settings that were chosen for it.

    Attributes:
        device_terms: Bytes by name when the allocator hands out most; their sum is ``allocated_bytes``.
        reserved_bytes: What the allocator must have for that, with what its rounding and splitting leave unused, and
            ``pool_bytes`` for recorded visits.
        process_bytes: The whole process on the card: ``reserved_bytes``, and ``context_bytes`` of the driver.
        host_terms: Bytes by name; their sum is ``host_bytes``, the most while the model loads.
        locked_bytes: Page-locked host memory.
        seconds_at_least: No step is faster on ``card``: the bytes over the link, or the computation at the card's
            peak. Visits that are not replayed are slower where launching kernels keeps the host busy. None without a
            card.
        problems: What does not fit, by how much, and what would. Empty if all fits.
    """

    model: str
    model_type: str
    num_layers: int
    quantization: str | None
    dtype: str
    seq_len: int
    batch_size: int
    rank: int
    targets: str | list[str]
    loss_chunk_tokens: int | None
    block_size: int
    num_blocks: int
    slots: int
    resident_blocks: int
    replay: bool
    device_terms: dict[str, int]
    allocated_bytes: int
    reserved_bytes: int
    pool_bytes: int
    context_bytes: int
    process_bytes: int
    host_terms: dict[str, int]
    host_bytes: int
    locked_bytes: int
    streamed_bytes: int  # over the link in a step
    vram_bytes: int | None = None
    ram_bytes: int | None = None
    card: str | None = None
    seconds_at_least: float | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether nothing is over its limit."""
        return not self.problems

    def require_fit(self) -> "Plan":
        """The plan itself; :class:`ConfigError` if something does not fit."""
        if self.problems:
            raise ConfigError(" ".join(self.problems))
        return self

    def to_json(self) -> str:
        """All fields as JSON."""
        return json.dumps({**asdict(self), "fits": self.fits}, indent=2, allow_nan=False)

    def __str__(self) -> str:
        precision = f"{self.quantization}, computed in {self.dtype}" if self.quantization else self.dtype
        chunks = f", loss in chunks of {self.loss_chunk_tokens} tokens" if self.loss_chunk_tokens else ""
        kept = f", {self.resident_blocks} of them stay" if self.resident_blocks else ""
        lines = [
            f"{self.model}: {self.num_layers} layers of {self.model_type}, {precision}",
            f"  batch {self.batch_size} x {self.seq_len} tokens, LoRA rank {self.rank}{chunks}",
            f"  {self.num_blocks} blocks of {self.block_size} layer(s), {self.slots} slots{kept}",
            "",
            f"on the card{_of(self.vram_bytes)}",
            *_table(self.device_terms.items(), self.process_bytes),
            *_table(
                [
                    ("allocated", self.allocated_bytes),
                    ("recorded visits at work", self.pool_bytes),
                    ("left over by the allocator", self.reserved_bytes - self.allocated_bytes - self.pool_bytes),
                    ("CUDA context", self.context_bytes),
                    ("whole process", self.process_bytes),
                ]
            ),
            "",
            f"on the host{_of(self.ram_bytes)}",
            *_table(self.host_terms.items(), self.host_bytes),
            *_table([("most while loading", self.host_bytes), ("of it page-locked", self.locked_bytes)]),
        ]
        if self.seconds_at_least is not None:
            slower = "" if self.replay else "; launching kernels may take longer"
            lines += [
                "",
                f"a step takes at least {format_seconds(self.seconds_at_least)} on {self.card} "
                f"({format_bytes(self.streamed_bytes)} over the link){slower}",
            ]
        return "\n".join([*lines, *(f"\ndoes not fit: {problem}" for problem in self.problems)])


def _of(limit: int | None) -> str:
    return "" if limit is None else f" (limit {format_bytes(limit)})"


def _table(terms: Iterable[tuple[str, int]], whole: int | None = None) -> list[str]:
    lines = []
    for name, num_bytes in terms:
        bar = "" if whole is None else "#" * round(24 * num_bytes / whole)
        lines.append(f"  {name:<28}{format_bytes(num_bytes):>12}  {bar}".rstrip())
    return lines
