"""Tensors inside the nested arguments and results of a layer.

A layer is called with tensors, tuples of tensors and mappings of tensors. Autograd sees only what is passed to a
Function one by one, so the nest is taken apart before, and put together again inside.
"""

from collections.abc import Callable, MutableMapping
from copy import copy
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache


class Leaf(NamedTuple):
    """Stands for a tensor: its place in the flat list."""

    place: int


# Nothing is nested in these. Asked first: to ask whether something is a mapping takes several times as long.
_PLAIN = (torch.Tensor, Leaf, str, int, float, type(None))


def flatten(nest: Any, tensors: list[torch.Tensor]) -> Any:
    """Append each distinct tensor in ``nest`` to ``tensors`` and return the nest with a :class:`Leaf` for each.

    Tuples, lists and mappings are copied; a tensor that occurs twice gets one leaf, so that its gradients add up where
    they would have; everything else is kept as it is.
    """
    seen = {id(tensor): index for index, tensor in enumerate(tensors)}

    def take(tensor: torch.Tensor) -> Leaf:
        if id(tensor) not in seen:
            seen[id(tensor)] = len(tensors)
            tensors.append(tensor)
        return Leaf(seen[id(tensor)])

    return _map(nest, torch.Tensor, take)


def unflatten(template: Any, tensors: list[torch.Tensor]) -> Any:
    """The nest again, with ``tensors`` in the leaves' places. Mappings are new objects of their own type."""
    return _map(template, Leaf, lambda leaf: tensors[leaf.place])


def fingerprint(template: Any) -> Any:
    """A hashable value that is equal for templates which differ in nothing a layer could see.

    What is neither nested nor a plain value counts by its identity, but for empty key-value caches, which count by
    their types.
    """
    if isinstance(template, Cache):
        return type(template), tuple(map(type, template.layers))
    if isinstance(template, Leaf | str | int | float | None | torch.dtype):
        return type(template), template
    if isinstance(template, MutableMapping):
        return type(template), tuple((key, fingerprint(value)) for key, value in template.items())
    if isinstance(template, tuple | list):
        return type(template), tuple(map(fingerprint, template))
    return type(template), id(template)


def mappings(nest: Any) -> list[MutableMapping[Any, Any]]:
    """All mutable mappings in ``nest``, in a fixed order; the layer may write to them."""
    found: list[MutableMapping[Any, Any]] = []
    _find_mappings(nest, found)
    return found


def _find_mappings(nest: Any, found: list[MutableMapping[Any, Any]]) -> None:
    if isinstance(nest, _PLAIN):
        return
    if isinstance(nest, tuple | list):
        for value in nest:
            _find_mappings(value, found)
    elif isinstance(nest, MutableMapping):
        found.append(nest)
        for value in nest.values():
            _find_mappings(value, found)


def _map(nest: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    if isinstance(nest, kind):
        return replace(nest)
    if isinstance(nest, _PLAIN):
        return nest
    if isinstance(nest, MutableMapping):
        mapped = copy(nest)  # keeps the type, and what else such an object carries
        for key, value in nest.items():
            mapped[key] = _map(value, kind, replace)
        return mapped
    if isinstance(nest, tuple | list):
        items = [_map(value, kind, replace) for value in nest]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    return nest
