"""What a model is built with, checked: the precision of its weights, and the place where they go."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from poros.errors import ConfigError
from poros.model import quantize, upstream
from poros.model.memory import require_host_memory
from poros.residency.attachment import Attachment
from poros.residency.discover import find_decoder

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Precision:
    """In how many bits the weights are, and what is computed with them."""

    dtype: torch.dtype
    compute_dtype: torch.dtype | None
    nf4: bool
    double_quant: bool

    @classmethod
    def of(cls, quantization: Any, double_quant: bool, dtype: Any, compute_dtype: Any) -> "Precision":
        """Read the settings as users write them; :class:`ConfigError` for what is not one of them."""
        if quantization not in (None, "nf4"):
            raise ConfigError(f"quantization is {quantization!r}; it must be 'nf4' or None")
        compute = None if compute_dtype is None else _dtype("compute_dtype", compute_dtype)
        return cls(_dtype("dtype", dtype), compute, quantization == "nf4", double_quant)

    def quantizer(self, config: PreTrainedConfig, device: torch.device) -> Any:
        """transformers' quantiser for a model of ``config``; ``None`` if it stays in 16 or 32 bits."""
        stored = quantize.stored_quantization(config)
        compute_dtype = self.compute_dtype or self.dtype
        request = quantize.nf4(self.double_quant, compute_dtype) if self.nf4 and stored is None else None
        quantizer = upstream.quantizer_for(config, request, device)
        if stored is not None and self.compute_dtype is not None:
            quantizer.quantization_config.bnb_4bit_compute_dtype = self.compute_dtype
        return quantizer


@dataclass(frozen=True)
class Place:
    """Where the weights go, and the settings of the window."""

    device: torch.device
    stream: bool
    block_size: int
    slots: int | None
    resident_blocks: int
    micro_batch_size: int | None
    replay: bool
    poison: bool
    checksum: bool

    def attach(self, model: PreTrainedModel) -> Attachment:
        """Find the layers of ``model`` that will stream; nothing moves yet."""
        return Attachment(
            model,
            block_size=self.block_size,
            slots=self.slots,
            resident_blocks=self.resident_blocks,
            micro_batch_size=self.micro_batch_size,
            replay=self.replay,
            device=self.device,
            poison=self.poison,
            checksum=self.checksum,
        )

    def require_memory(self, skeleton: PreTrainedModel, what: str, *, extra_bytes: int = 0) -> None:
        """Raise :class:`ConfigError` unless host memory holds what is kept there and two blocks on their way."""
        layers = [_weight_bytes(layer) for _, layer in find_decoder(skeleton).layers]
        num_blocks = 2
        if self.device.type == "cpu":
            tied = (skeleton.get_parameter(name) for name in skeleton.all_tied_weights_keys)
            kept = _weight_bytes(skeleton) - sum(tensor.numel() * tensor.element_size() for tensor in tied)
            if self.stream:
                # The window, and what stays, are in host memory too, once all is loaded.
                num_blocks = max(num_blocks, (self.slots or 3) + self.resident_blocks)
        else:
            kept = sum(layers) if self.stream else 0
        require_host_memory(
            kept + num_blocks * self.block_size * max(layers) + extra_bytes,
            what,
            "Free memory, raise the limit, or take a smaller model.",
        )


def _dtype(name: str, value: str | torch.dtype) -> torch.dtype:
    dtype = _DTYPES.get(value) if isinstance(value, str) else value
    if dtype is None or dtype not in _DTYPES.values():
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(_DTYPES)}")
    return dtype


def _weight_bytes(module: nn.Module) -> int:
    return sum(quantize.weight_bytes(inner) for inner in module.modules())
