"""Whether a speed row's readings are all there and possible, and its figures are those that they give.

Numbers are finite here: a line with others is no JSON.
"""

from collections.abc import Sequence
from itertools import pairwise

from poros.evidence.artifact import Memory, Row, SpeedRow, derived_figures
from poros.evidence.verify_settings import Found, shown

# From a clock's resolution to eleven days; and more than any loss that is finite by more than chance.
_MIN_S, _MAX_S, _MAX_LOSS = 1e-6, 1e6, 1e9
_MIN_HOST_PEAK = 2**20  # no process is smaller
_ON_CARD = ("allocated_bytes", "reserved_bytes", "process_bytes")  # each counts what the one before it counts, and more
_WITHOUT_LOSS = "stream-loop"
# These register pages of the process itself, so that what is locked is in the resident set too. What the driver hands
# out already locked, as to the allocator of torch's pin_memory, need not be.
_LOCKING_THEIR_OWN = ("poros", "poros-trainer")
_OWN_KERNELS = ("unsloth",)  # torch's switch for deterministic algorithms does not reach them


def reading_problems(row: SpeedRow) -> Found:
    """Whether the passes are all there, whole, and possible."""
    lengths = {"passes": len(row.passes), "losses": len(row.losses), "pass_memory": len(row.pass_memory)}
    if row.status == "ok" and row.reason is not None:
        yield "reason", f"is {row.reason!r} with the status 'ok'; it should be null"
    if row.status != "ok" and not (row.reason and row.reason.strip()):
        yield "reason", f"is {row.reason!r} with the status {row.status!r}; it should say why there is no figure"
    for key, length in lengths.items():
        if row.status == "ok" and length != row.num_passes:
            yield key, f"has {length} passes; num_passes is {row.num_passes}"
        elif row.status != "ok" and not length == lengths["passes"] < row.num_passes:
            yield key, f"has {length} passes with the status {row.status!r}; it should have as many as succeeded"
    if row.status == "ok" and not row.family:
        yield "family", "is null; a row with a figure says which family the model is of"
    for index, seconds in enumerate(row.passes):
        yield from counted(f"passes.{index}", seconds, row.steps, "steps")
        for step, value in enumerate(seconds):
            yield from possible_seconds(f"passes.{index}.{step}", value)
    yield from _losses(row)
    for index, memory in enumerate(row.pass_memory):
        yield from memory_problems(f"pass_memory.{index}.", memory, row, complete=True)


def figure_problems(row: SpeedRow) -> Found:
    """Whether the derived figures are those that the passes give, to the last bit."""
    figures = derived_figures(
        row.status, row.passes, row.pass_memory, row.seq_len, row.batch_size, row.accumulation
    )  # fmt: skip
    for key, expected in figures.items():
        found = getattr(row, key)
        if found != expected:
            yield key, f"is {shown(found)}; the passes give {shown(expected)}"
            return  # one wrong figure makes others wrong


def memory_problems(prefix: str, memory: Memory | Row, row: Row, *, complete: bool) -> Found:
    """Whether meters that were read in one process can be; if ``complete``, none that the device has is missing."""
    for key in _ON_CARD:
        value = getattr(memory, key)
        if row.device == "cpu" and value is not None:
            yield prefix + key, f"is {value}, but the device is the CPU"
        elif row.device == "cuda" and complete and not value:
            yield prefix + key, f"is {shown(value)}; a row measured on a card says what it took there"
        elif value is not None and row.gpu_memory_bytes is not None and value > row.gpu_memory_bytes:
            yield prefix + key, f"is {value}; the card has {row.gpu_memory_bytes}"
    known = [(key, getattr(memory, key)) for key in _ON_CARD if getattr(memory, key) is not None]
    for (less, low), (more, high) in pairwise(known):
        if high < low:
            yield prefix + more, f"is {high}, below {less} {low}, which is a part of it"
    peak, locked = memory.host_peak_bytes, memory.host_locked_bytes
    if complete and (peak is None or peak < _MIN_HOST_PEAK):
        yield prefix + "host_peak_bytes", f"is {shown(peak)}; a process takes {_MIN_HOST_PEAK} bytes at least"
    elif peak is not None and locked is not None and locked > peak and row.method in _LOCKING_THEIR_OWN:
        yield prefix + "host_locked_bytes", f"is {locked}, above host_peak_bytes {peak}, which it is a part of"


def counted(key: str, values: Sequence[float], wanted: int, why: str) -> Found:
    """Whether there are as many values as ``why`` says."""
    if len(values) != wanted:
        yield key, f"has {len(values)} entries; {why} is {wanted}"


def possible_losses(key: str, values: Sequence[float]) -> Found:
    """Whether losses are such as a cross entropy can be."""
    for step, value in enumerate(values):
        if not 0 <= value < _MAX_LOSS:
            yield f"{key}.{step}", f"is {value}; a loss should be at least 0 and below {_MAX_LOSS:g}"


def possible_seconds(key: str, value: float) -> Found:
    """Whether something can have taken so long."""
    if not _MIN_S <= value <= _MAX_S:
        yield key, f"is {value}; seconds should be from {_MIN_S:g} to {_MAX_S:g}"


def _losses(row: SpeedRow) -> Found:
    computes_none = row.method == _WITHOUT_LOSS and "module" not in row.options
    for index, losses in enumerate(row.losses):
        if computes_none and losses:
            yield f"losses.{index}", f"has {len(losses)} entries; {row.method} computes no loss"
        elif not computes_none:
            yield from counted(f"losses.{index}", losses, row.warmup_steps + row.steps, "warmup_steps + steps")
            yield from possible_losses(f"losses.{index}", losses)
    # On a CPU several threads add up in any order, whatever the path.
    repeats = row.path != "fast" and row.device == "cuda" and row.method not in _OWN_KERNELS
    if repeats and "module" not in row.options:
        for index, losses in enumerate(row.losses[1:], 1):
            if losses != row.losses[0]:
                yield f"losses.{index}", f"differs from that of the first pass; the path {row.path} is deterministic"
