"""How much host memory this process may still take, read from the kernel, and the refusal when that is too little.

``MemAvailable`` alone is not the answer: a container or a batch system limits the process through its control group,
and the kernel kills it there although the machine has memory left.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from poros.errors import ConfigError
from poros.units import format_bytes

# controller files of each cgroup version: limit, usage, and the line of memory.stat that counts reclaimable page cache
_CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True)
class HostMemory:
    """What the kernel says is left, in bytes."""

    available_bytes: int  # MemAvailable of the machine
    cgroup_left_bytes: int | None  # the tightest memory control group around this process; None: no limit

    @property
    def free_bytes(self) -> int:
        """What may still be taken: the smaller of the two."""
        if self.cgroup_left_bytes is None:
            return self.available_bytes
        return min(self.available_bytes, self.cgroup_left_bytes)

    def __str__(self) -> str:
        text = f"{format_bytes(self.available_bytes)} available on the machine"
        if self.cgroup_left_bytes is not None:
            text += f", {format_bytes(self.cgroup_left_bytes)} left in the control group"
        return text


def read_host_memory(root: Path = Path("/")) -> HostMemory | None:
    """Read ``proc`` and ``sys`` under ``root``; ``None`` where the kernel offers no ``/proc/meminfo``."""
    try:
        meminfo = (root / "proc/meminfo").read_text()
    except OSError:
        return None
    available = next((line for line in meminfo.splitlines() if line.startswith("MemAvailable:")), None)
    if available is None:
        return None
    left = [bytes_left for folder, files in _cgroups(root) if (bytes_left := _cgroup_left(folder, files)) is not None]
    return HostMemory(int(available.split()[1]) * 1024, min(left, default=None))


def require_host_memory(need_bytes: int, what: str, way_out: str, *, root: Path = Path("/")) -> None:
    """Raise :class:`ConfigError` unless ``need_bytes`` of host memory are free.

    Args:
        need_bytes: the peak that is about to be reached, on top of what the process has now.
        what: the subject of the message, for instance ``"loading Qwen/Qwen2.5-32B"``.
        way_out: a sentence that ends the message.
        root: where ``proc`` and ``sys`` are mounted.
    """
    memory = read_host_memory(root)
    if memory is not None and need_bytes > memory.free_bytes:
        raise ConfigError(
            f"{what} needs {format_bytes(need_bytes)} of host memory, "
            f"{format_bytes(need_bytes - memory.free_bytes)} more than is free ({memory}). {way_out}"
        )


def _cgroups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Every memory control group that holds this process, from its own up to the mounted root, in both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, files = root / "sys/fs/cgroup", _CGROUP_V2
        elif "memory" in controllers.split(","):
            mount, files = root / "sys/fs/cgroup/memory", _CGROUP_V1
        else:
            continue
        # Inside a container the path may name a group that only the host can see: what is not there is skipped.
        folder = mount / path.lstrip("/")
        for group in (folder, *folder.parents):
            yield group, files
            if group == mount:
                break


def _cgroup_left(folder: Path, files: tuple[str, str, str]) -> int | None:
    """Bytes that one control group has left, page cache counted as free; ``None`` when it sets no limit."""
    limit_file, usage_file, cache_line = files
    try:
        limit = (folder / limit_file).read_text().strip()
        usage = int((folder / usage_file).read_text())
    except OSError:
        return None
    if limit == "max" or int(limit) >= 1 << 62:  # version 1 writes "no limit" as a number of pages near 2**63 bytes
        return None
    try:
        stat = (folder / "memory.stat").read_text()
    except OSError:
        stat = ""
    cache = sum(int(line.split()[1]) for line in stat.splitlines() if line.split()[0] == cache_line)
    return max(0, int(limit) - usage + cache)
