"""Runs ``poros train`` in a child process that can be killed at an exact instant.

An instant is a number of events: each opened, renamed, made or deleted file below the output folder is one (Python's
audit hooks report them), and so is each optimizer step. So kills fall inside a checkpoint's writing, its renaming and
the deletion of older ones as well as between them, and a failure can be repeated.
"""

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

_FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}


def run(settings: Path, *, resume: bool = False, kill_at: int | None = None) -> int | None:
    """Train in a child process.

    Returns:
        How many events there were, or None if the child was killed at event ``kill_at`` (from 1).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "poros.train.run"])  # so that the imports are paid for once
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_train, args=(settings, resume, kill_at, sender))
    child.start()
    sender.close()
    try:
        events = receiver.recv()
    except EOFError:
        events = None
    child.join()
    assert child.exitcode == (0 if events is not None else -signal.SIGKILL), f"the child ended with {child.exitcode}"
    return events


def _train(settings: Path, resume: bool, kill_at: int | None, sender: Any) -> None:
    import torch
    from rich.console import Console

    from poros.config_file import load_config
    from poros.train.run import run

    torch.set_num_threads(1)
    config = load_config(settings)
    events = 0

    def count() -> None:
        nonlocal events
        events += 1
        if events == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _FILE_EVENTS and str(arguments[0]).startswith(config.output):
            count()

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        count()
        return take_step(self, *args, **kwargs)

    take_step, torch.optim.AdamW.step = torch.optim.AdamW.step, step
    sys.addaudithook(watch)
    with open(os.devnull, "w") as nowhere:
        run(config, resume=resume, console=Console(file=nowhere))
    sender.send(events)
