"""What a failure means that a library words in its own way. Imports nothing heavy."""

# Of CUDA calls, of torch on a CPU, and of sizes that no memory could have.
_MEMORY_IS_FULL = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cannot allocate memory",
    "storage size calculation overflowed",
    "integer multiplication overflow",
)


class DivergedError(Exception):
    """A loss is not a finite number, so the steps after it measure nothing."""


def is_memory_full(error: BaseException) -> bool:
    """Whether ``error`` says that memory, of the host or of a device, did not suffice."""
    if isinstance(error, MemoryError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(phrase in said for phrase in _MEMORY_IS_FULL)


def first_line(error: BaseException) -> str:
    """The first line of what ``error`` says; empty if it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
