"""What a layer holds: its modules and tensors, found once, and found unchanged at each visit after."""

from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

_STORES = attrgetter("_parameters", "_buffers", "_modules")
_REQUIRES_GRAD = attrgetter("requires_grad")
Place = tuple[dict[str, Any], str, nn.Parameter]  # (a module's _parameters, name, what hangs there)


def descendants(root: nn.Module) -> list[nn.Module]:
    """``root`` and all modules below it, each once. (``modules()`` does the same at several times the cost.)"""
    found, pending, seen = [], [root], set()
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append(module)
        pending.extend(child for child in module._modules.values() if child is not None)
    return found


@dataclass(frozen=True)
class Trainables:
    """What of a layer is trainable at the time of one forward.

    Attributes:
        places: Where the parameters hang; one that hangs twice has two places.
        parameters: The distinct ones, in the layer's order.
        fixed_places, fixed: The same of what neither learns nor streams.
    """

    places: list[Place]
    parameters: list[nn.Parameter]
    fixed_places: list[Place]
    fixed: list[nn.Parameter]


class Inventory:
    """The modules and tensors of one layer.

    A walk over the hundred modules of a layer takes longer than launching several of its kernels, and it would be
    needed at each visit. To find that nothing has changed since takes a fifth of that.

    Args:
        root: The layer.
        frozen_ids: Ids of the tensors that stream.

    Attributes:
        modules: The layer and all modules inside it, the layer first.
        steered: Those that PEFT steers by attributes (``active_adapter``, ``scaling``).
        configured: Those that hold a configuration.
        others: The distinct tensors that do not stream.
        num_frozen: How many distinct tensors that stream hang in the layer.
    """

    def __init__(self, root: nn.Module, frozen_ids: set[int]) -> None:
        self.modules = descendants(root)
        self.steered = [
            module
            for module in self.modules
            if hasattr(module, "_active_adapter") or isinstance(module.__dict__.get("scaling"), dict)
        ]
        self.configured = [m for m in self.modules if "config" in m.__dict__]
        places: list[Any] = [
            (store, name, tensor)
            for module in self.modules
            for store in (module._parameters, module._buffers)
            for name, tensor in store.items()
            if tensor is not None
        ]
        distinct = {id(place[2]): place for place in places}
        frozen = [place for key, place in distinct.items() if key in frozen_ids]
        self._frozen, self._names = [tensor for *_, tensor in frozen], [name for _, name, _ in frozen]
        self._places = [place for place in places if id(place[2]) not in frozen_ids]
        self.others: list[nn.Parameter] = [tensor for key, (*_, tensor) in distinct.items() if key not in frozen_ids]
        self.num_frozen = len(self._frozen)
        self._stores = list(map(_STORES, self.modules))
        self._kept = list(self._values())  # alive, so that no other object can come to have one of their ids
        self._known = self._contents()
        self._flags: list[bool] = []  # which of ``others`` required gradients when last asked
        self._trainables: Trainables | None = None  # the answer then

    def is_current(self) -> bool:
        """Whether the same objects hang in the same places as when this was made."""
        stores = list(map(_STORES, self.modules))
        same = all(map(is_, chain.from_iterable(stores), chain.from_iterable(self._stores)))
        return same and self._contents() == self._known

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` hangs in the layer, itself or as a weight's statistics."""
        return any(tensor is kept for kept in self._kept)

    def learning_frozen(self) -> str | None:
        """The name of a tensor that streams and was made trainable; None if there is none."""
        if not any(map(_REQUIRES_GRAD, self._frozen)):
            return None
        return next(name for name, tensor in zip(self._names, self._frozen, strict=True) if tensor.requires_grad)

    def trainables(self) -> Trainables:
        """What is trainable now."""
        flags = list(map(_REQUIRES_GRAD, self.others))
        if self._trainables is None or flags != self._flags:
            parameters = list(compress(self.others, flags))
            fixed = [tensor for tensor, learns in zip(self.others, flags, strict=True) if not learns]
            self._trainables = Trainables(self._places_of(parameters), parameters, self._places_of(fixed), fixed)
            self._flags = flags
        return self._trainables

    def _places_of(self, tensors: list[nn.Parameter]) -> list[Place]:
        ids = set(map(id, tensors))
        return [place for place in self._places if id(place[2]) in ids]

    def _values(self) -> Any:
        return chain.from_iterable(map(dict.values, chain.from_iterable(self._stores)))

    def _contents(self) -> tuple[list[str], list[int]]:
        names = chain.from_iterable(chain.from_iterable(self._stores))
        return list(names), list(map(id, self._values()))
