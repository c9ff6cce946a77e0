"""Clean-up that happens even if it was interrupted."""

from collections.abc import Callable


class Cleanup:
    """What must still be put back on a prepared model.

    A ``finally`` is not enough: Ctrl-C may strike inside it. So whatever a visit borrows is noted here first, and what
    an interruption left behind is put back before the next visit. Actions may run twice.
    """

    def __init__(self) -> None:
        self._actions: list[Callable[[], None]] = []  # latest last

    def ensured(self, action: Callable[[], None]) -> "_Ensured":
        """Run ``action`` after the body; if that is interrupted, :meth:`finish` runs it again."""
        return _Ensured(self._actions, action)

    def finish(self) -> None:
        """Run what was interrupted, latest first."""
        while self._actions:
            self._actions[-1]()
            self._actions.pop()


class _Ensured:
    """A context manager by hand: a generator costs several times as much, and a visit enters a few."""

    __slots__ = ("_action", "_actions")

    def __init__(self, actions: list[Callable[[], None]], action: Callable[[], None]) -> None:
        self._actions, self._action = actions, action

    def __enter__(self) -> None:
        self._actions.append(self._action)

    def __exit__(self, *_: object) -> None:
        self._action()
        self._actions.remove(self._action)
