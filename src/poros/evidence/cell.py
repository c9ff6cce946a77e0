"""One pass of one method, in a process of its own: ``python -m poros.evidence.cell REQUEST.json``.

The outcome is a *record*, a JSON file that appears under its name in one step. Whatever the method does, a record is
written; only a process that is killed leaves none, and then the one that started it says so. A draft beside it, written
before anything is built, tells where such a pass ran.

[Note: the archived package]
One of the methods imports under the name of this package, and replaces it. So all that the loop needs of Poros is
imported before a method is built, and nothing after.
"""

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from poros.errors import PorosError
from poros.evidence.engines.base import CellRequest, Engine, load_engine
from poros.evidence.engines.batches import make_batches
from poros.evidence.engines.recorder import Recorder
from poros.evidence.failures import DivergedError, first_line, is_memory_full
from poros.evidence.provenance import provenance
from poros.evidence.records import threads_asked_for, write_json
from poros.train.loop import train_step, trainable

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


def run_cell(request: CellRequest) -> dict[str, Any]:
    """Run one pass and return its record; every failure but the process's death is a record too."""
    recorder = Recorder(request)
    module = load_engine(request.method, request.module)
    engine: Engine = module.ENGINE
    place = provenance(*engine.packages)
    facts = {"device": recorder.device.type, "num_threads": torch.get_num_threads(), **threads_asked_for(os.environ)}
    write_json(Path(request.record).with_suffix(".draft"), {"provenance": place, "facts": facts})
    outcome: dict[str, Any] = {"status": "ok", "reason": None}
    try:
        recorder.check_device()
        _take_path(request.path)
        if hasattr(module, "run"):
            module.run(request, recorder)
        else:
            _train(module.build(request, recorder), request, recorder)
        recorder.check_whole()
    except Exception as error:
        traceback.print_exc()
        outcome = {"status": status_of(error), "reason": last_line(error)}
    return {
        "cell": request.cell,
        "number": request.number,
        **outcome,
        "seconds": recorder.seconds,
        "losses": recorder.losses,
        "memory": recorder.memory,
        "facts": facts | recorder.facts,
        "setup_s": recorder.setup_s,
        "wall_s": time.time() - request.started,
        "provenance": place,
    }


def status_of(error: Exception) -> str:
    """What a failure is called in a row."""
    if isinstance(error, torch.OutOfMemoryError) or is_memory_full(error):
        return "out_of_memory"
    if isinstance(error, PorosError) and "more than is free" in str(error):  # the refusal before host memory runs out
        return "out_of_memory"
    if isinstance(error, DivergedError):
        return "diverged"
    if isinstance(error, ImportError):
        return "missing_package"
    return "unsupported" if isinstance(error, PorosError) else "crashed"


def last_line(error: Exception) -> str:
    """An exception on one line, as the last of a traceback names it."""
    said = first_line(error)
    if isinstance(error, PorosError | DivergedError):
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _train(model: Any, request: CellRequest, recorder: Recorder) -> None:
    """Step ``model`` through the request's data: the loop that all methods share."""
    batches = make_batches(request, model, recorder)
    optimizer = torch.optim.AdamW(trainable(model), lr=request.learning_rate)
    torch.manual_seed(request.seed)  # of the dropout
    for step in batches:
        recorder.begin_step()
        result = train_step(model, step, optimizer, max_grad_norm=request.max_grad_norm)
        recorder.end_step(result.loss)


def _take_path(path: str) -> None:
    """Allow the attention kernels of ``path``; strict and math refuse whatever is not reproducible."""
    if path == "fast":
        return
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if path == "math":
        torch.backends.cuda.enable_flash_sdp(False)


def _die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it dies, so that no pass runs on unwatched."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.environ.get("POROS_BENCH_PARENT", str(os.getppid())) != str(os.getppid()):
            raise SystemExit("the process that started this pass is gone")


def main(arguments: Sequence[str]) -> None:
    """Run the request in a file, and write its record."""
    _die_with_parent()
    request = CellRequest.parse(Path(arguments[0]).read_text())
    if request.folder is not None:
        sys.path.insert(0, request.folder)
    write_json(Path(request.record), run_cell(request))


if __name__ == "__main__":
    main(sys.argv[1:])
