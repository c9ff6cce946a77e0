"""Four bits: which linears are quantised, how one weight is, and what a checkpoint that already is must hold.

The only module that imports bitsandbytes. On-the-fly quantisation itself runs through transformers' loader, so that the
bytes are those that ``from_pretrained`` gives on the same device.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeGuard

import bitsandbytes as bnb
import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations import replace_with_bnb_linear

from poros.errors import CheckpointError, UnsupportedModelError
from poros.model.checkpoint import Checkpoint

_BLOCK = 64  # weights that share one absmax
_NESTED_BLOCK = 256  # absmax values that share one scale, with double quantisation
_STATE = "quant_state.bitsandbytes__"  # followed by the data type; holds shapes and block sizes


def nf4(double_quant: bool, compute_dtype: torch.dtype) -> BitsAndBytesConfig:
    """The request for NF4 weights, as a user would pass it to ``from_pretrained``."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def stored_quantization(config: PreTrainedConfig) -> Any:
    """The quantisation that a checkpoint was saved with, or ``None``.

    Raises:
        UnsupportedModelError: it is another one than bitsandbytes' 4 bits.
    """
    stored = getattr(config, "quantization_config", None)
    stored = stored or getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if stored is None:
        return None
    settings: Mapping[str, Any] = stored if isinstance(stored, dict) else stored.to_dict()
    if not settings.get("load_in_4bit", False):
        method = "bitsandbytes 8-bit" if settings.get("load_in_8bit") else settings.get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"the checkpoint is already quantised ({method}), and only bitsandbytes' 4-bit checkpoints can be read as "
            "they are. Give the 16-bit checkpoint of the same model, or dequantise and save this one with transformers."
        )
    return stored


def is_4bit(module: nn.Module) -> TypeGuard[Any]:
    """Whether ``module`` is a linear layer with a 4-bit weight."""
    return isinstance(module, bnb.nn.Linear4bit)


def quantize_weight(linear: nn.Module, weight: torch.Tensor) -> None:
    """Give an empty 4-bit ``linear`` the weight ``(out, in)``, quantised on the device where that is."""
    assert is_4bit(linear)
    settings = {name: value for name, value in vars(linear.weight).items() if not name.startswith("_")}
    linear.weight = bnb.nn.Params4bit(weight, requires_grad=False, **settings).to(weight.device)


def keep_weights_as_packed(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights in place for some CPUs, which would change their bytes."""
    for module in model.modules():
        if is_4bit(module):
            module.support_avx512bf16_for_cpu = False


def weight_bytes(module: nn.Module) -> int:
    """Bytes of the parameters and persistent buffers that ``module`` itself has, or will have once quantised."""
    num_bytes = 0
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if name == "weight" and is_4bit(module):
            num_bytes += _packed_bytes(module.in_features * module.out_features, module.weight.compress_statistics)
        else:
            num_bytes += tensor.numel() * tensor.element_size()
    return num_bytes


def _packed_bytes(num_weights: int, double_quant: bool) -> int:
    num_blocks = -(-num_weights // _BLOCK)
    statistics = num_blocks + 4 * -(-num_blocks // _NESTED_BLOCK) + 4 if double_quant else 4 * num_blocks
    return (num_weights + 1) // 2 + statistics


def settle_stored_weights(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    sources: Mapping[str, Sequence[str]],
    config: BitsAndBytesConfig,
    dtype: torch.dtype,
) -> None:
    """Make the linears of a skeleton what an already quantised checkpoint says they are.

    Which linears are packed is read from the checkpoint's tensors, not from the list of exceptions in its
    configuration: how that list is matched with names differs between releases of transformers.

    Args:
        model: the skeleton, on the meta device.
        checkpoint: the files.
        sources: parameter name -> names of the checkpoint's tensors that it is made from.
        config: how the checkpoint was quantised.
        dtype: of a linear that turns out not to be quantised.

    Raises:
        CheckpointError: a weight is packed and a part of its quantisation state is missing.
    """
    for name, module in list(model.named_modules()):
        keys = sources.get(f"{name}.weight", ())
        weight = next((key for key in keys if key.endswith("weight")), None)
        if weight is None or not isinstance(module, nn.Linear):
            continue  # a weight that is not there at all is reported with the other missing tensors
        parts = {key.removeprefix(f"{weight}.") for key in keys if key != weight}
        if parts:
            _require_parts(weight, parts)
            if not is_4bit(module):
                holder = nn.Sequential(module)
                replace_with_bnb_linear(holder, quantization_config=config, pre_quantized=True)
                holder[0].bias = module.bias  # which has the model's dtype
                model.set_submodule(name, holder[0])
        elif is_4bit(module):
            if checkpoint[weight].shape != (module.out_features, module.in_features):
                raise _missing_part(weight, f"{_STATE}nf4", checkpoint[weight].shape)
            with torch.device("meta"):
                plain = nn.Linear(module.in_features, module.out_features, module.bias is not None, dtype=dtype)
            model.set_submodule(name, plain)


def _require_parts(weight: str, parts: Collection[str]) -> None:
    required = ["absmax", "quant_map"]
    if any(part.startswith("nested_") for part in parts):
        required += ["nested_absmax", "nested_quant_map"]
    for part in required:
        if part not in parts:
            raise _missing_part(weight, part)
    if not any(part.startswith(_STATE) for part in parts):
        raise _missing_part(weight, f"{_STATE}nf4")


def _missing_part(weight: str, part: str, shape: Sequence[int] | None = None) -> CheckpointError:
    found = "" if shape is None else f" of shape {tuple(shape)}"
    return CheckpointError(
        f"tensor {weight!r}{found} is packed in 4 bits, but its {weight}.{part} is missing from the checkpoint, so it "
        "cannot be unpacked. Quantise the model again from its 16-bit checkpoint."
    )


def require_quantized(name: str, layer: nn.Module) -> None:
    """Raise :class:`CheckpointError` if a 4-bit weight in ``layer``, called ``name``, is not what its linear needs."""
    for path, module in layer.named_modules():
        if is_4bit(module):
            state = module.weight.quant_state
            if state is None or tuple(state.shape) != (module.out_features, module.in_features):
                found = "no quantisation state" if state is None else f"shape {tuple(state.shape)}"
                raise CheckpointError(
                    f"the 4-bit weight of {name}.{path} has {found}; ({module.out_features}, {module.in_features}) "
                    "is needed. Configuration and weights are not of the same model."
                )
