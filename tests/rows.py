"""Result rows: one line of JSON for each measured claim, with the settings and the provenance beside the figure."""

import json
import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

RUN_ID = os.environ.get("POROS_RUN_ID") or uuid4().hex[:12]
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")


def write_row(path: str | Path, /, **row: Any) -> dict[str, Any]:
    """Append ``row`` to the file at ``path``, completed by what says where and when it was measured."""
    row |= provenance()
    with Path(path).open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def provenance() -> dict[str, Any]:
    """Run, time, GPU, driver, host, versions and commit. Unknown is null."""
    gpu = {"gpu": None, "gpu_uuid": None, "driver": None, "link": None}
    fields = "name,uuid,driver_version,pcie.link.gen.max,pcie.link.width.max"
    answer = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    if answer:
        name, uuid, driver, generation, width = (part.strip() for part in answer.splitlines()[0].split(","))
        gpu = {"gpu": name, "gpu_uuid": uuid, "driver": driver, "link": f"PCIe {generation} x{width}"}
    return {
        "run_id": RUN_ID,
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **gpu,
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "poros_commit": os.environ.get("POROS_COMMIT") or _output("git", "rev-parse", "HEAD"),
    }


def process_bytes_on_card() -> int | None:
    """What this process takes on the card, context included, as the driver counts it; None if it cannot be told."""
    answer = _output("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
    for line in (answer or "").splitlines():
        pid, _, used = line.partition(",")
        if pid.strip() == str(os.getpid()) and used.strip().isdigit():
            return int(used) * 2**20
    if torch.cuda.is_available():  # the only process on the card: all that is taken there is ours
        free, total = torch.cuda.mem_get_info()
        return total - free
    return None


def host_peak_bytes() -> int | None:
    """The largest resident set of this process so far."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except Exception:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
