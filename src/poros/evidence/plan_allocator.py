"""What torch's caching allocator makes of a sequence of requests: how much it hands out, how much it must reserve.

Pure: no torch, no device. The rules are those of ``CUDACachingAllocator`` with its default settings: requests are
rounded to 512 bytes; up to 1 MiB they share segments of 2 MiB, below 10 MiB segments of 20 MiB, and larger ones get a
segment of their own, in multiples of 2 MiB; the smallest free block that fits is taken and split if enough is left;
neighbours that are free merge; a segment is not given back but by :meth:`Allocator.trim`.
"""

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass

_MIB = 2**20
_SMALL = _MIB  # the largest request that goes to the small segments
_MIDDLE = 10 * _MIB  # the first that gets a segment of its own


@dataclass(eq=False)
class Block:
    """A run of bytes in a segment, free or handed out."""

    address: int
    num_bytes: int
    small: bool
    label: str | None = None  # None while it is free
    before: "Block | None" = None
    after: "Block | None" = None


class Allocator:
    """A caching allocator without memory.

    Attributes:
        allocated_bytes, reserved_bytes: Now.
        pool_bytes: Reserved by somebody else beside this, now.
        peak_allocated_bytes, peak_reserved_bytes: Since the start; the latter with ``pool_bytes``.
        terms: Bytes handed out by label, now.
        peak_terms: The same when most was handed out; their sum is ``peak_allocated_bytes``.
    """

    def __init__(self) -> None:
        self.allocated_bytes = self.reserved_bytes = self.pool_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.terms: Counter[str] = Counter()
        self.peak_terms: dict[str, int] = {}
        self._end = 0  # of the last segment, in an address space of our own
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # small? -> sorted (bytes, address)
        self._blocks: dict[int, Block] = {}  # address -> free block

    def allocate(self, num_bytes: int, label: str) -> Block:
        """Hand out a block for ``num_bytes``."""
        size = max(-(-num_bytes // 512) * 512, 512)
        small = size <= _SMALL
        free = self._free[small]
        place = bisect_left(free, (size, 0))
        block = self._blocks.pop(free.pop(place)[1]) if place < len(free) else self._reserve(size, small)
        left = block.num_bytes - size
        if left >= 512 if small else left > _SMALL:
            rest = Block(block.address + size, left, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.num_bytes = rest, size
            self._set_free(rest)
        block.label = label
        self.allocated_bytes += block.num_bytes
        self.terms[label] += block.num_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
            self.peak_terms = {name: count for name, count in self.terms.items() if count}
        return block

    def relabel(self, block: Block, label: str) -> None:
        """Count a block that is in use under another label."""
        assert block.label is not None
        self.terms[block.label] -= block.num_bytes
        self.terms[label] += block.num_bytes
        block.label = label

    def release(self, block: Block) -> None:
        """Take a block back."""
        assert block.label is not None, "released twice"
        self.allocated_bytes -= block.num_bytes
        self.terms[block.label] -= block.num_bytes
        block.label = None
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.label is None:
                self._take(neighbour)
                block = self._merged(*((neighbour, block) if neighbour is block.before else (block, neighbour)))
        self._set_free(block)

    def _reserve(self, size: int, small: bool) -> Block:
        segment = 2 * _MIB if small else 20 * _MIB if size < _MIDDLE else -(-size // (2 * _MIB)) * 2 * _MIB
        block = Block(self._end, segment, small)
        self._end += segment
        self.reserved_bytes += segment
        self._note_peak()
        return block

    def trim(self) -> None:
        """Give back the segments of which nothing is handed out."""
        for block in [b for b in self._blocks.values() if b.before is None and b.after is None]:
            self._take(block)
            self.reserved_bytes -= block.num_bytes

    def set_beside(self, num_bytes: int) -> None:
        """Somebody else has reserved so much by now."""
        self.pool_bytes = num_bytes
        self._note_peak()

    def _note_peak(self) -> None:
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes + self.pool_bytes)

    @staticmethod
    def _merged(first: Block, second: Block) -> Block:
        first.num_bytes += second.num_bytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _set_free(self, block: Block) -> None:
        insort(self._free[block.small], (block.num_bytes, block.address))
        self._blocks[block.address] = block

    def _take(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, (block.num_bytes, block.address))]
        del self._blocks[block.address]
