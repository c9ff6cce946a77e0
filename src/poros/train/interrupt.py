"""Ctrl-C during training: the first asks for a checkpoint and an end, the second ends at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """The user stopped the run. The message says what is on the disk."""


class StopRequest:
    """Whether the run was asked to stop after the step that it is in."""

    def __init__(self) -> None:
        self.requested = False


@contextmanager
def stop_request(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """Turn the first Ctrl-C inside the block into a request; a second one raises ``KeyboardInterrupt`` as usual."""
    request = StopRequest()

    def ask(_signal: int, _frame: FrameType | None) -> None:
        if request.requested:
            raise KeyboardInterrupt
        request.requested = True
        say("Stopping after this step, with a checkpoint. Ctrl-C again stops at once.")

    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, before)
