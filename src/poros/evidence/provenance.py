"""Where, when and with what a row was measured, and the meters that no allocator has.

torch is imported only where there is a GPU to ask about: whoever plans a run reads where it is without it.
"""

import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from uuid import uuid4

RUN_ID = os.environ.get("POROS_RUN_ID") or uuid4().hex[:12]
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")


def provenance(*packages: str) -> dict[str, Any]:
    """Run, time, GPU, driver, host, versions, and the commit when this was first asked for. Unknown is null.

    Args:
        packages: whose versions to name besides the usual ones.
    """
    return _provenance(packages, None, _loaded_commit())


def provenance_of_new_process(packages: Sequence[str] = (), folder: str | None = None) -> dict[str, Any]:
    """What :func:`provenance` would say in a process that is started now, with ``folder`` first on its path."""
    return _provenance(packages, folder, _commit())


def _provenance(packages: Sequence[str], folder: str | None, commit: str | None) -> dict[str, Any]:
    return {
        "run_id": os.environ.get("POROS_RUN_ID") or RUN_ID,
        "time_utc": time.strftime(TIME_FORMAT, time.gmtime()),
        **_gpu(),
        "host": _host(),
        "versions": {"python": platform.python_version(), **{n: _version(n, folder) for n in (*_PACKAGES, *packages)}},
        "poros_commit": os.environ.get("POROS_COMMIT") or commit,
    }


def unix_time(time_utc: str) -> float:
    """The time that :func:`provenance` wrote; ValueError if it is none."""
    return datetime.strptime(time_utc, TIME_FORMAT).replace(tzinfo=UTC).timestamp()


def process_bytes_on_card() -> int | None:
    """What this process takes on the card, context included, as the driver counts it; None if it cannot be told."""
    import torch

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


def _gpu() -> dict[str, Any]:
    """The first GPU, as its driver describes it; nothing known of it if torch sees none."""
    unknown: dict[str, Any] = dict.fromkeys(("gpu", "gpu_uuid", "driver", "link", "gpu_memory_bytes"))
    fields = "name,uuid,driver_version,pcie.link.gen.max,pcie.link.width.max,memory.total"
    answer = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if not answer:
        return unknown
    import torch

    if not torch.cuda.is_available():
        return unknown
    name, uuid, driver, generation, width, memory = (part.strip() for part in answer.splitlines()[0].split(","))
    num_bytes = int(memory) * 2**20 if memory.isdigit() else None
    link = f"PCIe {generation} x{width}"
    return {"gpu": name, "gpu_uuid": uuid, "driver": driver, "link": link, "gpu_memory_bytes": num_bytes}


def _host() -> str:
    """Kind of processor and number of cores: ``"x86_64, 16 cores, Some CPU at 2 GHz"``."""
    host = f"{platform.machine()}, {os.cpu_count()} cores"
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return host
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{host}, {model}" if model else host


def _version(package: str, folder: str | None) -> str | None:
    path = sys.path if folder is None else [folder, *sys.path]
    return next((found.version for found in distributions(name=package, path=path)), None)


@lru_cache(maxsize=1)
def _loaded_commit() -> str | None:
    """The commit of what this process has loaded: later edits do not change that."""
    return _commit()


def _commit() -> str | None:
    """The commit of the checkout that this file is in; of a changed one ``COMMIT+HASH``, the hash of its changes."""
    folder = str(Path(__file__).parent)
    if not _output("git", "-C", folder, "ls-files", "--error-unmatch", Path(__file__).name):
        return None  # installed, perhaps below a checkout of something else
    commit, root = (_output("git", "-C", folder, "rev-parse", what) for what in ("HEAD", "--show-toplevel"))
    if not commit or not root:
        return None
    changes = _changes(Path(root))
    return commit if changes is None else f"{commit}+{changes}"


def _changes(root: Path) -> str | None:
    """Eight hex digits that stand for what is not committed: changes, and new Python files of the package."""
    changed = _output(
        "git", "-C", str(root), "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", "--no-color"
    )
    listed = _output("git", "-C", str(root), "ls-files", "-z", "--others", "--exclude-standard", "--", "src/*.py")
    new = sorted(name for name in (listed or "").split("\0") if name)
    if not changed and not new:
        return None
    digest = hashlib.sha256((changed or "").encode(errors="surrogateescape"))
    for name in new:
        digest.update(name.encode(errors="surrogateescape") + b"\0" + (root / name).read_bytes())
    return digest.hexdigest()[:8]


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="surrogateescape", timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
