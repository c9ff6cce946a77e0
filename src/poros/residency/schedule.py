"""The order of visits: which blocks the computation will need next.

Pure: no torch, no device. The order is learned, not assumed. Whatever a step does (two forwards before a backward, an
evaluation, accumulation), the next step most likely does again, so the schedule follows its own history. A wrong guess
costs a late copy; nothing else depends on it.
"""

from collections.abc import Iterator
from enum import Enum


class Phase(Enum):
    """What a visit is for. Part of a visit's identity: the block behind a turn depends on it."""

    FORWARD = "forward"  # a backward will come back to this block
    INFERENCE = "inference"  # nothing will come back
    BACKWARD = "backward"


Visit = tuple[int, Phase]


def spread(num_blocks: int, num_kept: int) -> list[int]:
    """Which ``num_kept`` of ``num_blocks`` blocks stay on the device, spread evenly between those that stream.

    So each copy has the computation of its neighbours to hide behind. The ends stream: the turn at the last block and
    the step's end find those in the slots anyway.
    """
    return [(2 * place + 1) * num_blocks // (2 * num_kept) for place in range(num_kept)]


class Schedule:
    """Learns the order of visits and tells which blocks come next.

    Mechanics:
        ``_history`` holds the visits so far, and ``_cursor`` the place in it that the present resembles: the visit
        after the cursor is the guess for the next one. While guesses come true the cursor moves along; after a wrong
        one it is placed anew, where the longest run of latest visits has happened before.
        Before there is a history, blocks are expected in order, with a turn at either end.

    Args:
        num_blocks: Blocks of the model, at least 1.
        max_history: Visits to remember. The default holds some thirty forward-and-backward steps.
    """

    def __init__(self, num_blocks: int, max_history: int | None = None) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self._max_history = max_history or max(64 * num_blocks, 256)
        self._history: list[Visit] = []
        self._cursor: int | None = None

    def observe(self, block: int, phase: Phase) -> None:
        """Note that ``block`` is visited now. Repeats of the same visit (its next layer) count once."""
        visit = (block, phase)
        if self._history and self._history[-1] == visit:
            return
        self._history.append(visit)
        if self._cursor is not None and self._history[self._cursor + 1] == visit:
            self._cursor += 1
        else:
            self._cursor = self._find_resemblance()
        self._forget()

    def upcoming(self, count: int) -> list[int]:
        """The next ``count`` distinct blocks after the present one, nearest first; fewer if no more are foreseen."""
        if not self._history or count <= 0:
            return []
        present = self._history[-1][0]
        blocks: list[int] = []
        for block in self._foreseen():
            if block != present and block not in blocks:
                blocks.append(block)
                if len(blocks) == count:
                    break
        return blocks

    def _foreseen(self) -> Iterator[int]:
        if self._cursor is None:
            yield from self._expected()
            return
        for index in range(self._cursor + 1, len(self._history)):  # a slice would copy the whole history
            yield self._history[index][0]

    def _expected(self) -> Iterator[int]:
        """The order to expect of a model that was not watched yet, one lap from the present visit."""
        block, phase = self._history[-1]
        last = self.num_blocks - 1
        up, down = range(self.num_blocks), range(last, -1, -1)
        if phase is Phase.BACKWARD:
            yield from range(block - 1, -1, -1)
            yield from up
        else:
            yield from range(block + 1, self.num_blocks)
            yield from down if phase is Phase.FORWARD else up

    def _find_resemblance(self) -> int | None:
        """The latest index whose preceding visits agree longest with the latest ones; ``None`` if there is none."""
        history = self._history
        best, best_length = None, 0
        for index in range(len(history) - 2, -1, -1):
            if history[index] != history[-1]:
                continue
            length = self._agreement(index, at_most=4 * self.num_blocks)
            if length > best_length:
                best, best_length = index, length
            if length == 4 * self.num_blocks:
                break
        return best

    def _agreement(self, index: int, at_most: int) -> int:
        history, length = self._history, 0
        while length < at_most and length <= index and history[index - length] == history[-1 - length]:
            length += 1
        return length

    def _forget(self) -> None:
        if len(self._history) <= self._max_history:
            return
        dropped = len(self._history) - self._max_history // 2
        if self._cursor is not None and self._cursor < dropped:
            return  # the guesses still come from the part to be dropped; wait until the cursor has left it
        del self._history[:dropped]
        if self._cursor is not None:
            self._cursor -= dropped
