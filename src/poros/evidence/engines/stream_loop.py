"""The speed of light of a host: captured layers over slots, one copy stream, and nothing else.

What a step of streamed QLoRA costs at least here, with every frozen layer coming from host memory and no Python between
the kernels: the forward of all layers, their recompute and backward, adapters in and gradients out, clipping, AdamW.
There is no embedding, head or loss, and so nothing is learnt.

[Note: one layer, captured once a slot]
A graph replays over the addresses that it was captured with. So the first layer is captured over each slot, its frozen
tensors, adapters and gradients bound there, and stands in for all layers, which must be of one structure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from poros.evidence.engines.base import CellRequest, Engine

ENGINE = Engine(
    name="stream-loop",
    title="bare loop of CUDA graphs",
    changes=("no embedding, head or loss",),
    settings=("slots",),
    launches=("replay",),
)


@dataclass(frozen=True)
class Visit:
    """One use of a layer in a step.

    Attributes:
        layer: Which one.
        slot: Where its weights are then.
        backward: Whether this is the recompute and backward, or the forward.
        load: Whether its weights have to be copied to the slot first.
        after: The visit of the same step that uses the slot before, so that the copy may start behind it; -1 for none.
    """

    layer: int
    slot: int
    backward: bool
    load: bool
    after: int


@lru_cache
def plan_visits(num_layers: int, content: tuple[int | None, ...]) -> tuple[tuple[Visit, ...], tuple[int | None, ...]]:
    """The visits of one step: every layer forward, then back, with as few copies as the slots allow.

    What gives way is the layer whose next use is farthest. Steps follow each other, so what a step leaves in the slots
    is what the next one begins with.

    Args:
        content: layer in each slot at the start, None for an empty one.

    Returns:
        the visits in order, and the layer in each slot at the end.
    """
    order = [*range(num_layers), *reversed(range(num_layers))]
    slots, last_use = list(content), [-1] * len(content)
    visits = []
    for position, layer in enumerate(order):
        load = layer not in slots
        if load:
            coming = [*order[position + 1 :], *order]
            slot = max(range(len(slots)), key=lambda i: _distance(slots[i], coming))
            slots[slot] = layer
        else:
            slot = slots.index(layer)
        visits.append(Visit(layer, slot, position >= num_layers, load, last_use[slot]))
        last_use[slot] = position
    return tuple(visits), tuple(slots)


def _distance(layer: int | None, coming: Sequence[int]) -> int:
    return len(coming) if layer is None else coming.index(layer)


def run(request: CellRequest, recorder: Any) -> None:
    """Step the bare loop.

    Raises:
        UnsupportedModelError: there is no GPU, or the model's layers are not all of one structure.
    """
    import torch
    from torch import nn

    from poros.errors import UnsupportedModelError
    from poros.evidence.engines.bare_layers import ReplayedLayers

    if recorder.device.type != "cuda":
        raise UnsupportedModelError("stream-loop replays CUDA graphs, and needs a CUDA device")
    layers = ReplayedLayers(request, recorder)
    optimizer = torch.optim.AdamW([layers.adapters], lr=request.learning_rate)
    for _ in range(request.total_steps):
        recorder.begin_step()
        layers.gradients.zero_()
        for _ in range(request.accumulation):
            layers.forward_and_backward()
        limit = request.max_grad_norm if request.max_grad_norm > 0 else float("inf")
        nn.utils.clip_grad_norm_([layers.adapters], limit)
        optimizer.step()
        recorder.end_step(None)
