"""The window: a few slots on the compute device through which the blocks pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from poros.errors import ResidencyError
from poros.residency.schedule import Phase, Schedule
from poros.residency.store import allocate
from poros.residency.transfer import Mark, Transfer

POISON = 0xFF  # as bf16 or fp32 a NaN, as an index far out of range


@dataclass
class Slot:
    """One block's worth of device memory.

    Who owns the memory:
        - ``block is None``: nobody, or a copy whose submission was interrupted; its content means nothing.
        - ``block`` set: the copy stream until ``ready`` is reached; after that, readers.
        - ``held``: a visit computes from it. It must not be refilled.
        - released: work that was queued may still read it until all of ``readers`` are reached; a refill waits.
    """

    memory: torch.Tensor
    block: int | None = None
    held: bool = False
    ready: Mark = None
    readers: dict[int, Mark] = field(default_factory=dict)  # stream -> the last point at which it read the slot


class Window:
    """Slots, and the rule by which blocks come and go: ``acquire`` before use, ``release`` after.

    Mechanics:
        ``acquire`` makes the block's bytes available to the current stream, then starts the copies that the schedule
        foresees, as far as slots are free of what is needed sooner. So the slots hold the blocks that come next, and
        the last blocks of a forward are still there when the backward turns round.

    Hazards handled:
        - A slot is refilled only after the streams that read it have passed the point of release.
        - An interruption (exception, Ctrl-C) between ``acquire`` and ``release`` leaves a held slot behind. Visits of
          one model never nest and never overlap (a lock sees to that), so the next ``acquire`` takes that as a release.

    Args:
        blocks: What is copied into the slots, one flat ``uint8`` tensor a block: its host master, or a copy of that on
            the compute device for a block that stays there. (That passes through a slot like the others: a copy within
            the device takes a hundredth of the time, and there is one mechanism.)
        num_slots: Slots to allocate, at least 1; 2 are needed for copies to run beside the computation.
        transfer: The copy stream.
        schedule: The order of visits.
        poison: Overwrite each slot before it is refilled, so that stale reads cannot look right (debugging).
    """

    def __init__(
        self,
        blocks: Sequence[torch.Tensor],
        num_slots: int,
        transfer: Transfer,
        schedule: Schedule,
        *,
        poison: bool = False,
    ) -> None:
        self._blocks = blocks
        self._transfer = transfer
        self._schedule = schedule
        self._poison = poison
        self.num_loads = 0  # copies started
        self.num_waits = 0  # acquired blocks whose copy nobody had foreseen
        slot_bytes = max(block.numel() for block in blocks)
        self.slots = [Slot(_allocate_slot(slot_bytes, transfer.device)) for _ in range(num_slots)]
        if poison:
            for slot in self.slots:
                transfer.fill(slot.memory, POISON)

    @property
    def num_bytes(self) -> int:
        """Device bytes of all slots."""
        return sum(slot.memory.numel() for slot in self.slots)

    def acquire(self, block: int, phase: Phase) -> int:
        """Make ``block`` readable by the current stream and return its slot's index. Pair with :meth:`release`."""
        if not self.slots:
            raise ResidencyError(
                "poros.unprepare was called between a forward and its backward, so the weights of that forward are "
                "gone from the window. Run the backward first, or the forward anew."
            )
        self._schedule.observe(block, phase)
        for left, slot in enumerate(self.slots):
            if slot.held:  # by a visit that was interrupted
                self.release(left)
        index = self._find(block)
        if index is None:
            self.num_waits += 1
            index = self._victim(keep=self._schedule.upcoming(len(self.slots)))
            self._load(index, block)
        slot = self.slots[index]
        slot.held = True
        self._prefetch(block)
        self._transfer.wait(slot.ready)
        return index

    def release(self, index: int) -> None:
        """End the current stream's use of a slot: what it has queued so far may still read, nothing later will."""
        slot = self.slots[index]
        slot.readers[self._transfer.lane()] = self._transfer.mark()
        slot.held = False

    def owns(self, address: int) -> bool:
        """Whether ``address`` lies in one of the slots."""
        return any(0 <= address - slot.memory.data_ptr() < slot.memory.numel() for slot in self.slots)

    def close(self) -> None:
        """Free the slots, once nothing reads them any more."""
        self._transfer.drain()
        self.slots = []

    def _prefetch(self, present: int) -> None:
        ahead = self._schedule.upcoming(len(self.slots) - 1)
        keep = [present, *ahead]
        for block in ahead:
            if self._find(block) is None:
                index = self._victim(keep)
                if self.slots[index].held or self.slots[index].block in keep:
                    return
                self._load(index, block)

    def _find(self, block: int) -> int | None:
        return next((index for index, slot in enumerate(self.slots) if slot.block == block), None)

    def _victim(self, keep: Sequence[int]) -> int:
        """The slot to give up: an empty one, else one whose block is not foreseen, else the one needed last."""

        def need(index: int) -> int:
            slot = self.slots[index]
            if slot.held:
                return len(keep) + 2
            if slot.block is None:
                return -2
            if slot.block not in keep:
                return -1
            return len(keep) - keep.index(slot.block)

        return min(range(len(self.slots)), key=need)

    def _load(self, index: int, block: int) -> None:
        slot, source = self.slots[index], self._blocks[block]
        slot.block = None  # until the copy is queued, the content means nothing
        readers = list(slot.readers.values())
        if self._poison:
            self._transfer.fill(slot.memory, POISON, after=readers)
        slot.ready = self._transfer.copy(slot.memory[: source.numel()], source, after=readers)
        slot.readers.clear()
        slot.block = block
        self.num_loads += 1


def _allocate_slot(num_bytes: int, device: torch.device) -> torch.Tensor:
    # On a CPU the slot lies in a mapping of its own: page-aligned, as a CUDA allocation would be.
    return allocate(num_bytes) if device.type == "cpu" else torch.empty(num_bytes, dtype=torch.uint8, device=device)
