"""Runs one pass as a process with a time limit, and says what became of a process that cannot say it itself."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from poros.evidence.engines.base import CellRequest, describe
from poros.evidence.provenance import provenance_of_new_process
from poros.evidence.records import Record, read_json, read_record, threads_asked_for, write_json

_ROOT = Path(__file__).resolve().parents[2]  # holds the package


def run_request(request: CellRequest, log: Path, time_limit_s: float) -> Record:
    """Run a pass and return its record, which is in the file that the request names too.

    Args:
        log: file for what the process says.
        time_limit_s: after which it is killed, with its children.
    """
    record = Path(request.record)
    request_file, draft = record.with_suffix(".request"), record.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    request = replace(request, started=time.time())
    request_file.write_text(request.to_json())
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "poros.evidence.cell", str(request_file)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(request),
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing is left of it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not record.exists():
        failure = _told(status, log, time_limit_s)
        wall_s = time.time() - request.started
        write_json(record, _record_of_death(request, draft) | failure | {"wall_s": wall_s})
    for file in (request_file, draft):
        file.unlink(missing_ok=True)
    return read_record(record, request.cell, request.number, request.steps)


def _environment(request: CellRequest) -> dict[str, str]:
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "POROS_RUN_ID": request.run_id,
        "POROS_BENCH_PARENT": str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Read when the CUDA context is made; without it cuBLAS is not reproducible. The same for every method.
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        **describe(request.method, request.module).environment,
    }


def _told(status: int | None, log: Path, time_limit_s: float) -> dict[str, Any]:
    """Status and reason of a pass whose process left no record."""
    if status is None:
        reason = f"not done after {time_limit_s:g} s, and killed"
        return {"status": "timeout", "reason": reason, "time_limit_s": time_limit_s}
    said = _last_line(log)
    ending = f"exit status {status}"
    if status < 0:
        ending = f"killed by {signal.Signals(-status).name}"
        if -status == signal.SIGKILL:
            ending += ", perhaps by the kernel for lack of host memory"
    return {"status": "crashed", "reason": f"{ending}; last said: {said}" if said else ending}


def _record_of_death(request: CellRequest, draft: Path) -> dict[str, Any]:
    """A record without readings; where the pass ran is in the draft, unless it died before it could write one."""
    if draft.exists():
        known = read_json(draft, "Give the command again.")
    else:
        place = provenance_of_new_process(describe(request.method, request.module).packages, request.folder)
        device = {} if request.device == "auto" else {"device": request.device}
        known = {"provenance": place, "facts": {**device, **threads_asked_for(_environment(request))}}
    return {
        "cell": request.cell,
        "number": request.number,
        "seconds": [],
        "losses": [],
        "memory": None,
        "setup_s": None,
        **known,
    }


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:300] if said else ""
