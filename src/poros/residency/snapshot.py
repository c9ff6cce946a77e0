"""The state around a layer's forward, taken then and put back for its recompute.

The recompute runs later, in another thread, outside the user's context managers, perhaps after an evaluation. What the
layer's values depend on besides its arguments is: the random state, autocast, the switches between kernels, the
training flags, hooks inside the layer, and what PEFT steers its layers by.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from poros.residency.cleanup import Cleanup

# Attributes by which PEFT's layers choose their adapters.
_FLAGS = ("training", "_active_adapter", "_disable_adapters")
# Dicts on a module that change what its forward does. PEFT sets hooks and scales for the time of one model forward.
_DICTS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "scaling",
)


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


def _attribute(holder: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(holder, name), lambda value: setattr(holder, name, value)


_cuda = torch.backends.cuda
# Switches that choose between kernels of one operation, and so may change bits: (read, write). Some are not in every
# version of torch.
_SWITCHES: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    (lambda: torch._C._get_sdp_priority_order(), lambda value: torch._C._set_sdp_priority_order(value)),
    (lambda: torch._C._get_mkldnn_enabled(), lambda value: torch._C._set_mkldnn_enabled(value)),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _attribute(_cuda.matmul, "fp32_precision"),
    _attribute(_cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    _attribute(_cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    _attribute(_cuda.matmul, "allow_fp16_accumulation"),
]
_UNREADABLE = object()


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (AttributeError, RuntimeError):  # not in this torch, or set through the newer of two interfaces
        return _UNREADABLE


def _read_switches() -> list[Any]:
    return [_read(read) for read, _ in _SWITCHES]


def _write_switches(wanted: Sequence[Any]) -> None:
    for (read, write), value in zip(_SWITCHES, wanted, strict=True):
        # Read again each time: one switch may have set another.
        if value is not _UNREADABLE and _read(read) not in (value, _UNREADABLE):
            write(value)


class ModuleStates:
    """What the modules of a layer, and the configurations that they read, are set to."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._flags = [[module.__dict__.get(name) for name in _FLAGS] for module in modules]
        # module -> name -> content, for the dicts that hold something
        self._dicts = [
            {name: dict(held) for name in _DICTS if isinstance(held := module.__dict__.get(name), dict) and held}
            for module in modules
        ]
        configs = {id(config): config for module in modules if (config := module.__dict__.get("config")) is not None}
        self._attention = [(config, getattr(config, "_attn_implementation", None)) for config in configs.values()]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModuleStates):
            return NotImplemented
        mine = (self._flags, self._dicts, [attention for _, attention in self._attention])
        return mine == (other._flags, other._dicts, [attention for _, attention in other._attention])

    __hash__ = None  # type: ignore[assignment]  # compared, never looked up

    @property
    def hooked(self) -> bool:
        """Whether a module inside the layer (the layer itself apart) has forward hooks."""
        return any(name != "scaling" for held in self._dicts[1:] for name in held)

    def apply(self) -> Callable[[], None]:
        """Set the modules to this state; what comes back sets them as they were, to the very same dicts."""
        before = ModuleStates(self._modules)
        originals = [{name: module.__dict__.get(name) for name in _DICTS} for module in self._modules]
        for module, held in zip(self._modules, self._dicts, strict=True):
            for name in _DICTS:
                if isinstance(module.__dict__.get(name), dict):
                    module.__dict__[name] = OrderedDict(held.get(name, {}))
        self._set_plain()

        def undo() -> None:
            for module, dicts in zip(self._modules, originals, strict=True):
                module.__dict__.update({name: held for name, held in dicts.items() if held is not None})
            before._set_plain()

        return undo

    def _set_plain(self) -> None:
        for module, values in zip(self._modules, self._flags, strict=True):
            for name, value in zip(_FLAGS, values, strict=True):
                if name in module.__dict__:
                    module.__dict__[name] = value
        for config, attention in self._attention:
            if getattr(config, "_attn_implementation", None) != attention:
                config._attn_implementation = attention


class Snapshot:
    """Everything that a recompute must find as the forward found it.

    Args:
        modules: The layer and all modules inside it, the layer first.
        device: The compute device.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._modules = modules
        self._device = device
        self.states = ModuleStates(modules)
        self._autocast = [Autocast.now(kind) for kind in dict.fromkeys(("cpu", device.type))]
        self._switches = _read_switches()
        self._random = RandomState.now(device)

    @contextmanager
    def restored(self, cleanup: Cleanup) -> Iterator[None]:
        """Run the body as the forward ran; afterwards everything is as it was before the body."""
        random, switches = RandomState.now(self._device), _read_switches()
        with ExitStack() as stack:
            stack.callback(random.restore, self._device)
            if switches != self._switches:
                stack.enter_context(cleanup.ensured(lambda: _write_switches(switches)))
                _write_switches(self._switches)
            if self.states != ModuleStates(self._modules):
                stack.enter_context(cleanup.ensured(self.states.apply()))
            for autocast in self._autocast:
                stack.enter_context(autocast.entered())
            self._random.restore(self._device)
            yield
