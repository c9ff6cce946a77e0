"""Clean-up that happens even if it was interrupted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Cleanup:
    """What must still be put back on a prepared model.

    A ``finally`` is not enough: Ctrl-C may strike inside it. So whatever a visit borrows is noted here first, and what
    an interruption left behind is put back before the next visit. Actions may run twice.
    """

    def __init__(self) -> None:
        self._actions: list[Callable[[], None]] = []  # latest last

    @contextmanager
    def ensured(self, action: Callable[[], None]) -> Iterator[None]:
        """Run ``action`` after the body; if that is interrupted, :meth:`finish` runs it again."""
        self._actions.append(action)
        try:
            yield
        finally:
            action()
            self._actions.remove(action)

    def finish(self) -> None:
        """Run what was interrupted, latest first."""
        while self._actions:
            self._actions[-1]()
            self._actions.pop()
