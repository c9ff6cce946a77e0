"""Key-value caches in forwards with gradients: each visit gets an empty one of its own."""

from collections.abc import Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from transformers.cache_utils import Cache

from poros.errors import ResidencyError
from poros.residency.layer import StreamedLayer

_LEFT_EMPTY = "_poros_left_empty"  # on a cache: the layers that did not write to it
_CACHE_IN_TRAINING = (
    "a forward with gradients was given a key-value cache to continue from (prefix tuning, or decoding outside "
    "torch.no_grad()). Run decoding under torch.no_grad(); prefix tuning of a prepared model is not supported."
)


def with_private_caches(
    layer: StreamedLayer, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Put a copy in the place of an empty key-value cache, for a forward with gradients.

    transformers makes a cache in training too, unless told otherwise, and a layer with a cache may run other kernels
    than one without. So the layer gets one, but its own: the recompute must find it as empty as the forward did, and
    the keys and values of all layers, which nobody reads, are not kept.
    """

    def replace(value: Any) -> Any:
        if not isinstance(value, Cache):
            return value
        if value.get_seq_length() > 0 or any(_holds_tensors(part) for part in value.layers):
            raise ResidencyError(_CACHE_IN_TRAINING)
        private = fresh_cache(value, layer.index)
        if layer.index < len(private.layers):
            _move_scalars(private.layers[layer.index], device)
        value.__dict__.setdefault(_LEFT_EMPTY, set()).add(layer.name)
        return private

    return tuple(map(replace, args)), {key: replace(value) for key, value in kwargs.items()}


def fresh_cache(value: Any, index: int) -> Any:
    """A copy of an empty cache for the layer ``index``, which writes to its own part only; anything else as it is."""
    if not isinstance(value, Cache):
        return value
    fresh = copy(value)
    fresh.layers = [deepcopy(part) if place == index else part for place, part in enumerate(value.layers)]
    return fresh


def _move_scalars(part: Any, device: torch.device) -> None:
    """Put numbers that a part of a cache holds as tensors on ``device`` already: a recording cannot fetch them."""
    for name, held in vars(part).items():
        if isinstance(held, torch.Tensor) and held.ndim == 0 and held.device.type == "cpu" != device.type:
            setattr(part, name, torch.full((), held.item(), dtype=held.dtype, device=device))


def _holds_tensors(part: Any) -> bool:
    return any(isinstance(held, torch.Tensor) and held.ndim > 1 and held.numel() > 0 for held in vars(part).values())


def refuse_left_empty(layer: StreamedLayer, values: Sequence[Any]) -> None:
    """Refuse to continue from a cache that an earlier forward should have filled and did not."""
    for value in values:
        if isinstance(value, Cache) and layer.name in value.__dict__.get(_LEFT_EMPTY, ()):
            raise ResidencyError(_CACHE_IN_TRAINING)
