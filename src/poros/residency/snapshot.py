"""The state around a layer's forward, taken then and put back for its recompute.

The recompute runs later, in another thread, outside the user's context managers, perhaps after an evaluation. What the
layer's values depend on besides its arguments is: the random state, autocast, the attention and matmul switches, the
training flags, and which adapters are active.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# Attributes by which PEFT's layers choose their adapters.
_ADAPTER_FLAGS = ("_active_adapter", "_disable_adapters")


@dataclass(frozen=True)
class RandomState:
    """State of the CPU's and the compute device's default generators."""

    cpu: torch.Tensor
    device: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> "RandomState":
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


@dataclass(frozen=True)
class Autocast:
    """Autocast of one device type. Thread-local, so backward does not see the forward's."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool

    @classmethod
    def now(cls, device_type: str) -> "Autocast":
        return cls(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )

    def entered(self) -> torch.autocast:
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache_enabled
        )


@dataclass(frozen=True)
class Kernels:
    """Switches that choose between kernels of one operation, and so may change bits."""

    flash: bool
    efficient: bool
    math: bool
    cudnn: bool
    matmul_precision: str

    @classmethod
    def now(cls) -> "Kernels":
        cuda = torch.backends.cuda
        return cls(
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            torch.get_float32_matmul_precision(),
        )

    def apply(self) -> None:
        cuda = torch.backends.cuda
        cuda.enable_flash_sdp(self.flash)
        cuda.enable_mem_efficient_sdp(self.efficient)
        cuda.enable_math_sdp(self.math)
        cuda.enable_cudnn_sdp(self.cudnn)
        torch.set_float32_matmul_precision(self.matmul_precision)


def _flags(modules: Sequence[nn.Module]) -> list[tuple[Any, ...]]:
    """``(training, active adapters, adapters disabled)`` of each module."""
    return [(module.training, *(module.__dict__.get(flag) for flag in _ADAPTER_FLAGS)) for module in modules]


def _set_flags(modules: Sequence[nn.Module], flags: Sequence[tuple[Any, ...]]) -> None:
    for module, (training, *adapters) in zip(modules, flags, strict=True):
        module.training = training
        for name, value in zip(_ADAPTER_FLAGS, adapters, strict=True):
            if name in module.__dict__:
                module.__dict__[name] = value


class Snapshot:
    """Everything that a recompute must find as the forward found it.

    Args:
        modules: The layer and all modules inside it.
        device: The compute device.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._modules = modules
        self._device = device
        self._flags = _flags(modules)
        self._autocast = [Autocast.now(kind) for kind in dict.fromkeys(("cpu", device.type))]
        self._kernels = Kernels.now()
        self._random = RandomState.now(device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run the body as the forward ran; afterwards everything is as it was before the body."""
        random, kernels, flags = RandomState.now(self._device), Kernels.now(), _flags(self._modules)
        try:
            with ExitStack() as stack:
                for autocast in self._autocast:
                    stack.enter_context(autocast.entered())
                if flags != self._flags:
                    _set_flags(self._modules, self._flags)
                if kernels != self._kernels:
                    self._kernels.apply()
                self._random.restore(self._device)
                yield
        finally:
            random.restore(self._device)
            if kernels != self._kernels:
                kernels.apply()
            if flags != self._flags:
                _set_flags(self._modules, flags)
