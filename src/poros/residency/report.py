"""What a prepared model costs where, and which promise holds: in words."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from poros.residency.layer import StreamedLayer
from poros.units import format_bytes

REPACKING = (
    "bitsandbytes would repack 4-bit weights for this CPU's AVX512-BF16 in every evaluation, and train on with other "
    "kernels after it; that is off while the model is prepared. A resident run to compare with needs "
    "support_avx512bf16_for_cpu = False on each Linear4bit"
)


@dataclass
class Report:
    """What :func:`prepare` did, and what the model costs where.

    Attributes:
        model_type: Family of the streamed text model.
        precision: Of the streamed weights.
        device: Where the model computes.
        num_layers, block_size, num_blocks, slots: How the layers are grouped, and how many blocks the window holds.
        host_bytes: Host memory of the frozen base; ``locked_bytes`` of it are page-locked.
        window_bytes: Device memory of all slots.
        resident_blocks: Blocks of which a copy stays on the device, in ``resident_block_bytes``.
        resident_bytes: Device memory of what does not stream: embeddings, head, norms, towers, adapters.
        trainable_bytes: The part of it that is trained.
        guarantee: Which promise holds, and why.
        notes: What a user should know besides.
        num_loads, num_late_loads: Copies so far, and those among them that no prefetch had foreseen.
        replay: Whether visits are recorded as CUDA graphs and replayed.
        replayed_layers: Layers whose latest forward was a replay.
        eager_layers: Layer -> why its latest visit could not be replayed.
    """

    model_type: str
    precision: str
    device: str
    num_layers: int
    block_size: int
    num_blocks: int
    slots: int
    host_bytes: int
    locked_bytes: int
    window_bytes: int
    resident_blocks: int
    resident_block_bytes: int
    resident_bytes: int
    trainable_bytes: int
    guarantee: str
    notes: list[str] = field(default_factory=list)
    num_loads: int = 0
    num_late_loads: int = 0
    replay: bool = False
    replayed_layers: int = 0
    eager_layers: dict[str, str] = field(default_factory=dict)

    @property
    def engine(self) -> Literal["eager", "replay"]:
        """``"replay"`` if the latest forward of every layer was one."""
        return "replay" if self.replayed_layers == self.num_layers else "eager"

    def __str__(self) -> str:
        locked = f", {format_bytes(self.locked_bytes)} page-locked" if self.device.startswith("cuda") else ""
        lines = [
            f"poros: {self.model_type}, {self.num_layers} layers in {self.precision}, streamed to {self.device}",
            f"  blocks     {self.num_blocks} of {self.block_size} layer(s), {self.slots} slots in the window",
            f"  host       {format_bytes(self.host_bytes)}{locked}",
            f"  window     {format_bytes(self.window_bytes)}",
            *(
                [f"  kept       {format_bytes(self.resident_block_bytes)}, {self.resident_blocks} blocks"]
                if self.resident_blocks
                else []
            ),
            f"  resident   {format_bytes(self.resident_bytes)}, {format_bytes(self.trainable_bytes)} of it trainable",
            *([self._kernels()] if self.replay else []),
            f"  guarantee  {self.guarantee}",
        ]
        return "\n".join(lines + [f"  note       {note}" for note in self.notes])

    def _kernels(self) -> str:
        if self.replayed_layers:
            return f"  kernels    replayed from CUDA graphs in {self.replayed_layers} of {self.num_layers} layers"
        return "  kernels    recorded as CUDA graphs when a shape of input comes again, and replayed from then on"


def eager_notes(reasons: dict[str, str]) -> list[str]:
    """A line for each reason why layers are not replayed."""
    layers: dict[str, list[str]] = {}
    for layer, reason in reasons.items():
        layers.setdefault(reason, []).append(layer)
    return [
        f"{names[0]}{f' and {len(names) - 1} more layers' * (len(names) > 1)} not replayed: {reason}"
        for reason, names in layers.items()
    ]


def precision(layers: list[StreamedLayer]) -> str:
    """The types of the streamed weights, the largest share first; what is under a hundredth goes unmentioned."""
    sizes: dict[str, int] = {}
    for layer in layers:
        names = {entry.name for entry in layer.layout.entries}
        for entry in layer.layout.entries:
            if ".quant_state." in entry.name:
                continue
            kind = str(entry.dtype).removeprefix("torch.")
            if f"{entry.name}.quant_state.absmax" in names:
                nested = f"{entry.name}.quant_state.state2.absmax" in names
                kind = "4-bit, double-quantised" if nested else "4-bit"
            sizes[kind] = sizes.get(kind, 0) + entry.num_bytes
    shares = sorted(sizes.items(), key=lambda item: -item[1])
    return " + ".join(kind for kind, size in shares if size >= 0.01 * sum(sizes.values()))


def guarantee(model_type: str, device: torch.device) -> str:
    """Which promise holds on ``device`` with torch's present settings, and why."""
    if device.type == "cpu":
        return f"bit for bit the resident run ({model_type} is verified; same thread count on both sides)"
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return f"bit for bit the resident run ({model_type} is verified; deterministic algorithms are on)"
    return (
        f"the resident run's computation ({model_type} is verified), but deterministic algorithms are off, so not even "
        "two resident runs need agree to the bit"
    )
