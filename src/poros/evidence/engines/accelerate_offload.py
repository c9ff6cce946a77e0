"""accelerate's CPU offload: hooks fetch each module's weights for its forward and drop them after.

Without checkpointing the graph would keep every fetched weight until the backward, and nothing would be gained.
"""

from typing import Any

from poros.evidence.engines.base import CellRequest, Engine

ENGINE = Engine(name="accelerate-offload", title="accelerate CPU offload", changes=("gradient checkpointing",))


def build(request: CellRequest, recorder: Any) -> Any:
    """The resident model, its base handed to accelerate.

    Raises:
        UnsupportedModelError: the installed accelerate cannot offload the base's kind of weight. Tried on one small
            layer, before the base is built.
    """
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    from poros.evidence.engines.qlora import build_resident

    if request.quantization is not None:
        _require_offload_of_4bit(request, recorder.device)
    model = build_resident(request, recorder)
    # As accelerate's cpu_offload hangs its hooks, but not on the adapters: what it fetches gets no gradient.
    for module in list(model.modules()):
        own = list(module.parameters(recurse=False))
        if own and not any(parameter.requires_grad for parameter in own):
            add_hook_to_module(module, AlignDevicesHook(recorder.device, offload=True), append=True)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _require_offload_of_4bit(request: CellRequest, device: Any) -> None:
    """Offload one 4-bit layer and run it."""
    import accelerate
    import bitsandbytes
    import torch

    from poros.errors import UnsupportedModelError

    layer = bitsandbytes.nn.Linear4bit(
        64, 64, bias=False, compress_statistics=request.double_quant, quant_type="nf4", device=device
    )
    layer.weight = bitsandbytes.nn.Params4bit(
        torch.randn(64, 64, device=device),
        requires_grad=False,
        compress_statistics=request.double_quant,
        quant_type="nf4",
    ).to(device)
    layer.quant_state = layer.weight.quant_state
    x = torch.randn(2, 64, device=device)
    expected = layer(x)
    try:
        accelerate.cpu_offload(layer, execution_device=device)
        found = layer(x)
    except (RuntimeError, NotImplementedError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    else:
        if torch.equal(expected, found):
            return
        reason = "it gives other values after"
    raise UnsupportedModelError(
        f"accelerate {accelerate.__version__} cannot offload a 4-bit weight of bitsandbytes "
        f"{bitsandbytes.__version__}: its scales go to the meta device with it, and are lost ({reason})"
    )
