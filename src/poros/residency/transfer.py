"""Copies from host to device, ordered against the computation. The only file with streams and events."""

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch

from poros.residency.layout import span_bytes

# What orders two pieces of work: an event on a GPU, nothing on a CPU, where every call has finished when it returns.
Mark = torch.cuda.Event | None


class Transfer:
    """One copy stream beside the computation, and the marks that order the two.

    Hazards handled:
        - The stream that computes is read at each call: a user may run under a stream of their own, and autograd's
          thread has another current stream than the thread that built the graph.
        - The copy stream first waits for the stream on which the window was allocated, whose earlier work may still
          use that memory.
        - Nothing here makes the host wait, except :meth:`drain`, which no step calls.

    Args:
        device: The compute device; on a CPU copies are plain and marks are ``None``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # One stream for all copies: they share one link, so a second stream would only reorder them.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Mark] = ()) -> Mark:
        """Copy ``source`` (host) into ``target`` (window) once ``after`` is reached; the mark says when it is done."""
        if self.stream is None:
            target.copy_(source)
            return None
        for mark in after:
            if mark is not None:
                self.stream.wait_event(mark)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def fill(self, target: torch.Tensor, value: int, after: Iterable[Mark] = ()) -> None:
        """Overwrite ``target`` with a byte value, in order with the copies (debugging)."""
        if self.stream is None:
            target.fill_(value)
            return
        for mark in after:
            if mark is not None:
                self.stream.wait_event(mark)
        with torch.cuda.stream(self.stream):
            target.fill_(value)

    def wait(self, mark: Mark) -> None:
        """Let the computation's current stream wait until ``mark`` is reached."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def mark(self) -> Mark:
        """The point that the computation's current stream has reached."""
        if self.stream is None:
            return None
        return torch.cuda.current_stream(self.device).record_event()

    def lane(self) -> int:
        """Which stream computes now, as a key; marks of one lane follow each other, so the latest is enough."""
        return 0 if self.stream is None else torch.cuda.current_stream(self.device).cuda_stream

    def drain(self) -> None:
        """Block the host until copies and computation are done. For set-up and tear-down only."""
        if self.stream is not None:
            torch.cuda.synchronize(self.device)


_num_broken = 0


def num_broken_recordings() -> int:
    """Recordings of this process that broke off; all that were made before the last of them are void."""
    return _num_broken


class Recorder:
    """Where work is recorded as CUDA graphs: a stream on which nothing runs, and a pool of memory.

    All recordings of one recorder share the pool, so they must not run at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self._recordings: weakref.WeakSet[GraphRecording] = weakref.WeakSet()

    def __call__(self) -> "GraphRecording":
        """A new, empty recording."""
        if not self._recordings:  # the allocator takes a pool that nothing uses any more for a mistake
            self.pool = torch.cuda.graph_pool_handle()
        recording = GraphRecording(self)
        self._recordings.add(recording)
        return recording

    def recover(self) -> None:
        """Make up for what torch leaves undone when a recording could not be ended.

        The allocator goes on putting what is allocated on the stream into the pool; that is ended here. And the random
        generator's state counts as being recorded still, and refuses every number (torch 2.11); so the generator gets a
        new state of the same value. Graphs that were recorded before went with the old one, and are void.
        """
        global _num_broken
        _num_broken += 1
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index, self.pool)
            torch._C._cuda_releasePool(self.device.index, self.pool)
        self.pool = torch.cuda.graph_pool_handle()
        generator = torch.cuda.default_generators[self.device.index]
        value = generator.get_state()
        generator.graphsafe_set_state(torch.Generator(self.device))
        generator.set_state(value)


class _Memory:
    """A tensor's bytes by their address alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (span_bytes(tensor),),
            "typestr": "|u1",
            "strides": None,
            "version": 2,
        }


def _disowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, without keeping it from the allocator."""
    if tensor.numel() == 0:
        return tensor
    memory = torch.as_tensor(_Memory(tensor), device=tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class GraphRecording:
    """Work recorded as a CUDA graph.

    Mechanics:
        What the work leaves stays at its address in the pool, but the allocator may give that memory to the next
        recording: results are read after their replay and before any other. So the pool is as large as the largest
        recording, however many there are.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._graph = torch.cuda.CUDAGraph()

    def record(self, work: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Take down ``work`` without running it; what is returned holds its results from a replay to the next one.

        Hazards handled:
            - A recording begins by writing to where replays find the state of the random generator. Those that are
              still to run come first, and those that follow come after.
            - It may break off; see :meth:`Recorder.recover`.

        Raises:
            RuntimeError: it does something that cannot be recorded, such as waiting for the device.
        """
        recorder = self._recorder
        present = torch.cuda.current_stream(recorder.device)
        recorder.stream.wait_stream(present)
        try:
            with torch.cuda.stream(recorder.stream):
                # Other threads may go on allocating and copying meanwhile.
                self._graph.capture_begin(recorder.pool, capture_error_mode="thread_local")
                try:
                    results = work()
                except BaseException:
                    with suppress(RuntimeError):
                        self._end()
                    raise
                self._end()
        finally:
            present.wait_stream(recorder.stream)
        return [_disowned(result) for result in results]

    def _end(self) -> None:
        try:
            self._graph.capture_end()
        except RuntimeError:
            self._recorder.recover()
            raise

    def replay(self) -> None:
        """Run the work in the current stream."""
        self._graph.replay()


def device_free_bytes(device: torch.device) -> int | None:
    """Bytes that an allocation on ``device`` can still get, cached blocks included; ``None`` on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def return_cached_memory(device: torch.device) -> None:
    """Hand the allocator's unused memory back, so that the next large allocation is not fragmented by the last."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
