"""Static memory: where recorded visits read what they are given, at addresses that stay."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from poros.residency.layout import span_bytes

_ROOM = 512  # bytes at a multiple of which a static tensor starts, as the allocator's do


class Stage:
    """Memory for what recordings read, shared by all programs: only one visit is on its way at a time.

    A run that has to grow is made anew; the programs that read the old one keep it.
    """

    def __init__(self) -> None:
        self._runs: dict[str, torch.Tensor] = {}  # purpose -> flat bytes

    def run(self, purpose: str, num_bytes: int, device: torch.device) -> torch.Tensor:
        """The first ``num_bytes`` of the run for ``purpose`` (flat ``uint8``)."""
        run = self._runs.get(purpose)
        if run is None or run.numel() < num_bytes:
            size = num_bytes if run is None else max(num_bytes, run.numel() * 3 // 2)
            run = self._runs[purpose] = torch.zeros(size, dtype=torch.uint8, device=device)
        return run[:num_bytes]

    def like(self, purpose: str, tensors: Sequence[torch.Tensor]) -> list["Static"]:
        """A static tensor for each of ``tensors``, in the run for ``purpose``."""
        sizes = [span_bytes(tensor) for tensor in tensors]
        starts = [0, *accumulate(-(-size // _ROOM) * _ROOM for size in sizes)]
        if not sizes:
            return []
        run = self.run(purpose, starts[-1], tensors[0].device)
        return [
            Static(tensor, run[start : start + size])
            for tensor, start, size in zip(tensors, starts, sizes, strict=False)
        ]


class Static:
    """A tensor like another one, at an address that stays; strides and overlaps are those of the other.

    Args:
        memory: Flat ``uint8``, of as many bytes as ``like`` spans.
    """

    def __init__(self, like: torch.Tensor, memory: torch.Tensor) -> None:
        self._run = memory.view(like.dtype)
        self.tensor = self._run.as_strided(like.shape, like.stride())

    def load(self, tensor: torch.Tensor) -> None:
        """Copy ``tensor``, of the same shape and strides, to here."""
        self._run.copy_(tensor.data.as_strided(self._run.shape, (1,)))


class EndToEnd:
    """Tensors of given shapes that lie end to end, one run a type, so that a copy of all is one copy a run."""

    def __init__(self, like: Sequence[torch.Tensor], stage: Stage) -> None:
        self._like = like
        sizes: dict[torch.dtype, int] = {}
        for tensor in like:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
        self._runs = {
            dtype: stage.run(f"gradients in {dtype}", size, like[0].device).view(dtype) for dtype, size in sizes.items()
        }
        self.views = self._views_of(self._runs)

    def copies(self, wanted: Sequence[bool]) -> list[torch.Tensor]:
        """Copies of those that are wanted."""
        if not any(wanted):
            return []
        views = self._views_of({dtype: run.clone() for dtype, run in self._runs.items()})
        return [view for view, is_wanted in zip(views, wanted, strict=True) if is_wanted]

    def _views_of(self, runs: dict[torch.dtype, torch.Tensor]) -> list[torch.Tensor]:
        offsets = dict.fromkeys(runs, 0)
        views = []
        for tensor in self._like:
            start = offsets[tensor.dtype]
            offsets[tensor.dtype] += tensor.numel()
            views.append(runs[tensor.dtype][start : start + tensor.numel()].view(tensor.shape))
        return views


def tensors_of(statics: Sequence[Static]) -> list[torch.Tensor]:
    """The tensors themselves."""
    return [static.tensor for static in statics]
