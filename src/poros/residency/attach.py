"""Preparing a live model for streaming, and undoing it."""

import gc
import logging
from typing import Any, TypeVar

import torch
from torch import nn

from poros.errors import ConfigError, ResidencyError, UnsupportedModelError
from poros.residency.attachment import Attachment, attachment_of, check_sizes, compute_device
from poros.residency.layer import refuse_kinds
from poros.residency.report import Report
from poros.residency.transfer import return_cached_memory

__all__ = ["attachment_of", "prepare", "report", "unprepare"]

log = logging.getLogger("poros")

Model = TypeVar("Model", bound=nn.Module)


def prepare(
    model: Model,
    *,
    block_size: int | None = None,
    slots: int | None = None,
    resident_blocks: int | None = None,
    micro_batch_size: int | None = None,
    replay: bool | None = None,
    device: torch.device | str | None = None,
    poison: bool | None = None,
    checksum: bool | None = None,
) -> Model:
    """Let the frozen decoder layers of ``model`` live in host memory and stream through a window while it runs.

    In place: the same object comes back, with the same names, parameters, classes and signatures, and trains to the
    same bits. Wherever the base is now (GPU, CPU, split by accelerate), it ends up in host memory, and everything else
    on the compute device. A second call on a prepared model changes nothing; do it after adding PEFT adapters to a
    model from :func:`poros.load` if you want them on the device at once.

    Args:
        model: A transformers causal language model of a supported family, bare or with PEFT adapters.
        block_size: Layers a block, the unit of transfer. 1 (default) needs least memory; 4 is the classic setting.
        slots: Blocks in the window: by default 3 for single-layer blocks and 2 for larger ones. With 1, copies do not
            overlap the computation.
        resident_blocks: Blocks that stay on the device, spread evenly between those that stream (default 0): the more,
            the less crosses the link. They change no bit.
        micro_batch_size: Split larger batches inside each visit, in forwards with gradients, so that one transfer
            serves many small batches. The bits are those of a resident model whose layers split in the same way.
        replay: Record each layer's visits as CUDA graphs and replay them (default True), which spares the host most of
            its work and changes no bit. Layers that cannot be recorded run eagerly, and the report names them. On a CPU
            there is nothing to record.
        device: Where to compute; by default CUDA if there is one, else the CPU.
        poison: Overwrite each slot before it is refilled (debugging).
        checksum: Check that each layer's recompute gives its forward's output, and name the layer if not (debugging).

    Returns:
        ``model``. :func:`report` tells what it costs where.

    Raises:
        UnsupportedModelError: the architecture or the precision is not supported. Nothing was changed.
        ConfigError: a setting is out of its limits, or differs from those that the model is prepared with.
        ResidencyError: the model cannot be prepared as it is; the message says what to do.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"prepare takes a model that is loaded, not a {type(model).__name__}. "
            "To load one from a hub id or a folder so that it streams, use poros.load."
        )
    if replay not in (None, True, False):
        raise ConfigError(f"replay is {replay!r}; it must be True or False")
    attachment = attachment_of(model)
    if attachment is not None:
        asked: dict[str, Any] = {
            "block_size": block_size,
            "slots": slots,
            "resident_blocks": resident_blocks,
            "device": device,
        }
        asked |= {"micro_batch_size": micro_batch_size, "replay": replay, "poison": poison, "checksum": checksum}
        _check_same_settings(attachment, asked)
        attachment.guard(model)
        attachment.settle()
        return model
    attachment = Attachment(
        model,
        block_size=1 if block_size is None else block_size,
        slots=slots,
        resident_blocks=0 if resident_blocks is None else resident_blocks,
        micro_batch_size=micro_batch_size,
        replay=replay is not False,
        device=device,
        poison=bool(poison),
        checksum=bool(checksum),
    )
    refuse_kinds(attachment.decoder.layers)
    _absorb_dispatch(model)
    try:
        for block in range(attachment.num_blocks):
            attachment.pack(block)
        attachment.finish()
        gc.collect()
        return_cached_memory(attachment.device)
        log.info("%s", attachment.report())
    except BaseException:
        attachment.undo()
        raise
    return model


def unprepare(model: Model) -> Model:
    """Undo :func:`prepare`: every tensor goes back to the device it came from, every change to the model is undone.

    Hooks by which accelerate had split the model over devices are not put back.

    Raises:
        ResidencyError: the model is not prepared, or its old device lacks the memory (then nothing was changed).
    """
    attachment = attachment_of(model)
    if attachment is None:
        raise ResidencyError("the model is not prepared by poros; there is nothing to undo")
    attachment.undo()
    return model


def report(model: nn.Module) -> Report:
    """What a prepared model costs where, as of now.

    Raises:
        ResidencyError: the model is not prepared.
    """
    attachment = attachment_of(model)
    if attachment is None:
        raise ResidencyError("the model is not prepared by poros")
    return attachment.report()


def _check_same_settings(attachment: Attachment, asked: dict[str, Any]) -> None:
    check_sizes(**{name: asked[name] for name in ("block_size", "slots", "resident_blocks", "micro_batch_size")})
    wanted = dict(asked)
    if asked["device"] is not None:
        wanted["device"] = compute_device(asked["device"])
    limits = {"block_size": len(attachment.layers)}
    limits["slots"] = limits["resident_blocks"] = attachment.num_blocks
    for name, limit in limits.items():
        if asked[name] is not None:
            wanted[name] = min(asked[name], limit)
    for name, value in wanted.items():
        present = getattr(attachment, name)
        if value is not None and value != present:
            raise ConfigError(
                f"the model is already prepared with {name}={present}, so not with {name}={asked[name]}. "
                "Call poros.unprepare(model) first."
            )


def _absorb_dispatch(model: nn.Module) -> None:
    """Take accelerate's dispatch hooks off the model, so that every weight is where its parameter says."""
    # Not hasattr: PEFT's wrappers pass an unknown name on to the model inside them.
    hooked = [(name, module) for name, module in model.named_modules() if "_hf_hook" in vars(module)]
    if not hooked:
        return
    from accelerate.hooks import remove_hook_from_module

    lost = [f"{name}.{key}" for name, module in hooked for key in _values_accelerate_cannot_return(module)]
    if lost:
        raise ResidencyError(
            f"{lost[0]} and {len(lost) - 1} other parameters were offloaded by accelerate and have no values "
            'here. Load the model without offload: from_pretrained(..., device_map="cpu"), or poros.load(...).'
        )
    for _, module in hooked:
        remove_hook_from_module(module)


def _values_accelerate_cannot_return(module: Any) -> list[str]:
    """Tensors that had no values when accelerate took them over: it fetches them anew for each forward."""
    hooks = getattr(module._hf_hook, "hooks", (module._hf_hook,))
    origins = {name: home for hook in hooks for name, home in getattr(hook, "original_devices", {}).items()}
    return [name for name, home in origins.items() if home.type == "meta"]
