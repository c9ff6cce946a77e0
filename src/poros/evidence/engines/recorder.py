"""The clock and the meters that every method is read with."""

import gc
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from poros.errors import ConfigError
from poros.evidence.engines.base import CellRequest
from poros.evidence.failures import DivergedError
from poros.evidence.provenance import host_peak_bytes, process_bytes_on_card


class Recorder:
    """Takes the time and the loss of every optimizer step, and the peaks of memory at the end.

    Mechanics:
        The device has finished its work when the clock starts and when it stops, and nothing else happens in between:
        a step's data are on the device before, its loss is read after. Peaks count from the first step on, once what
        building has left behind is freed.

    Args:
        request: The pass.

    Attributes:
        device: Where the pass computes.
        facts: What the engine tells of itself for the row: ``family``, ``dataset``, ``block_size``, ``slots``,
            ``resident_blocks``, ``budget_bytes``, ``host_locked_bytes`` (what it locked by itself).
        facts_at_end: Gives more of them, asked for after the last step.
        seconds: Of every counted step.
        losses: Of every step, warm-up included; none from a method that computes none.
        setup_s: From the start of the process to the first step.
        memory: Peaks since the first step, in bytes, read right after the last; what cannot be told is None.
    """

    def __init__(self, request: CellRequest) -> None:
        self.request = request
        wanted = request.device
        if wanted == "auto":
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(wanted)
        self.facts: dict[str, Any] = {}
        self.facts_at_end: Callable[[], dict[str, Any]] = dict
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.setup_s: float | None = None
        self.memory: dict[str, int | None] | None = None
        self._num_steps = 0
        self._start = 0.0

    def begin_step(self) -> None:
        """Start the clock; the step's data are on the device."""
        if self.setup_s is None:
            self._reset_meters()
            self.setup_s = time.time() - self.request.started
        self._synchronize()
        self._start = time.perf_counter()

    def end_step(self, loss: torch.Tensor | float | None) -> None:
        """Stop the clock. ``loss`` is the step's mean over its learnt tokens, None if the method computes none.

        Raises:
            DivergedError: the loss is not finite.
        """
        self._synchronize()
        seconds = time.perf_counter() - self._start
        self._num_steps += 1
        if self._num_steps > self.request.warmup_steps:
            self.seconds.append(seconds)
        if loss is not None:
            self._take_loss(float(loss))
        if self._num_steps == self.request.total_steps:
            self.memory = self._read_meters()
            self.facts |= self.facts_at_end()

    def _take_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            learning_rate = self.request.learning_rate
            raise DivergedError(
                f"the loss is {loss} at step {self._num_steps} of {self.request.total_steps}, warm-up included, with a "
                f"learning rate of {learning_rate:g}"
            )
        self.losses.append(loss)

    def check_device(self) -> None:
        """Raise :class:`ConfigError` if the device that is asked for is not there."""
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device is 'cuda', but torch sees no CUDA device")

    def check_whole(self) -> None:
        """Raise RuntimeError unless every step was taken."""
        if self._num_steps != self.request.total_steps:
            raise RuntimeError(f"{self._num_steps} steps were taken instead of {self.request.total_steps}")

    def _read_meters(self) -> dict[str, int | None]:
        locked: int | None = self.facts.get("host_locked_bytes") or 0
        peaks: dict[str, int | None] = dict.fromkeys(("allocated_bytes", "reserved_bytes", "process_bytes"))
        if self.device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved()
            used = process_bytes_on_card()
            peaks["allocated_bytes"] = torch.cuda.max_memory_allocated()
            peaks["reserved_bytes"] = reserved
            # An allocator that handed memory back held its peak earlier; what others took (context, libraries) stays.
            peaks["process_bytes"] = None if used is None else used + reserved - torch.cuda.memory_reserved()
            by_torch = _locked_by_torch()
            locked = None if by_torch is None or locked is None else locked + by_torch
        return {**peaks, "host_peak_bytes": host_peak_bytes(), "host_locked_bytes": locked}

    def _reset_meters(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _locked_by_torch() -> int | None:
    """The most page-locked host memory that torch's own allocator held; None if this torch does not count it."""
    try:
        return int(torch.cuda.host_memory_stats()["allocated_bytes.peak"])
    except (AttributeError, KeyError, RuntimeError):
        return None
