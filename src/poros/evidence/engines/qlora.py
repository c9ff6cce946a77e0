"""What most methods start from: the frozen base of a request, and the adapters on it."""

from typing import Any

from poros.evidence.engines.base import CellRequest
from poros.evidence.engines.recorder import Recorder
from poros.model.adapter import add_lora
from poros.model.build import from_shape, load


def build_base(request: CellRequest, recorder: Recorder, *, stream: bool, **window: Any) -> Any:
    """The frozen base, with random weights or its own, without a cache; notes the family in the recorder's facts.

    Args:
        stream: whether its layers stream; else everything is on the device.
        window: ``block_size``, ``slots`` and ``resident_blocks``, where they are not the defaults.
    """
    make = from_shape if request.weights == "random" else load
    base = make(
        request.source,
        quantization=request.quantization,
        double_quant=request.double_quant,
        dtype=request.dtype,
        device=recorder.device,
        stream=stream,
        attn_implementation=request.attention,
        **{name: value for name, value in window.items() if value is not None},
    )
    base.config.use_cache = False  # it would only cost memory, and a recompute would update it twice
    recorder.facts["family"] = base.config.model_type
    return base


def build_resident(request: CellRequest, recorder: Recorder) -> Any:
    """Plain QLoRA: everything on the device, in training mode."""
    return add_adapters(request, build_base(request, recorder, stream=False)).train()


def build_streamed(request: CellRequest, recorder: Recorder) -> Any:
    """The same model with its layers streamed, in training mode; notes what it costs where."""
    import poros

    window = {name: getattr(request, name) for name in ("block_size", "slots", "resident_blocks", "replay")}
    model = add_adapters(request, build_base(request, recorder, stream=True, **window)).train()
    report = poros.report(model)
    recorder.facts |= {
        "block_size": report.block_size,
        "slots": report.slots,
        "resident_blocks": report.resident_blocks,
        "host_locked_bytes": report.locked_bytes,
    }
    recorder.facts_at_end = lambda: _launches(poros.report(model))
    return model


def _launches(report: Any) -> dict[str, Any]:
    """How the layers' kernels were launched."""
    some = 0 < report.replayed_layers < report.num_layers
    return {"engine": report.engine} | ({"replayed_layers": report.replayed_layers} if some else {})


def add_adapters(request: CellRequest, base: Any) -> Any:
    """``base`` with the request's adapters, whose first values depend on the seed alone."""
    lora = request.lora
    return add_lora(
        base,
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        target_modules=lora.targets,
        seed=request.seed,
    )
