"""What a prepared model refuses, and how every change to its modules is taken back.

All changes are attributes on instances, none on classes: the model keeps its classes, names and signatures, and
:meth:`Overrides.undo` leaves the instances as they were.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from poros.errors import ResidencyError

_MISSING = object()

# Methods by which PEFT writes adapters into base weights, or takes them out again.
_MERGES = ("merge", "unmerge", "merge_adapter", "unmerge_adapter", "merge_and_unload", "unload")
# Methods by which adapters arrive.
_ADAPTER_ARRIVALS = ("add_adapter", "load_adapter", "inject_adapter")


class Overrides:
    """Attributes set on module instances, with what was there before."""

    def __init__(self) -> None:
        self._set: list[tuple[Any, str, Any]] = []  # (object, name, earlier value or _MISSING)

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set ``target.name``, remembering what it hides. A name that is set already keeps its first memory."""
        if not any(known is target and key == name for known, key, _ in self._set):
            self._set.append((target, name, target.__dict__.get(name, _MISSING)))
        target.__dict__[name] = value

    def has(self, target: Any, name: str) -> bool:
        """Whether ``target.name`` was set here."""
        return any(known is target and key == name for known, key, _ in self._set)

    def undo(self) -> None:
        """Put everything back, latest first."""
        while self._set:
            target, name, earlier = self._set.pop()
            if earlier is _MISSING:
                target.__dict__.pop(name, None)
            else:
                target.__dict__[name] = earlier


def refusal(what: str, instead: str) -> Callable[..., Any]:
    """A function that refuses to do ``what`` and names the way out."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise ResidencyError(f"{what} is not possible while the model is prepared by poros: {instead}")

    return refuse


def guard_copies(overrides: Overrides, module: nn.Module) -> None:
    """Refuse ``deepcopy`` and pickling: both would materialise the base, and tie the copy to the same window."""
    instead = "call poros.unprepare(model) first, or save the adapter alone with save_pretrained"
    overrides.set(module, "__deepcopy__", refusal("deepcopy", instead))
    overrides.set(module, "__reduce_ex__", refusal("pickling the model", instead))


def guard_merges(overrides: Overrides, module: nn.Module) -> None:
    """Refuse to merge adapters into weights that are away most of the time."""
    for name in _MERGES:
        if callable(getattr(type(module), name, None)) and not overrides.has(module, name):
            instead = "call poros.unprepare(model) first, or use the adapter unmerged"
            overrides.set(module, name, refusal(f"{name}()", instead))


def guard_load(overrides: Overrides, module: nn.Module, frozen: set[int]) -> None:
    """Refuse to load values into the frozen tensors that hang on ``module``; ids of all frozen ones are given."""
    if overrides.has(module, "_load_from_state_dict"):
        return

    def load(state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if id(tensor) in frozen and prefix + name in state_dict:
                raise ResidencyError(
                    f"load_state_dict would write to the frozen weight {prefix}{name} of a prepared model. Load "
                    "adapters only, or call poros.unprepare(model) first."
                )
        type(module)._load_from_state_dict(module, state_dict, prefix, *args, **kwargs)

    overrides.set(module, "_load_from_state_dict", load)


def guard_moves(overrides: Overrides, module: nn.Module, device: torch.device) -> None:
    """Check every ``.to()``, ``.half()`` and the like on a module above the layers before anything moves."""
    original: Callable[..., nn.Module] = type(module)._apply

    def _apply(fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        check_move(fn, device)
        return original(module, fn, *args, **kwargs)

    overrides.set(module, "_apply", _apply)


def check_move(fn: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    """Refuse a function that would take tensors off ``device`` or change their type; staying there is fine."""
    probe = torch.empty(1, dtype=torch.float32, device=device)
    moved = fn(probe)
    if moved.device != device:
        raise ResidencyError(
            f"the model is prepared for {device} and cannot be moved to {moved.device}: its base lives in host memory. "
            "Call poros.unprepare(model) first, or prepare it with device=... to compute elsewhere."
        )
    if moved.dtype != probe.dtype:
        raise ResidencyError(
            f"the base of a prepared model is read-only and cannot be cast to {moved.dtype}. Load it in that type, or "
            "call poros.unprepare(model), cast, and prepare again."
        )


def settle_after_arrival(overrides: Overrides, module: nn.Module, settle: Callable[[], None]) -> None:
    """After a method that adds adapters, move them to the compute device (PEFT puts them beside the base weight)."""
    for name in _ADAPTER_ARRIVALS:
        method = getattr(type(module), name, None)
        if not inspect.isfunction(method) or overrides.has(module, name):
            continue

        @functools.wraps(method)
        def arrive(*args: Any, _method: Any = method, **kwargs: Any) -> Any:
            result = _method(module, *args, **kwargs)
            settle()
            return result

        overrides.set(module, name, arrive)


def guard_checkpointing(overrides: Overrides, module: nn.Module, layers: list[nn.Module]) -> None:
    """Keep gradient checkpointing out of streamed layers, where transformers wraps it round ``__call__`` (< 5.23).

    A visit recomputes its layer already; a second recompute round it would run each layer three times.
    """
    method = getattr(type(module), "_set_gradient_checkpointing", None)
    if method is None or all(type(layer).__call__ is nn.Module.__call__ for layer in layers):
        return

    @functools.wraps(method)
    def set_gradient_checkpointing(*args: Any, **kwargs: Any) -> Any:
        result = method(module, *args, **kwargs)
        for layer in layers:
            layer.__dict__["gradient_checkpointing"] = False
        return result

    overrides.set(module, "_set_gradient_checkpointing", set_gradient_checkpointing)
    for layer in layers:
        overrides.set(layer, "gradient_checkpointing", False)
