"""The window's promise: nothing is read before it is there, nothing is refilled while it is read.

A GPU is modelled as two queues, computation and copies, that advance in any order that their marks allow. Hypothesis
looks for an order of visits and of progress under which a read finds another block's bytes.
"""

from collections import deque
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from poros.residency.schedule import Phase, Schedule
from poros.residency.window import Window

CPU = torch.device("cpu")
PHASES = st.sampled_from(list(Phase))


@dataclass(eq=False)
class Point:
    """A mark: reached or not yet."""

    reached: bool = False


@dataclass
class Copy:
    target: torch.Tensor
    source: torch.Tensor
    after: list[Point]
    done: Point


@dataclass
class Read:
    slot: torch.Tensor
    expected: torch.Tensor


@dataclass
class TwoQueues:
    """Stands in for :class:`poros.residency.transfer.Transfer`: everything is queued, nothing happens by itself."""

    device: torch.device = CPU
    compute: deque = field(default_factory=deque)  # Point to wait for | ("mark", Point) | Read
    copies: deque = field(default_factory=deque)  # Copy

    def copy(self, target, source, after=()):
        done = Point()
        self.copies.append(Copy(target, source, list(after), done))
        return done

    def fill(self, target, value, after=()):
        self.copies.append(Copy(target, torch.full_like(target, value), list(after), Point()))

    def wait(self, point):
        self.compute.append(point)

    def mark(self):
        point = Point()
        self.compute.append(("mark", point))
        return point

    def lane(self):
        return 0

    def drain(self):
        while self.compute or self.copies:
            assert self.advance_copies() or self.advance_compute(), "deadlock: each queue waits for the other"

    def advance_compute(self) -> bool:
        if not self.compute:
            return False
        head = self.compute[0]
        if isinstance(head, Point) and not head.reached:
            return False
        self.compute.popleft()
        if isinstance(head, tuple):
            head[1].reached = True
        elif isinstance(head, Read):
            assert torch.equal(head.slot[: head.expected.numel()], head.expected), "read another block's bytes"
        return True

    def advance_copies(self) -> bool:
        if not self.copies or not all(point.reached for point in self.copies[0].after):
            return False
        head = self.copies.popleft()
        head.target.copy_(head.source)
        head.done.reached = True
        return True


class WindowMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 7), num_slots=st.integers(1, 4), poison=st.booleans())
    def make(self, num_blocks, num_slots, poison):
        # The last block is short, as it is when the block size does not divide the number of layers.
        sizes = [8] * (num_blocks - 1) + [4]
        self.blocks = [torch.full((size,), index + 1, dtype=torch.uint8) for index, size in enumerate(sizes)]
        self.transfer = TwoQueues()
        self.num_slots = num_slots
        self.window = Window(self.blocks, num_slots, self.transfer, Schedule(num_blocks, max_history=64), poison=poison)

    def _read(self, block, phase):
        index = self.window.acquire(block, phase)
        slot = self.window.slots[index]
        assert slot.held
        self.transfer.compute.append(Read(slot.memory, self.blocks[block]))
        return index

    @rule(data=st.data(), phase=PHASES)
    def visit(self, data, phase):
        self.window.release(self._read(data.draw(st.integers(0, len(self.blocks) - 1)), phase))
        assert not any(slot.held for slot in self.window.slots)

    @rule(repeats=st.integers(1, 3))
    def steps(self, repeats):
        order = range(len(self.blocks))
        for _ in range(repeats):
            for block in order:
                self.window.release(self._read(block, Phase.FORWARD))
            for block in reversed(order):
                self.window.release(self._read(block, Phase.BACKWARD))

    @rule(data=st.data(), phase=PHASES)
    def interrupted_visit(self, data, phase):
        self._read(data.draw(st.integers(0, len(self.blocks) - 1)), phase)

    @rule(data=st.data(), phase=PHASES)
    def copy_that_cannot_be_queued(self, data, phase):
        queue = self.transfer.copy

        def fail(*args, **kwargs):
            raise KeyboardInterrupt

        self.transfer.copy = fail
        try:
            index = self.window.acquire(data.draw(st.integers(0, len(self.blocks) - 1)), phase)
        except KeyboardInterrupt:
            pass
        else:
            self.window.release(index)
        finally:
            self.transfer.copy = queue

    @precondition(lambda self: self.transfer.compute)
    @rule(count=st.integers(1, 20))
    def computation_advances(self, count):
        for _ in range(count):
            self.transfer.advance_compute()

    @precondition(lambda self: self.transfer.copies)
    @rule(count=st.integers(1, 5))
    def copies_advance(self, count):
        for _ in range(count):
            self.transfer.advance_copies()

    @invariant()
    def memory_is_what_was_allocated(self):
        if hasattr(self, "window"):
            assert len(self.window.slots) == self.num_slots
            assert self.window.num_bytes == self.num_slots * max(block.numel() for block in self.blocks)
            held = [slot.block for slot in self.window.slots if slot.block is not None]
            assert len(held) == len(set(held)), "two slots for one block"

    def teardown(self):
        if hasattr(self, "window"):
            self.window.close()


WindowMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestWindow = WindowMachine.TestCase


def test_the_machine_sees_a_missing_wait(monkeypatch):
    """The model GPU is worth something only if it catches a window that forgets to wait."""

    def forget(self, index, block):
        slot = self.slots[index]
        slot.ready = self._transfer.copy(slot.memory, self._blocks[block], after=[])
        slot.block = block

    monkeypatch.setattr(Window, "_load", forget)
    blocks = [torch.full((8,), index + 1, dtype=torch.uint8) for index in range(4)]
    transfer = TwoQueues()
    window = Window(blocks, 2, transfer, Schedule(4))
    for block in range(4):
        index = window.acquire(block, Phase.FORWARD)
        transfer.compute.append(Read(window.slots[index].memory, blocks[block]))
        window.release(index)
    with pytest.raises(AssertionError, match="another block"):
        transfer.drain()


def visits(schedule: Schedule, num_slots: int, steps: int, lap: list[tuple[int, Phase]]) -> Window:
    blocks = [torch.full((8,), index, dtype=torch.uint8) for index in range(schedule.num_blocks)]
    window = Window(blocks, num_slots, TwoQueues(), schedule)
    for _ in range(steps):
        for block, phase in lap:
            window.release(window.acquire(block, phase))
    return window


def there_and_back(num_blocks: int) -> list[tuple[int, Phase]]:
    forth = [(block, Phase.FORWARD) for block in range(num_blocks)]
    return forth + [(block, Phase.BACKWARD) for block, _ in reversed(forth)]


@pytest.mark.parametrize("num_slots", [2, 3, 4])
def test_turn_and_step_end_reuse_what_is_in_the_slots(num_slots):
    num_blocks = 10
    first = visits(Schedule(num_blocks), num_slots, 1, there_and_back(num_blocks)).num_loads
    three = visits(Schedule(num_blocks), num_slots, 3, there_and_back(num_blocks)).num_loads
    # A lap needs each block twice, but those in the slots at a turn need no second copy.
    assert (three - first) / 2 == 2 * (num_blocks - num_slots)


def test_every_copy_but_the_first_is_foreseen():
    window = visits(Schedule(8), 3, 3, there_and_back(8))
    assert window.num_waits == 1


def test_an_order_is_learned_from_the_last_step():
    """Two forwards, a reference forward between them, then both backwards: wrong guesses only while it is new."""
    forward = [(block, Phase.FORWARD) for block in range(6)]
    reference = [(block, Phase.INFERENCE) for block in range(6)]
    backward = [(block, Phase.BACKWARD) for block in reversed(range(6))]
    lap = forward + reference + forward + backward + backward
    schedule = Schedule(6)
    window = visits(schedule, 2, 2, lap)
    learned = window.num_waits
    for block, phase in lap * 3:
        window.release(window.acquire(block, phase))
    assert window.num_waits == learned


@given(
    num_blocks=st.integers(1, 9),
    lap=st.lists(st.tuples(st.integers(0, 8), PHASES), min_size=1, max_size=40),
    count=st.integers(0, 5),
)
@settings(max_examples=200, deadline=None)
def test_what_is_foreseen_is_distinct_and_in_range(num_blocks, lap, count):
    schedule = Schedule(num_blocks, max_history=32)
    for block, phase in lap * 3:
        schedule.observe(block % num_blocks, phase)
        ahead = schedule.upcoming(count)
        assert len(ahead) == len(set(ahead)) <= count
        assert block % num_blocks not in ahead
        assert all(0 <= other < num_blocks for other in ahead)
        assert len(schedule._history) <= 32 + 200
