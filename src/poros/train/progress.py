"""Shows how a run is going: a progress bar on a terminal, a line for each report anywhere else."""

import time
from collections.abc import Callable
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from transformers import TrainerCallback

from poros.units import format_bytes, format_seconds


class ProgressCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Reports the loss, tokens a second (padding included), memory and the time left.

    Memory is what the allocator has reserved on the GPU, or what the process holds on the CPU.
    """

    def __init__(self, console: Console, num_tokens: Callable[[], int]) -> None:
        """``num_tokens`` tells how many tokens have been through the model so far."""
        self._console = console
        self._num_tokens = num_tokens
        self._bar: Progress | None = None
        self._started_s = 0.0
        self._first_step = 0
        self._text = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started_s, self._first_step = time.monotonic(), state.global_step
        if self._console.is_terminal:
            columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")
            self._bar = Progress(*columns, console=self._console)
            self._bar.add_task("", total=state.max_steps, completed=state.global_step)
            self._bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            text = f"loss {logs['loss']:.4f}  {self._speed(state)}"
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], description=text)
            else:
                self._console.print(f"step {state.global_step}/{state.max_steps}  {text}", highlight=False)
        elif "eval_loss" in logs:
            self._console.print(f"step {state.global_step}  evaluation loss {logs['eval_loss']:.4f}", highlight=False)

    def close(self) -> None:
        """Leave the terminal as it was; also after an error, when the trainer does not say that it ended."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _speed(self, state: Any) -> str:
        elapsed_s = time.monotonic() - self._started_s
        done = state.global_step - self._first_step
        left_s = elapsed_s / max(done, 1) * (state.max_steps - state.global_step)
        return (
            f"{self._num_tokens() / max(elapsed_s, 1e-9):.0f} tokens/s  "
            f"{format_bytes(memory_in_use())}  {format_seconds(left_s)} left"
        )


def memory_in_use() -> int:
    """Bytes that torch has reserved on the GPU, or without one, that the process has in memory."""
    if torch.cuda.is_available() and torch.cuda.memory_reserved():
        return torch.cuda.memory_reserved()
    return int(psutil.Process().memory_info().rss)
