"""Host masters: the frozen bytes of each block, in page-locked memory, written once."""

import contextlib
import logging
import mmap
import weakref

import torch

from poros.units import format_bytes

log = logging.getLogger("poros")


class HostStore:
    """Host memory for the slabs of all blocks: one exact allocation a block, page-locked once it is filled.

    Layout:
        ``blocks[b]`` is a flat ``uint8`` tensor over an anonymous mapping of its own, so it starts on a page and takes
        the bytes that were asked for. (``pin_memory`` would round each request up to a power of two.)

    Hazards handled:
        A failed page-lock is announced, its CUDA error is cleared (it would surface at the next kernel launch, far
        from here), and the run goes on with ordinary memory: slower copies, the same bits.

    Args:
        device: The compute device. Memory is page-locked only for a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks: list[torch.Tensor] = []
        self.locked_bytes = 0
        self.lock_error: str | None = None
        self._locked: list[int] = []  # addresses to unlock
        # At exit the driver unlocks by itself; calling it then would race with its own teardown.
        self._finalizer = weakref.finalize(self, _unlock, self._locked)
        self._finalizer.atexit = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.numel() for block in self.blocks)

    def add(self, num_bytes: int) -> torch.Tensor:
        """A new block of ``num_bytes`` (flat ``uint8``, page-aligned), to be filled and then given to :meth:`lock`."""
        block = allocate(num_bytes)
        if self.device.type == "cuda":
            block.zero_()  # all cores touch its pages at once; a copy from the device would, one after another
        self.blocks.append(block)
        return block

    def lock(self, block: torch.Tensor) -> None:
        """Page-lock a filled block, so that copies to the GPU run at the link's rate and beside the computation."""
        if self.device.type != "cuda" or self.lock_error is not None or block.numel() == 0:
            return
        code = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0))
        if code == 0:
            self._locked.append(block.data_ptr())
            self.locked_bytes += block.numel()
            return
        _clear_cuda_error(self.device)
        self.lock_error = (
            f"page-locking {format_bytes(block.numel())} failed (CUDA error {code}) with "
            f"{format_bytes(self.locked_bytes)} locked"
        )
        log.warning(
            "%s; the remaining blocks stay in ordinary memory: same results, slower copies. "
            "A higher limit on locked memory (ulimit -l) or more free memory avoids this.",
            self.lock_error,
        )

    def close(self) -> None:
        """Unlock all pages. The memory itself lives as long as a tensor refers to it."""
        _unlock(self._locked)
        self.locked_bytes = 0
        self.blocks = []


def allocate(num_bytes: int) -> torch.Tensor:
    """A flat ``uint8`` host tensor of exactly ``num_bytes``, page-aligned, in a private anonymous mapping."""
    if num_bytes == 0 or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _unlock(addresses: list[int]) -> None:
    while addresses:
        torch.cuda.cudart().cudaHostUnregister(addresses.pop())


def _clear_cuda_error(device: torch.device) -> None:
    """Take the failed call's error off the CUDA context: the next kernel launch reports and clears it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
