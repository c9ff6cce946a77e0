"""The state around a layer's forward, taken then and put back for its recompute.

The recompute runs later, in another thread, outside the user's context managers, perhaps after an evaluation. What the
layer's values depend on besides its arguments is: the random state, autocast, the switches between kernels, the
training flags, hooks inside the layer, and what PEFT steers its layers by.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from poros.residency.cleanup import Cleanup
from poros.residency.inventory import Inventory

# Attributes by which PEFT's layers choose their adapters.
_FLAGS = ("_active_adapter", "_disable_adapters")
# Dicts on a module that change what its forward does. PEFT sets hooks and scales for the time of one model forward.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_hooks_of = attrgetter(*_HOOKS)
_training_of = attrgetter("training")


@dataclass(frozen=True)
class RandomState:
    """State of the CPU's and the compute device's default generators."""

    cpu: torch.Tensor
    device: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> "RandomState":
        cuda = torch.cuda.default_generators[device.index].get_state() if device.type == "cuda" else None
        return cls(torch.default_generator.get_state(), cuda)

    def restore(self, device: torch.device) -> None:
        torch.default_generator.set_state(self.cpu)
        if self.device is not None:
            torch.cuda.default_generators[device.index].set_state(self.device)


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
    """What the modules of a layer, and the configurations that they read, are set to.

    Taken at each visit, so it is kept flat, and what is the same for nearly all modules is looked at without a loop.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        modules, steered = inventory.modules, inventory.steered
        self._training = list(map(_training_of, modules))
        hooks = list(map(_hooks_of, modules))
        # place of a module -> its dicts of hooks, for the modules that have any
        self._hooks = (
            {place: tuple(map(dict, held)) for place, held in enumerate(hooks) if any(held)}
            if any(chain.from_iterable(hooks))
            else {}
        )
        self._flags = [module.__dict__.get(name) for module in steered for name in _FLAGS]
        scaling = [module.__dict__.get("scaling") for module in steered]
        self._scaling = [dict(held) if isinstance(held, dict) else {} for held in scaling]
        configs = [module.__dict__.get("config") for module in inventory.configured]
        self._configs = list({id(config): config for config in configs if config is not None}.values())
        self._attention = [getattr(config, "_attn_implementation", None) for config in self._configs]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModuleStates):
            return NotImplemented
        return (
            self._training == other._training
            and self._hooks == other._hooks
            and self._flags == other._flags
            and self._scaling == other._scaling
            and self._attention == other._attention
        )

    __hash__ = None  # type: ignore[assignment]  # compared, never looked up

    @property
    def hooked(self) -> bool:
        """Whether a module inside the layer (the layer itself apart) has forward hooks."""
        return any(self._hooks.keys() - {0})

    def values(self) -> Any:
        """Everything but the hooks, hashable."""
        flags = tuple(tuple(flag) if isinstance(flag, list) else flag for flag in self._flags)
        scaling = tuple(tuple(held.items()) for held in self._scaling)
        return tuple(self._training), flags, scaling, tuple(self._attention)

    def apply(self) -> Callable[[], None]:
        """Set the modules to this state; what comes back sets them as they were, to the very same dicts."""
        inventory = self._inventory
        none: tuple[dict[Any, Any], ...] = ({},) * len(_HOOKS)
        before = ModuleStates(inventory)
        places = sorted(self._hooks.keys() | before._hooks.keys())
        wanted = [(inventory.modules[p], dict(zip(_HOOKS, self._hooks.get(p, none), strict=True))) for p in places]
        wanted += [
            (m, {"scaling": held})
            for m, held in zip(inventory.steered, self._scaling, strict=True)
            if isinstance(m.__dict__.get("scaling"), dict)
        ]
        originals = [(module, {name: module.__dict__[name] for name in held}) for module, held in wanted]
        for module, held in wanted:
            module.__dict__.update({name: OrderedDict(values) for name, values in held.items()})
        self._set_plain()

        def undo() -> None:
            for module, held in originals:
                module.__dict__.update(held)
            before._set_plain()

        return undo

    def _set_plain(self) -> None:
        for module, training in zip(self._inventory.modules, self._training, strict=True):
            module.training = training
        flags = iter(self._flags)
        for module in self._inventory.steered:
            for name in _FLAGS:
                value = next(flags)
                if name in module.__dict__:
                    module.__dict__[name] = value
        for config, attention in zip(self._configs, self._attention, strict=True):
            if getattr(config, "_attn_implementation", None) != attention:
                config._attn_implementation = attention


class Snapshot:
    """Everything that a recompute must find as the forward found it.

    Args:
        inventory: The layer's modules.
        device: The compute device.
    """

    def __init__(self, inventory: Inventory, device: torch.device) -> None:
        self._inventory = inventory
        self._device = device
        self.states = ModuleStates(inventory)
        self._autocast = [Autocast.now(kind) for kind in dict.fromkeys(("cpu", device.type))]
        self._switches = _read_switches()
        self._random = RandomState.now(device)

    @contextmanager
    def restored(self, cleanup: Cleanup) -> Iterator[None]:
        """Run the body as the forward ran; afterwards everything is as it was before the body."""
        with self.random_restored(), self.surroundings_restored(cleanup):
            yield

    @contextmanager
    def surroundings_restored(self, cleanup: Cleanup) -> Iterator[None]:
        """Run the body as the forward ran, with the present random state."""
        switches = _read_switches()
        with ExitStack() as stack:
            if switches != self._switches:
                stack.enter_context(cleanup.ensured(lambda: _write_switches(switches)))
                _write_switches(self._switches)
            if self.states != ModuleStates(self._inventory):
                stack.enter_context(cleanup.ensured(self.states.apply()))
            for autocast in self._autocast:
                if autocast.enabled or torch.is_autocast_enabled(autocast.device_type):
                    stack.enter_context(autocast.entered())
            yield

    @contextmanager
    def random_restored(self) -> Iterator[None]:
        """Run the body with the random state that the forward had found."""
        random = RandomState.now(self._device)
        try:
            self._random.restore(self._device)
            yield
        finally:
            random.restore(self._device)

    def kernel_choice(self) -> Any:
        """What the choice of kernels depends on besides the arguments, hashable."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        return self.states.values(), tuple(self._autocast), tuple(map(repr, self._switches)), deterministic
