"""Where, when and with what a row was measured, and the meters that no allocator has."""

import json
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

RUN_ID = os.environ.get("POROS_RUN_ID") or uuid4().hex[:12]
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")


def write_row(path: str | Path, /, **row: Any) -> dict[str, Any]:
    """Append ``row`` to the file at ``path``, completed by :func:`provenance`."""
    row |= provenance()
    with Path(path).open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def provenance(*packages: str) -> dict[str, Any]:
    """Run, time, GPU, driver, host, versions and commit. Unknown is null.

    Args:
        packages: whose versions to name besides the usual ones.
    """
    gpu: dict[str, Any] = dict.fromkeys(("gpu", "gpu_uuid", "driver", "link", "gpu_memory_bytes"))
    fields = "name,uuid,driver_version,pcie.link.gen.max,pcie.link.width.max,memory.total"
    answer = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if answer and torch.cuda.is_available():
        name, uuid, driver, generation, width, memory = (part.strip() for part in answer.splitlines()[0].split(","))
        gpu = {"gpu": name, "gpu_uuid": uuid, "driver": driver, "link": f"PCIe {generation} x{width}"}
        gpu["gpu_memory_bytes"] = int(memory) * 2**20 if memory.isdigit() else None
    return {
        "run_id": os.environ.get("POROS_RUN_ID") or RUN_ID,
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **gpu,
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), **{n: _version(n) for n in (*_PACKAGES, *packages)}},
        "poros_commit": os.environ.get("POROS_COMMIT") or _commit(),
    }


def process_bytes_on_card() -> int | None:
    """What this process takes on the card, context included, as the driver counts it; None if it cannot be told."""
    if not torch.cuda.is_available():
        return None
    answer = _output("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
    for line in (answer or "").splitlines():
        pid, _, used = line.partition(",")
        if pid.strip() == str(os.getpid()) and used.strip().isdigit():
            return int(used) * 2**20
    # In a container the driver may not know the process by our number. If it has the card for itself, all is ours.
    free, total = torch.cuda.mem_get_info()
    return total - free


def host_peak_bytes() -> int | None:
    """The largest resident set of this process so far."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), None)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that this file is in, marked if it was changed since."""
    folder = str(Path(__file__).parent)
    commit = _output("git", "-C", folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return commit + (
        "+changes" if _output("git", "-C", folder, "status", "--porcelain", "--untracked-files=no") else ""
    )


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
