"""A layer's forward, as its model calls it: which kind of visit it takes."""

from typing import Any

import torch

from poros.residency.block import Call, Residency, run_layer, visiting
from poros.residency.caches import refuse_left_empty, with_private_caches
from poros.residency.capture import captured_outputs, refuse_compiling
from poros.residency.layer import StreamedLayer
from poros.residency.schedule import Phase
from poros.residency.split import SplitCall


def streamed_forward(residency: Residency, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``layer`` as its own ``forward(*args, **kwargs)`` would have run on a resident model."""
    refuse_compiling()
    with residency.lock:
        return _streamed_forward(residency, layer, args, kwargs)


def _streamed_forward(residency: Residency, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    residency.cleanup.finish()
    inventory = layer.walk(residency.device)
    if len(inventory.modules) != layer.num_guarded:
        residency.guard_inside(layer)
    refuse_left_empty(layer, (*args, *kwargs.values()))
    if not torch.is_grad_enabled():
        with visiting(residency, layer, Phase.INFERENCE):
            return run_layer(layer, args, kwargs)
    seen = "hidden_states" in captured_outputs() or is_hooked(layer)
    args, kwargs = with_private_caches(layer, residency.device, args, kwargs)
    kind = SplitCall if residency.micro_batch_size is not None else Call
    call = kind(residency, layer, inventory, (args, kwargs), shared=seen)
    if not any(tensor.requires_grad for tensor in call.tensors):
        with visiting(residency, layer, Phase.INFERENCE):
            return run_layer(layer, args, kwargs)
    return call.run()


def is_hooked(layer: StreamedLayer) -> bool:
    """Whether somebody's hook sees the layer's input, and so may use it elsewhere."""
    return any(
        seen is not None and (seen.module._forward_hooks or seen.module._forward_pre_hooks)
        for seen in (layer, layer.before)
    )
