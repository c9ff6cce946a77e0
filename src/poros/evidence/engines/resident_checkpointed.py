"""Plain QLoRA with gradient checkpointing: what one does first when memory is short."""

from typing import Any

from poros.evidence.engines.base import CellRequest, Engine

ENGINE = Engine(
    name="resident-checkpointed", title="resident, gradient checkpointing", changes=("gradient checkpointing",)
)


def build(request: CellRequest, recorder: Any) -> Any:
    from poros.evidence.engines.qlora import build_resident

    model = build_resident(request, recorder)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model
