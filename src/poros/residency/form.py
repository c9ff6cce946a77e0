"""The form of a layer: what it computes, weights and inputs apart. Layers of one form can stand in for each other."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from poros.residency.inventory import Inventory, Trainables
from poros.residency.layer import StreamedLayer, side_tensors

# Attributes in which layers of one form may differ: their place, and what the snapshot of a visit looks at.
_APART = frozenset(
    (
        "layer_idx",
        "training",
        "_parameters",
        "_buffers",
        "_modules",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_active_adapter",
        "_disable_adapters",
        "compute_type_is_set",  # 4-bit layers note that they have run
    )
)
_SCALARS = (bool, int, float, str, type(None), torch.dtype, torch.Size)


@dataclass(frozen=True)
class _Kept:
    """A layer's form, and what it was found from.

    Attributes:
        values: Of all attributes of the modules; kept alive, so that no other object can come to have an id of theirs.
        ids: Their ids.
        number: The form's.
    """

    trainables: Trainables
    values: list[Any]
    ids: list[int]
    number: int


class Forms:
    """Numbers for the forms of a model's layers.

    Every attribute of every module counts: whoever sets another dropout gets another form. As this takes time, a form
    is found once and kept until some attribute is another object.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}  # form -> its number
        self._kept: dict[int, _Kept] = {}  # index of a layer -> its form

    def number_of(self, layer: StreamedLayer, inventory: Inventory) -> int:
        """The number of ``layer``'s form as it is now; equal forms have equal numbers."""
        values = list(chain.from_iterable(module.__dict__.values() for module in inventory.modules))
        kept, trainables, ids = self._kept.get(layer.index), inventory.trainables(), list(map(id, values))
        if kept is None or kept.trainables is not trainables or kept.ids != ids:
            form = _describe(layer, inventory)
            kept = _Kept(trainables, values, ids, self._numbers.setdefault(form, len(self._numbers)))
            self._kept[layer.index] = kept
        return kept.number


def _describe(layer: StreamedLayer, inventory: Inventory) -> Any:
    learning = {id(parameter): place for place, parameter in enumerate(inventory.trainables().parameters)}
    return layer.layout, tuple(_describe_module(module, learning) for module in inventory.modules)


def _describe_module(module: nn.Module, learning: dict[int, int]) -> Any:
    attributes = tuple(
        (name, _describe_value(value)) for name, value in sorted(module.__dict__.items()) if name not in _APART
    )
    tensors = tuple(
        (name, None if tensor is None else _describe_tensor(tensor, learning))
        for name, tensor in chain(module._parameters.items(), module._buffers.items())
    )
    return type(module), attributes, tensors, tuple(module._modules)


def _describe_tensor(tensor: torch.Tensor, learning: dict[int, int]) -> Any:
    state = getattr(tensor, "quant_state", None)
    sides = tuple(name for name, _ in side_tensors(tensor))
    scalars = () if state is None else tuple(_scalars(vars(state)))
    return type(tensor), tensor.dtype, tuple(tensor.shape), learning.get(id(tensor)), sides, scalars


def _describe_value(value: Any) -> Any:
    """A value where it is a simple one, else its type: what else a module holds is a part of it, or common to all."""
    if isinstance(value, _SCALARS):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_describe_value, value))
    if isinstance(value, dict):
        return type(value), tuple((str(key), _describe_value(held)) for key, held in value.items())
    if callable(value) and hasattr(value, "__qualname__"):
        return getattr(value, "__module__", None), value.__qualname__
    return type(value)


def _scalars(attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(attributes.items()):
        if isinstance(value, _SCALARS):
            yield name, value
        elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
            yield name, tuple(_scalars(vars(value)))
