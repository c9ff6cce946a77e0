"""The byte plan of one layer's slab: which frozen tensor lies where.

All frozen tensors of a layer lie in one flat run of bytes, so that one copy moves the layer. Offsets are multiples of
:data:`ALIGNMENT`, as the CUDA allocator's are: a kernel may choose its path by a pointer's alignment, and another path
may give other bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

ALIGNMENT = 512


@dataclass(frozen=True)
class Entry:
    """One tensor inside a slab.

    Attributes:
        name: Where the tensor hangs, relative to its layer (``self_attn.q_proj.weight``).
        dtype: Its type. Packed weights keep their storage type.
        shape: Its shape.
        stride: Its strides, in elements. They are kept: a transposed weight takes another kernel than a contiguous one.
        offset: Bytes from the slab's start; a multiple of :data:`ALIGNMENT`.
        num_bytes: Bytes that the tensor spans.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    num_bytes: int

    def view(self, slab: torch.Tensor) -> torch.Tensor:
        """The tensor as a view into ``slab``, a flat ``uint8`` tensor that starts where the layer's slab starts."""
        run = slab[self.offset : self.offset + self.num_bytes].view(self.dtype)
        return run.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Layout:
    """The byte plan of one layer. Layers of the same structure have equal layouts.

    Attributes:
        entries: The tensors, in the layer's own order.
        num_bytes: The slab's size, a multiple of :data:`ALIGNMENT`.
    """

    entries: tuple[Entry, ...]
    num_bytes: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors alone, without the gaps that alignment leaves."""
        return sum(entry.num_bytes for entry in self.entries)

    def views(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """All entries as views into ``slab``, in order."""
        return [entry.view(slab) for entry in self.entries]


def align(num_bytes: int) -> int:
    """``num_bytes`` rounded up to a multiple of :data:`ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element of ``tensor``, gaps between strided rows included."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def plan_layout(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Lay ``tensors`` (name -> tensor; meta tensors will do) one behind another, each on an aligned offset."""
    entries, offset = [], 0
    for name, tensor in tensors.items():
        size = span_bytes(tensor)
        entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset, size))
        offset += align(size)
    return Layout(tuple(entries), offset)
